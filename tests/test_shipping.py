"""A verdict's command makes the model the verdict speaks of."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradfix.cli import run
from gradfix.comparison.methods import METHODS
from gradfix.errors import UsageError
from gradfix.workflows.configs import CompareConfig, TransportConfig
from gradfix.workflows.shipping import SHIPPED, ship_command, spelled_out
from tests.stage import setup

INPUTS = {
    "base": "old-base",
    "tuned": "my-fine-tune",
    "target": "new-base",
    "data": "my-data",
    "task": "zero-shot",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipping")
    setup("readme", folder)
    return folder


def transport(out: str, *options: str) -> dict[str, torch.Tensor]:
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    code = run(
        ["transport", *words, "--shots", "2", "--alpha", "0.5", "--force", "--out", out, *options, "-q"]
    )
    assert code == 0
    return load_file(f"{out}/model.safetensors")


def test_every_shipped_method_is_one_of_compare() -> None:
    import gradfix.comparison.running  # noqa: F401  fills the registry

    assert set(SHIPPED) <= set(METHODS)


@pytest.mark.parametrize(
    ("method", "options"), [("naive", ["--mask", "none"]), ("gradfix_mean", ["--vote", "mean"])]
)
def test_a_method_by_name_is_the_transport_with_its_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: list[str]
) -> None:
    monkeypatch.chdir(folder)
    named, spelled = transport(f"{method}-1", "--method", method), transport(f"{method}-2", *options)
    assert all(torch.equal(named[name], spelled[name]) for name in named)


def test_a_mask_beside_another_method_is_refused() -> None:
    config = TransportConfig(**INPUTS, out="out", method="veto", mask="force")
    with pytest.raises(UsageError, match="--method veto means --mask veto: leave --mask out"):
        spelled_out(config)
    with pytest.raises(
        UsageError, match="no method called 'few_shot' can be shipped; there are: mask, best, naive"
    ):
        spelled_out(TransportConfig(**INPUTS, out="out", method="few_shot"))


def test_the_verdict_says_how_to_ship_it() -> None:
    config = CompareConfig(**INPUTS, shots=(2, 8), seeds=(0, 1), report="page.html", validation="none")
    verdict = {"method": "veto", "transport": True, "shots": 8}
    command = ship_command(config, verdict)
    assert command is not None
    words = shlex.split(command)
    assert words[:2] == ["gradfix", "transport"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        **{f"--{name}": value for name, value in INPUTS.items()},
        "--shots": "8", "--method": "veto", "--validation": "none", "--out": "OUT",
    }  # fmt: skip
    assert ship_command(config, {**verdict, "transport": False}) is None
    assert ship_command(config, {**verdict, "method": "veto_polish"}) is None
