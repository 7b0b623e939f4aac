"""A merge that is killed goes on after the last whole tensor and gives the same bits, statistics included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gradfix
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.vectors.signvotes import SignVotes
from tests.scale.interrupting import content, interrupt

SHAPES = {"a": (40, 50), "b": (7,), "c": (60, 50), "d": (30, 50), "e": (3, 3)}
BYTES = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 4
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "ties": {"density": 0.3},
    "dare_ties": {"density": 0.5, "seed": 3},
    "della": {"density": 0.5, "seed": 3},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for module in (
        "merging.bundles",
        "merging.differences",
        "stream.updates",
        "stream.pipeline",
        "vectors.transported",
    ):
        monkeypatch.setattr(f"gradfix.{module}.CHUNK", 100)
    draw = torch.Generator().manual_seed(0)

    def save(name: str, state: dict[str, Tensor]) -> Path:
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors", {"format": "pt"})
        return tmp_path / name

    base = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    home = save("base", base)
    tuned = [
        save(f"tuned{i}", {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in base.items()})
        for i in range(3)
    ]
    for number in range(3):
        signs = {n: torch.randint(-3, 4, s, generator=draw).to(torch.int8) for n, s in SHAPES.items()}
        SignVotes(signs, 3).save(tmp_path / f"votes{number}.safetensors")
    target = {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in base.items()}
    vectors = [Vector(home, folder, weight=1.0 + i) for i, folder in enumerate(tuned)]
    return {"target": save("target", target), "vectors": vectors, "alpha": 0.7}


def voting(job: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    vectors = [
        Vector(v.base, v.tuned, tmp_path / f"votes{i}.safetensors", v.weight)
        for i, v in enumerate(job["vectors"])
    ]
    return {**job, "vectors": vectors}


def check(job: dict[str, Any], tmp_path: Path, limit: int, how: str) -> None:
    merge_checkpoints(**job, out=tmp_path / "whole")
    out = tmp_path / "out"
    interrupt(lambda progress: merge_checkpoints(**job, out=out, progress=progress), limit, how)
    assert not out.exists()
    steps: list[int] = []
    report = merge_checkpoints(**job, out=out, progress=steps.append)
    assert content(out) == content(tmp_path / "whole")
    assert gradfix.verify(out)["counts"]["transported"] == report.transported == len(SHAPES)
    assert sum(steps) == BYTES
    if limit > 9_000:  # tensors a and b were whole and are not computed again
        assert steps[0] >= 4 * (40 * 50 + 7)
    assert not list(tmp_path.glob(".out.gradfix*"))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize("limit", [1, 12_000, BYTES])
@pytest.mark.parametrize("method", list(METHODS))
def test_an_interrupted_merge_goes_on_with_the_same_bits(job, tmp_path, method, limit, how):
    check({**job, "method": method, **METHODS[method]}, tmp_path, limit, how)


@pytest.mark.parametrize("order", ["mask_then_merge", "merge_then_mask"])
def test_votes_are_part_of_an_interrupted_merge(job, tmp_path, order):
    check({**voting(job, tmp_path), "method": "mean", "order": order}, tmp_path, 12_000, "SIGKILL")


@pytest.mark.parametrize(
    "changes", [{"method": "mean"}, {"alpha": 0.5}, {"density": 0.5}, {"order": "mask_then_merge"}]
)
def test_another_merge_starts_again(job, tmp_path, changes):
    job = {**job, "method": "ties", "density": 0.3}
    interrupt(
        lambda progress: merge_checkpoints(**job, out=tmp_path / "out", progress=progress), 12_000, "SIGINT"
    )
    other = {**(voting(job, tmp_path) if "order" in changes else job), **changes}
    if other["method"] == "mean":
        del other["density"]
    steps: list[int] = []
    merge_checkpoints(**other, out=tmp_path / "out", progress=steps.append)
    merge_checkpoints(**other, out=tmp_path / "whole")
    assert steps[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_statistics_say_how_much_they_read(job, tmp_path):
    read: list[int] = []
    merge_checkpoints(**job, out=tmp_path / "a", method="ties", counting=read.append)
    assert sum(read) == 2 * 4 * BYTES  # two walks over a base and three fine-tunes
    merge_checkpoints(**job, out=tmp_path / "b", method="mean", counting=read.append)
    assert sum(read) == 2 * 4 * BYTES
