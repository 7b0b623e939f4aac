"""Interrupted work goes on and ends in the same bits, and never from a state of other inputs or settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradfix
from gradfix.data import load_data
from gradfix.errors import CorruptInput
from gradfix.votes.engines.passes import samples
from tests.reliability.world import World, rewrite, say
from tests.scale.interrupting import interrupt
from tests.torture.crashes import relative, three

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


def test_finished_shards_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted transport goes on after its last finished shard and ends in the same bits."""
    import gradfix.stream.pipeline

    roles = three(tmp_path)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "whole")
    written: list[int] = []

    def dying(amount: int) -> None:
        written.extend([amount] * bool(amount))
        if len(written) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out", progress=dying)
    assert not (tmp_path / "out").exists()
    begun: list[str] = []
    real = gradfix.stream.pipeline.Pipeline._tensor
    monkeypatch.setattr(
        gradfix.stream.pipeline.Pipeline, "_tensor", lambda self, *which: begun.append(which[1]) or real(self, *which)
    )
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    assert len(begun) == 5 - len(written)
    assert relative(tmp_path / "out") == relative(tmp_path / "whole")
    assert not list(tmp_path.glob(".out*"))


def test_a_changed_input_is_not_taken_for_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gradfix.stream.pipeline

    roles = three(tmp_path)
    real, calls = gradfix.stream.pipeline.Pipeline._tensor, iter(range(100))

    def dying(self, file, name, *rest):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(self, file, name, *rest)

    monkeypatch.setattr(gradfix.stream.pipeline.Pipeline, "_tensor", dying)
    with pytest.raises(KeyboardInterrupt):
        gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    state = load_file(roles["tuned"] / "model.safetensors")
    rewrite(roles["tuned"], {"layer.bias": state["layer.bias"] + 0.05})
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "fresh")
    assert relative(tmp_path / "out") == relative(tmp_path / "fresh")


def _lora(world: World) -> Path:
    from tests.reliability.faults import adapter

    return adapter(world)


def _larger_vocabulary(world: World) -> Path:
    path, table = world.target / "tokenizer.json", "embeddings.word_embeddings.weight"
    content = json.loads(path.read_text())
    rows = load_file(world.target / "model.safetensors")[table]
    content["model"]["vocab"] |= {f"new{number}": len(rows) + number for number in range(3)}
    path.write_text(json.dumps(content))
    rewrite(world.target, {table: torch.cat([rows, rows[:3]])})
    return world.tuned


