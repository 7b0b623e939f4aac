"""A transport that is killed goes on after the last whole tensor and gives the same bits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gradfix
from gradfix.checkpoints.interrupted import JOURNAL
from gradfix.system.meter import Meter
from gradfix.vectors.signvotes import SignVotes
from tests.adapters import load, train_adapter
from tests.scale.interrupting import content, interrupt
from tests.tiny import save_tiny

SHAPES = {"a": (40, 50), "b": (7,), "c": (60, 50), "d": (30, 50), "e": (3, 3)}
BYTES = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 4


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr("gradfix.stream.updates.CHUNK", 50)
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    states = {
        "base": base,
        "tuned": {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in base.items()},
        "target": {n: t + torch.randn(t.shape, generator=draw) for n, t in base.items()},
    }
    for role, state in states.items():
        (tmp_path / role).mkdir()
        files = [list(SHAPES)] if role != "target" else [["a", "b", "c"], ["d", "e"]]
        index = {}
        for number, names in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number}-of-2.safetensors"
            save_file({n: state[n] for n in names}, tmp_path / role / file, {"format": "pt"})
            index |= dict.fromkeys(names, file)
        if len(files) > 1:
            text = json.dumps({"metadata": {}, "weight_map": index})
            (tmp_path / role / "model.safetensors.index.json").write_text(text)
    signs = {n: torch.randint(-3, 4, s, generator=draw).to(torch.int8) for n, s in SHAPES.items()}
    SignVotes(signs, 3).save(tmp_path / "votes.safetensors")
    return {**{role: tmp_path / role for role in states}, "votes": tmp_path / "votes.safetensors", "alpha": 0.6}


def _interrupt(job, out: Path, limit: int, how: str) -> None:
    interrupt(lambda progress: gradfix.transport_checkpoint(**job, out=out, progress=progress), limit, how)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize("limit", [1, 9_000, 12_000, 25_000, BYTES])
def test_an_interrupted_transport_goes_on_with_the_same_bits(job, tmp_path, limit, how):
    gradfix.transport_checkpoint(**job, out=tmp_path / "whole")
    out = tmp_path / "out"
    _interrupt(job, out, limit, how)
    assert not out.exists()
    steps: list[int] = []
    report = gradfix.transport_checkpoint(**job, out=out, progress=steps.append)
    assert content(out) == content(tmp_path / "whole")
    assert gradfix.verify(out)["counts"]["transported"] == report.transported == len(SHAPES)
    assert sum(steps) == BYTES
    if limit > 9_000:  # tensors a and b were whole and are not computed again
        assert steps[0] >= 4 * (40 * 50 + 7)
    assert not list(tmp_path.glob(".out.gradfix*"))


def test_the_number_of_workers_changes_nothing(job, tmp_path, monkeypatch):
    for cores in (1, 2, 9):
        monkeypatch.setattr("gradfix.system.processor.os.cpu_count", lambda cores=cores: cores)
        gradfix.transport_checkpoint(**job, out=tmp_path / f"on {cores}")
    whole = content(tmp_path / "on 1")
    assert content(tmp_path / "on 2") == content(tmp_path / "on 9") == whole
    _interrupt(job, tmp_path / "out", 12_000, "SIGKILL")
    gradfix.transport_checkpoint(**job, out=tmp_path / "out")
    assert content(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["bytes", "journal", "length"])
def test_a_damaged_beginning_is_written_again(job, tmp_path, damage):
    gradfix.transport_checkpoint(**job, out=tmp_path / "whole")
    _interrupt(job, tmp_path / "out", 12_000, "SIGINT")
    (staging,) = tmp_path.glob(".out.gradfix-*")
    begun = staging / "model-1-of-2.safetensors"
    if damage == "bytes":
        data = bytearray(begun.read_bytes())
        data[900] ^= 1
        begun.write_bytes(data)
    elif damage == "length":
        os.truncate(begun, 500)
    else:
        (staging / JOURNAL).write_bytes((staging / JOURNAL).read_bytes()[:-20] + b"\n{broken\n")
    gradfix.transport_checkpoint(**job, out=tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_other_settings_start_again(job, tmp_path):
    _interrupt(job, tmp_path / "out", 12_000, "SIGINT")
    other = {**job, "alpha": 0.3}
    steps: list[int] = []
    gradfix.transport_checkpoint(**other, out=tmp_path / "out", progress=steps.append)
    gradfix.transport_checkpoint(**other, out=tmp_path / "whole")
    assert steps[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_adapter_and_other_views_of_files_resume_too(tmp_path):
    """A LoRA folder, whose base carries another prefix than the target."""
    from safetensors.torch import load_file

    base = save_tiny("llama", tmp_path / "base", seed=0)
    target = save_tiny("llama", tmp_path / "target", seed=1)
    train_adapter(load(base, "CausalLM"), tmp_path / "lora", target_modules=["q_proj", "gate_proj"])
    bare = {n.removeprefix("model."): t for n, t in load_file(target / "model.safetensors").items()}
    save_file(bare, target / "model.safetensors", {"format": "pt"})
    job = {"base": base, "tuned": tmp_path / "lora", "target": target, "mask": "none"}
    gradfix.transport_checkpoint(**job, out=tmp_path / "whole")
    size = (target / "model.safetensors").stat().st_size
    _interrupt(job, tmp_path / "out", size // 2, "SIGKILL")
    steps: list[int] = []
    gradfix.transport_checkpoint(**job, out=tmp_path / "out", progress=steps.append)
    assert steps[0] > 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_meter_tells_bytes_and_time_left():
    said: list[str] = []
    now = iter([0.0, 0.1, 1.0, 2.0])
    meter = Meter(4 * 2**30, said.append, clock=lambda: next(now))
    for _ in range(4):
        meter(2**30)
    assert said == [
        "writing 1.00 of 4.00 GiB",
        "writing 3.00 of 4.00 GiB, 1 s left",  # two GiB in one second
        "writing 4.00 of 4.00 GiB",
    ]
    meter = Meter(None, said.append, "counting,", clock=lambda: 0.0)
    meter(2**29)
    assert said[-1] == "counting, 0.50 GiB"
