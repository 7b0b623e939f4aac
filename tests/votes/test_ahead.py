"""A first batch that is settled late: later ones are launched before, and everything comes out as if they were not."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradfix import collect_votes
from gradfix.errors import DataError
from gradfix.votes import collect as collecting, tally
from gradfix.votes.batched import forms, kernels
from gradfix.votes.engines import auto
from gradfix.votes.resume import PartialVote
from votes.test_auto import Couple, a_queue, changing_places, partners
from votes.vote_cases import assert_equal_votes, image_loss, make_case, votes_of

Batch = dict[str, Tensor]
AGREES = ("engine batched: agrees with the loop on the first batch.",)


@pytest.fixture
def alongside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a device that computes while the host goes on."""
    monkeypatch.setattr(auto, "works_alongside", lambda device: True)


def plain(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x).tanh()


def couple(meddle: Callable[[nn.Linear, Tensor], Tensor] = plain) -> nn.Module:
    torch.manual_seed(0)
    return Couple(meddle).double()


def batches_of(count: int, samples: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    return [{"x": torch.randn(samples, 6, dtype=torch.double), "y": torch.arange(samples) % 3} for _ in range(count)]


class Reads(TorchDispatchMode):
    """Notes whenever the host asks a device for a value."""

    asks = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.asks:
            self.events.append("wait")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Waits for the device, and values that were sent and are read; products are counted as a GPU counts them."""
    found: list[str] = []
    later = auto.values_later

    def noted(tensors: Any) -> Callable[[], Any]:
        found.append("ask")
        read = later(tensors)
        return lambda: (found.append("read"), read())[1]

    tolist = Tensor.tolist
    monkeypatch.setattr(auto, "values_later", noted)
    monkeypatch.setattr(Tensor, "tolist", lambda self: (found.append("tolist"), tolist(self))[1])
    monkeypatch.setattr(kernels, "fold_product", lambda *given: (kernels.fold_chunks(*given), True)[1])
    with Reads(found):
        yield found


@pytest.mark.parametrize("family", ["vit", "timm", "couple"])
def test_the_device_is_not_waited_for_before_others_are_launched(
    alongside: None, events: list[str], family: str
) -> None:
    model, loss, batches = couple(), image_loss, batches_of(6)
    if family != "couple":
        model, loss, batch = make_case(family)
        batches = [batch] * 6
    size = len(next(iter(batches[0].values())))

    def noted(model: nn.Module, batch: Batch) -> Tensor:
        samples = len(next(iter(batch.values())))
        events.append("pass" if samples == size and torch.is_grad_enabled() else "look" if samples > 1 else "sample")
        return loss(model, batch)

    events.clear()
    found = collect_votes(model, noted, batches)
    assert found.notes == AGREES
    waits = ["look", "look", "pass", "pass", "sample", "sample", "ask", "pass", "pass", "read"]
    assert events[: len(waits)] == waits
    assert events.count("pass") == len(batches) and events.count("sample") == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_number_of_batches_from_a_generator_is_asked_for_once(alongside: None, count: int) -> None:
    asked: list[int] = []

    def generate() -> Iterator[Batch]:
        for number, batch in enumerate(batches_of(count)):
            asked.append(number)
            yield batch

    done: list[int] = []
    model = couple()
    found = collect_votes(model, image_loss, generate(), progress=done.append)
    assert asked == list(range(count)) and done == [8] * count and found.count == 8 * count
    assert found.notes == AGREES
    assert_equal_votes(votes_of(model, image_loss, batches_of(count), "loop"), dict(found))


@pytest.mark.parametrize("wrong", [False, True])
def test_batches_that_are_written_over_are_still_themselves(
    alongside: None, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """A loader may fill the same memory again, even past torch."""
    model, right = couple(), votes_of(couple(), image_loss, batches_of(6), "loop")
    if wrong:
        fold = forms.Product.fold
        monkeypatch.setattr(forms.Product, "fold", lambda self, votes: (fold(self, votes), votes.neg_()))

    def refilled() -> Iterator[Batch]:
        own = {name: torch.empty_like(value) for name, value in batches_of(1)[0].items()}
        for batch in batches_of(6):
            for name, value in batch.items():
                own[name].numpy()[...] = value.numpy()
            yield own

    found = collect_votes(model, image_loss, refilled())
    assert (found.notes != AGREES) == wrong
    assert_equal_votes(right, dict(found))


def outcome(model: nn.Module, batches: Any, **more: Any) -> tuple[Any, ...]:
    """Everything a user sees of a vote."""
    done: list[int] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            votes = collect_votes(copy.deepcopy(model), image_loss, batches, progress=done.append, **more)
        except Exception as error:
            return type(error), str(error), tuple(done)
    told = [str(warning.message) for warning in seen]
    return votes.count, votes.notes, told, tuple(done), {name: own.tolist() for name, own in votes.items()}


def spoiled(*places: tuple[int, int], count: int = 6, samples: int = 100) -> list[Batch]:
    """Batches with some samples that have no finite loss."""
    found = batches_of(count, samples)
    for batch, sample in places:
        found[batch]["x"][sample, 0] = torch.nan
    return found


class Unlike(nn.Module):
    """Operations that depend on the size, or on the values, of a batch."""

    def __init__(self, other: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.beside, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), other

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.beside(x) if self.other(x) else self.layer(x)
        return self.head(hidden.tanh())


def longer(batches: list[Batch]) -> list[Batch]:
    return [{"x": b["x"][:, None].repeat(1, 1 + n % 2, 1).sum(1), "y": b["y"]} for n, b in enumerate(batches)]


def sometimes_fewer(batches: list[Batch]) -> list[Batch]:
    return [{name: value[: 8 - n] for name, value in batch.items()} for n, batch in enumerate(batches)]


SCENES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mixing": lambda: (couple(partners), batches_of(6)),
    "a queue": lambda: (couple(a_queue), batches_of(6, 40)),
    "other gradients": lambda: (couple(changing_places), batches_of(6)),
    "odd in the first": lambda: (couple(), spoiled((0, 3))),
    "odd in the second": lambda: (couple(), spoiled((1, 3))),
    "odd in the fourth": lambda: (couple(), spoiled((3, 99))),
    "odd in the fifth": lambda: (couple(), spoiled((4, 0))),
    "too many odd in the first": lambda: (couple(), spoiled((0, 3), (0, 4))),
    "too many odd in the second": lambda: (couple(), spoiled((1, 3), (1, 4), (1, 5))),
    "odd in both": lambda: (couple(), spoiled((0, 3), (1, 4))),
    "all odd in the first": lambda: (couple(), spoiled(*((0, place) for place in range(100)))),
    "smaller batches": lambda: (couple(), sometimes_fewer(batches_of(7))),
    "one sample at the end": lambda: (couple(), [*batches_of(2), *batches_of(1, 1)]),
    "one sample at first": lambda: (couple(), [*batches_of(1, 1), *batches_of(3)]),
    "lengths": lambda: (couple(), longer(batches_of(5))),
    "another branch": lambda: (Unlike(lambda x: bool(x.sum() > 0)).double(), batches_of(6)),
    "not a batch": lambda: (couple(), [*batches_of(2), {"x": torch.zeros(3, 6), "y": torch.zeros(4)}]),
    "other features": lambda: (couple(), [*batches_of(2), {"x": torch.zeros(3, 5).double(), "y": torch.zeros(3).long()}]),
    "nothing": lambda: (couple(), []),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_everything_is_as_if_batches_came_one_after_the_other(monkeypatch: pytest.MonkeyPatch, scene: str) -> None:
    torch.manual_seed(0)
    model, batches = SCENES[scene]()
    expected = outcome(model, batches)
    monkeypatch.setattr(auto, "works_alongside", lambda device: True)
    assert outcome(model, batches) == expected
    assert outcome(model, iter(batches)) == expected


@pytest.mark.parametrize("broken", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("again", [False, True])
def test_a_pass_that_fails_while_others_wait(
    alongside: None, monkeypatch: pytest.MonkeyPatch, broken: int, again: bool
) -> None:
    """One that fails for lack of memory may go well with the trial's memory free; else its own error is raised."""
    fold, passes = forms.Product.fold, list[int]()
    batches, model = batches_of(6), couple()
    place = {float(batch["x"][0, 0]): number for number, batch in enumerate(batches)}

    def breaking(self: forms.Product, votes: Tensor) -> None:
        number = place.get(float(self.right[0, 0, 0]))
        if number == broken and self.samples == 8 and (again or broken not in passes):
            passes.append(broken)
            raise torch.OutOfMemoryError(f"in {number}")
        fold(self, votes)

    right = votes_of(model, image_loss, batches, "loop")
    monkeypatch.setattr(forms.Product, "fold", breaking)
    if again or broken == 4:  # the fifth comes when the first is settled
        with pytest.raises(torch.OutOfMemoryError, match=f"in {broken}"):
            collect_votes(model, image_loss, batches)
    else:
        assert_equal_votes(right, dict(collect_votes(model, image_loss, batches)))
        assert passes


@pytest.mark.parametrize("after", [1, 2, 5])
def test_errors_of_the_data_come_after_those_of_earlier_batches(alongside: None, after: int) -> None:
    def generate(batches: list[Batch]) -> Iterator[Batch]:
        yield from batches[:after]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        collect_votes(couple(), image_loss, generate(batches_of(5)))
    with pytest.raises(DataError, match="2 of 100 samples"):
        collect_votes(couple(), image_loss, generate(spoiled((0, 3), (0, 4))))
    with pytest.raises(KeyboardInterrupt):
        collect_votes(couple(), image_loss, (_interrupt() if n == 1 else b for n, b in enumerate(batches_of(3))))


def _interrupt() -> Batch:
    raise KeyboardInterrupt


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_saved_is_settled(
    alongside: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: bool
) -> None:
    model, batches, saved = couple(), batches_of(5), list[dict[str, Tensor]]()
    rights = [votes_of(model, image_loss, batches[: count + 1], "loop") for count in range(5)]
    if wrong:
        fold = forms.Product.fold
        monkeypatch.setattr(forms.Product, "fold", lambda self, votes: (fold(self, votes), votes.neg_()))
    save = PartialVote.save

    def noted(self: PartialVote, tally: Any, *given: Any) -> None:
        saved.append({name: buffer.clone() for name, buffer in tally.items()})
        save(self, tally, *given)

    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(PartialVote, "save", noted)
    found = collect_votes(model, image_loss, batches, checkpoint=tmp_path / "partial")
    assert len(saved) == 5
    for right, own in zip(rights, saved):
        assert_equal_votes(right, own)
    assert_equal_votes(rights[-1], dict(found))


def test_progress_is_told_of_what_is_settled(alongside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    settle = auto.Hope.settle
    monkeypatch.setattr(auto.Hope, "settle", lambda self: (told.append("settled"), settle(self))[1])
    collect_votes(couple(), image_loss, batches_of(5), progress=lambda samples: told.append("progress"))
    assert told == ["settled"] + ["progress"] * 5


def test_only_batches_that_can_be_kept_are_run_ahead(alongside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        """Something whose inside nobody can copy."""

    begun: list[Any] = []
    hope = collecting.hope
    monkeypatch.setattr(collecting, "hope", lambda *given: (begun.append(given), hope(*given))[1])
    collect_votes(couple(), image_loss, [{**batch, "own": Own()} for batch in batches_of(3)])
    assert not begun
    collect_votes(couple(), image_loss, [{**batch, "own": "text"} for batch in batches_of(3)])
    assert len(begun) == 1


def test_counts_that_were_widened_are_let_go(monkeypatch: pytest.MonkeyPatch, alongside: None) -> None:
    """Small weights are counted together at the end of a pass, through views of what all weights share."""
    monkeypatch.setattr(tally, "lies_with_others", lambda parameter: True)
    monkeypatch.setattr(kernels, "sees", lambda tensor: True)
    monkeypatch.setattr(
        kernels, "fold_rows", lambda values, votes: [forms.Dense(one).fold(own) for one, own in zip(values, votes)]
    )
    held: list[set[int]] = []
    model, batches = couple(), batches_of(8, samples=100)

    def narrow() -> set[int]:
        """Where counts of eight bits lie."""
        found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.dtype is torch.int8]
        return {t.untyped_storage().data_ptr() for t in found if t.untyped_storage().nbytes() >= SHELF}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        held.append(narrow())
        return image_loss(model, batch)

    gc.collect()
    others = narrow()  # of other tests
    collect_votes(model, loss, batches)
    assert held[1] - others
    for passed in held[2:]:  # the first look and the first pass come before
        assert not passed - others


SHELF = 256  # bytes of the smallest one