@pytest.mark.parametrize(
    "tuned_of", [lambda world: world.tuned, _lora, _larger_vocabulary], ids=["one file", "adapter", "larger vocabulary"]
)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_one_file_adapters_and_matched_rows_go_on_too(
    world: World, how: str, tuned_of: Callable[[World], Path]
) -> None:
    """After half of the one output file; the rest is not all of it, and the bits are those of one go."""
    tuned = tuned_of(world)
    size = (world.target / "model.safetensors").stat().st_size

    def work(out: str, progress: Callable[[int], None] | None = None) -> None:
        gradfix.transport_checkpoint(
            base=world.base, tuned=tuned, target=world.target, mask="none", force=True, out=world.home / out,
            progress=progress,
        )  # fmt: skip

    work("whole")
    interrupt(lambda progress: work("cut", progress), size // 2, how)
    assert not (world.home / "cut").exists()
    steps: list[int] = []
    work("cut", steps.append)
    assert steps[0] > size // 4, "what was on disk was written again"
    assert relative(world.home / "cut") == relative(world.home / "whole")


def test_a_resumed_vote_keeps_engine_samples_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch holds one sample: chosen anew there, the engine would be another one."""
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(301, 3)
    x[7] = float("nan")
    batches = [{"x": x[i : i + 150]} for i in range(0, 301, 150)]

    def loss(m: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return m(batch["x"]).square().mean(1)

    whole = gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "a")
    calls = iter(range(100))

    def dying(amount: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "b", progress=dying)
    again = gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "b")
    assert again.notes == whole.notes and any("sample 7: loss is nan" in note for note in again.notes)
    assert again.count == whole.count == 300
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_frozen_weight_is_part_of_a_votes_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 1))
    model[1].requires_grad_(False)
    batches = [torch.ones(2, 2), torch.zeros(2, 2) + 0.5]
    calls = iter(range(9))

    def dying(amount: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).squeeze(1)

    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "p", progress=dying)
    with torch.no_grad():
        model[1].weight[0, 99] += 1  # far from the first entries
    with pytest.raises(CorruptInput, match="belongs to another vote"):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "p")


def test_compare_keeps_units_of_other_task_settings_apart(world: World) -> None:
    """Pooling changes every number: a work folder of one must not answer for the other."""
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.trial import Passes
    from gradfix.tasks.zero_shot import ZeroShot

    def identity(**options: object) -> dict:
        data = load_data(world.data)
        request = Request(
            base=world.base, tuned=world.tuned, target=world.target, data=data, validation="none", finetune=False,
            task=ZeroShot(data.labels, **options), passes=Passes(batch_size=4, engine="loop"),
        )  # fmt: skip
        return Opened(request).identity

    assert identity() == identity()
    assert identity() != identity(pooling="cls")
    assert identity() != identity(max_length=3)


def test_a_resumed_mean_vote_asks_no_sample_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of reals depend on their order: the saved sums go on in the same one, to the same bits."""
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batches = [torch.randn(2, 3) * 10**i for i in range(5)]
    asked: list[int] = []

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean(1)

    def dying(amount: int) -> None:
        asked.append(amount)
        if len(asked) == 3:
            raise KeyboardInterrupt

    whole = gradfix.collect_votes(model, loss, batches, vote="mean")
    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(model, loss, batches, vote="mean", checkpoint=part, progress=dying)
    saved = load_file(part)
    assert all(tensor.dtype == torch.float32 and tensor.any() for tensor in saved.values())
    with pytest.raises(CorruptInput, match="belongs to another vote"):
        gradfix.collect_votes(model, loss, batches, vote="majority", checkpoint=part)
    again = gradfix.collect_votes(model, loss, batches, vote="mean", checkpoint=part, progress=asked.append)
    assert sum(asked) == 10 + 2  # only the batch of the interruption is asked again
    assert (again.count, again.rule) == (whole.count, whole.rule) == (10, "mean")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_the_command_goes_on_with_a_mean_vote(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    out, whole = world.home / "votes.safetensors", world.home / "whole.safetensors"
    options = {"vote": "mean", "batch_size": 1, "engine": "loop"}
    assert say(world.arguments("vote", out=whole, **options)).code == 0
    monkeypatch.setattr("gradfix.votes.collect.samples", _interrupting(samples, 3))
    said = say(world.arguments("vote", out=out, **options))
    assert said.code == 130 and "To go on: gradfix vote" in said.err
    assert (world.home / ".votes.safetensors.part").is_file() and not out.exists()
    monkeypatch.setattr("gradfix.votes.collect.samples", samples)
    assert say(world.arguments("vote", out=out, **options)).code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not (world.home / ".votes.safetensors.part").exists()


def _interrupting(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = iter(range(1000))

    def interrupting(*given: Any) -> Any:
        if next(calls) == after:
            raise KeyboardInterrupt
        return function(*given)

    return interrupting


def test_another_engine_does_not_go_on_with_a_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines round differently: half a vote by one and half by the other is the vote of neither."""
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    model, batches = nn.Linear(3, 2), [torch.randn(2, 3) for _ in range(3)]

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean(1)

    gradfix.collect_votes(model, loss, batches, engine="loop", checkpoint=tmp_path / "part")
    with pytest.raises(CorruptInput, match="belongs to another vote.*--no-resume"):
        gradfix.collect_votes(model, loss, batches, engine="batched", checkpoint=tmp_path / "part")
