"""Recorded passes: the staging on any machine with a stand-in for the device, the recording itself on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradfix.errors import DataError
from gradfix.votes.batched import engine, recorded
from gradfix.votes.batched.engine import batched
from gradfix.votes.engines.loop import NotFinite, loop
from gradfix.votes.engines.passes import take
from gradfix.votes.tally import Tally
from votes.vote_cases import SAMPLES, image_loss, make_case, meaningful

PLAYED_BEFORE = 2  # the second batch again, for its votes and for the time it takes

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class StandIn:
    """Records by keeping the function and plays by calling it: what a device does, one launch at a time."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def capture(self, once: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        once()
        return lambda: self.play(once)

    def play(self, once: Callable[[], None]) -> None:
        self.played += 1
        once()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(recorded, "can_record", lambda _: True)
    monkeypatch.setattr(recorded, "capture", stand_in.capture)
    monkeypatch.setattr(engine, "WATCHED", 2)
    monkeypatch.setattr(recorded, "IDLE_SHARE", 1.0)
    monkeypatch.setattr(recorded.Recording, "seconds", lambda self: self.run() * 0.0)
    yield stand_in
    recorded._REPEATS.clear()


def batches_of(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Batches of one kind with different contents."""
    return [
        {name: value.roll(turn, 0) * (1 + turn * value.is_floating_point()) for name, value in batch.items()}
        for turn in range(count)
    ]


def tally_of(model: nn.Module, engine: Any, loss: Any, batches: list[Any]) -> Tally:
    tally = Tally(dict(model.eval().named_parameters()))
    for batch in batches:
        engine(model, loss, batch, tally)
    return tally


def assert_same(expected: Tally, found: Tally) -> None:
    assert expected.count == found.count
    for name, votes in expected.items():
        assert torch.equal(meaningful(name, votes), meaningful(name, found[name])), name


@pytest.mark.parametrize("family", ["vit", "llama", "t5", "gpt2", "open_clip"])
def test_equal_batches_are_recorded_and_played(device: StandIn, family: str) -> None:
    model, loss, batch = make_case(family)
    batches = batches_of(batch, 6)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert device.recorded == 1
    assert device.played == PLAYED_BEFORE + 4


def test_more_samples_than_eight_bits_count(device: StandIn) -> None:
    model, loss, batch = make_case("vit")
    wide = {name: value.repeat(27, *[1] * (value.ndim - 1)) for name, value in batch.items()}
    batches = batches_of(wide, 4)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert device.played == PLAYED_BEFORE + 2


def test_another_kind_of_batch_lets_go_of_the_recording(device: StandIn) -> None:
    model, loss, batch = make_case("vit")
    few = take(batch, slice(0, 3))
    batches = [*batches_of(batch, 4), few, few, *batches_of(batch, 2)]
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert device.recorded == 1
    assert recorded._REPEATS[model].recording is None


def test_moved_weights_are_never_played(device: StandIn) -> None:
    model, loss, batch = make_case("vit")
    tally_of(model, batched, loss, batches_of(batch, 4))
    model.classifier.weight.data = model.classifier.weight.data.flip(0).clone()
    batches = batches_of(batch, 2)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))


def test_a_loss_that_is_not_finite_counts_nothing(device: StandIn) -> None:
    model, loss, batch = make_case("vit")
    tally = tally_of(model, batched, loss, batches_of(batch, 4))
    before = {name: votes.clone() for name, votes in tally.items()}
    bad = {**batch, "x": batch["x"].clone()}
    bad["x"][1] = float("nan")
    with pytest.raises(NotFinite):
        batched(model, loss, bad, tally)
    assert tally.count == 4 * SAMPLES
    assert all(torch.equal(votes, before[name]) for name, votes in tally.items())
    from gradfix import collect_votes

    with pytest.raises(DataError, match="sample 21"):
        collect_votes(model, loss, [*batches_of(batch, 4), bad], engine="batched")


def test_a_loss_that_looks_elsewhere_is_refused(device: StandIn) -> None:
    """Its recording would repeat what it saw once: the check against another batch finds that."""
    model, _, batch = make_case("vit")
    sign = 1

    def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        return sign * image_loss(model, given)

    tally = Tally(dict(model.eval().named_parameters()))
    for turn, given in enumerate(batches_of(batch, 6)):
        sign = 1 if turn < 2 else -1
        batched(model, loss, given, tally)
    assert device.played == 1
    assert recorded._REPEATS[model].reason == "the recording does not repeat the votes"


def test_a_pass_that_cannot_be_recorded_runs_as_before(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(once: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded, "capture", fails)
    model, loss, batch = make_case("vit")
    batches = batches_of(batch, 5)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert "not permitted" in recorded._REPEATS[model].reason


def test_a_recording_that_is_slower_is_refused(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded.Recording, "seconds", lambda self: 1e9)
    model, loss, batch = make_case("vit")
    batches = batches_of(batch, 5)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert recorded._REPEATS[model].reason == "playing it takes longer than launching it"


def test_weights_outside_the_plan_are_not_recorded(device: StandIn) -> None:
    model, loss, batch = make_case("mixtral")
    batches = batches_of(batch, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    assert device.recorded == 0


def test_nothing_is_kept_after_a_vote(device: StandIn) -> None:
    from gradfix import collect_votes

    model, loss, batch = make_case("vit")
    collect_votes(model, loss, batches_of(batch, 5), engine="batched")
    assert device.played == PLAYED_BEFORE + 3
    assert model not in recorded._REPEATS


@needs_cuda
@pytest.mark.cuda
def test_cuda_recordings_repeat_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WATCHED", 2)
    monkeypatch.setattr(recorded, "IDLE_SHARE", 1.0)
    model, loss, batch = make_case("vit")
    model = model.cuda()
    batches = batches_of({name: value.cuda() for name, value in batch.items()}, 6)
    expected = tally_of(model, loop, loss, batches)
    found = tally_of(model, batched, loss, batches)
    known = recorded._REPEATS[model]
    assert known.recording is not None, known.reason
    wrong = sum(int((meaningful(n, v) != meaningful(n, found[n])).sum()) for n, v in expected.items())
    assert wrong <= 1e-3 * sum(votes.numel() for _, votes in expected.items())
    recorded.drop(model)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("watched", [True, False])
def test_cuda_passes_that_wait_are_not_recorded(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether seen beforehand or found out by a recording that breaks off, later work is not disturbed."""
    monkeypatch.setattr(engine, "WATCHED", 2)
    monkeypatch.setattr(recorded, "IDLE_SHARE", 1.0)
    model, _, batch = make_case("vit")
    model = model.cuda()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return image_loss(model, batch) * (1 if float(batch["x"].sum()) > -1e9 else 2)

    if not watched:
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    batches = batches_of({name: value.cuda() for name, value in batch.items()}, 5)
    assert_same(tally_of(model, loop, loss, batches), tally_of(model, batched, loss, batches))
    reason = recorded._REPEATS[model].reason
    assert reason.startswith("the pass waits") == watched, reason
    assert torch.rand(3, device="cuda").isfinite().all()
    recorded.drop(model)
