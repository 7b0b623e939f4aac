"""Shared set-up: offline, quiet, one thread per worker, no stray plug-ins."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from gradfix._compat import heal_torchvision
from gradfix.system import processes

heal_torchvision()
# Processes that share a job come from one that has imported everything: a start takes milliseconds, not seconds.
processes.START = "forkserver"
multiprocessing.set_forkserver_preload(["tests.preloaded"])
torch.set_num_threads(1)
MANY = 5  # collections of the middle generation: some 35 thousand objects more than before
settings.register_profile(
    "gradfix",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("gradfix")


@pytest.fixture(scope="session", autouse=True)
def _others_are_forked_from_here() -> None:
    """Begun where `tests` can be imported; tests go elsewhere."""
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _stages_are_built_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the folder above those of the workers, where there are several."""
    from tests import stage

    base = tmp_path_factory.getbasetemp()
    stage.share((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "stages")


@pytest.fixture(autouse=True)
def _what_is_imported_is_no_garbage() -> None:
    """A million objects of torch and transformers are not looked through again in every collection."""
    if gc.get_count()[2] >= MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that ask what is written and said, not how well it was learned."""
    from tests.lessons import shorten

    shorten(monkeypatch.setitem)
