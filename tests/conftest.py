"""Shared set-up: offline, quiet, one thread per worker, no stray plug-ins."""

from __future__ import annotations

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

heal_torchvision()
torch.set_num_threads(1)
settings.register_profile(
    "gradfix",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("gradfix")


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
