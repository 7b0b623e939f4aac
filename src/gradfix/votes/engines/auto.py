"""engine="auto": the fastest engine that gives this model's votes, checked before it is trusted.

The batched engine votes on the first batch and counts its last sample once more; the loop takes these votes back, and what is
left must be rounding. The losses of the batch as a whole must be those of half of it and of single samples, or its samples
depend on each other. That is tried without a plan first, and where a device computes while the host goes on, a few more batches
are launched before the verdict is read; where it does not work out, a plan is made and the same asked of it
with two samples and both halves. Where something is wrong still, the batch is voted on again by the loop. The choice and its reason go into the notes of the votes.
What was found out holds for later calls with the same model, loss and kind of batch, as long as the plan does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import values_later, values_of
from gradfix.errors import DataError
from gradfix.system.modules import device_room
from gradfix.votes.batched.engine import batched, computed_in, plan_for, prepare, run_alike
from gradfix.votes.batched.first_pass import LEAST_SAMPLES, Mixed, learn, turns
from gradfix.votes.batched.passplan import NeedsLoop, Trust
from gradfix.votes.batched.recorded import PLAIN, BatchVote, copy_of
from gradfix.votes.engines.loop import CHECKED_SAMPLES, Engine, LoneCheck, LoopCheck, forward, loop
from gradfix.votes.engines.passes import (
    Batch,
    Loss,
    batch_size,
    every_second,
    leaves_of,
    map_tensors,
    one_sample,
    samples,
    take,
)
from gradfix.votes.tally import SpotCheck, Tally

FOLLOWING = 3  # batches that are launched before the first is settled
BEFORE_CHECK = 1  # of them: the device has work while the check is launched, and few counts wait for it
MEMORY_SHARE = 0.8
AGREES = "engine batched: agrees with the loop on the first batch."


@dataclass(frozen=True)
class ChosenEngine:
    """An engine, a note that says why, and what a sample takes of the device's memory where that is known."""

    engine: Engine
    note: str
    bytes_per_sample: float = 0.0


def choose(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> ChosenEngine:
    """The engine that is to be tried for this model and kind of batch."""
    size = batch_size(batch)
    if size < CHECKED_SAMPLES:
        return ChosenEngine(loop, "engine loop: the first batch holds one sample.")
    held = _allocated(tally)
    try:
        prepare(model, loss, ends(batch), tally)
    except NeedsLoop as reason:
        return ChosenEngine(loop, f"engine loop: {reason}.")
    except Exception as error:  # whatever a model does to the fast path, the loop still works
        return ChosenEngine(loop, f"engine loop: {_failed(error)}.")
    bytes_per_sample = (_peak(tally) - held) / CHECKED_SAMPLES + _written_down(model, loss, batch, tally)
    return _trusted(bytes_per_sample, size, tally)


def _trusted(bytes_per_sample: float, size: int, tally: Tally) -> ChosenEngine:
    return ChosenEngine(_in_parts(bytes_per_sample, size, tally), AGREES, bytes_per_sample)


def ends(batch: Batch) -> Batch:
    """The samples that are compared, copied: models may ask for views that others in between would forbid."""
    both = take(
        batch, slice(0, None, batch_size(batch) - 1)
    )  # a list of numbers would be sent, and the device waited for
    return map_tensors(torch.clone, both)


class Parts:
    """The losses of a batch, every second sample computed without the others; each half once, when it is asked for."""

    def __init__(self, look: Callable[[Batch], Tensor], batch: Batch) -> None:
        self.look, self.batch = look, batch
        self.known: dict[int, Tensor] = {}

    def turn(self, start: int) -> Tensor:
        """Of the samples from `start` on, the last one first."""
        if start not in self.known:
            self.known[start] = self.look(every_second(self.batch, start))
        return self.known[start]

    def losses(self) -> Tensor:
        if batch_size(self.batch) == 1:
            return self.look(self.batch)
        try:
            even, odd = (self.turn(start).flip(0) for start in (0, 1))
        except DataError:
            return self.look(self.batch)  # told of the whole batch
        losses = torch.cat([even, odd])
        losses[0::2], losses[1::2] = even, odd
        return losses


def fold_hoped(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, parts: Parts) -> ChosenEngine | None:
    """Fold the first batch of a tally without a plan, and give the engine if all that is asked of it holds.

    Else nothing is folded, whatever the reason was: a plan tells more. The device is waited for at the end alone."""
    hoped = hope(model, loss, batch, tally, parts)
    return None if hoped is None else hoped.settle()


def hope(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, parts: Parts) -> Hope | None:
    """Launch the first batch of a tally; None, and nothing is folded, where that does not go well."""
    size = batch_size(batch)
    if size < LEAST_SAMPLES or tally.count:
        return None
    try:
        return Hope(BatchVote(model, loss, batch, tally, size), parts)
    except Exception:  # what a model or its data do wrong is found again, and told
        tally.clear()
        return None


class Hope:
    """The first batch, folded without a plan, and a few that followed it: nothing of it counts until it is settled.

    Launching a check takes the host as long as a pass takes a device. So batches are launched before it and after it, and the
    device has work in the meantime; it is waited for by `settle` alone, and there for the check, not for the last batch. None comes in the
    middle of the check: all that autograd keeps of a sample would lie beside all that it keeps of a batch."""

    def __init__(self, asked: BatchVote, parts: Parts) -> None:
        size, tally, held = asked.count, asked.tally, _allocated(asked.tally)
        self.parts, self.again = parts, [parts.turn(start) for start in turns(size)]
        trial = _trial(tally, 1)
        self.asked = replace(asked, spot=SpotCheck(trial, (size - 1,)))
        self.learned = learn(self.asked)
        trial.put_away()  # it is not needed before the check, and passes come in between
        self.choice = _trusted((_peak(tally) - held) / size, size, tally)
        self.compared = LoneCheck(trial, self.learned.plan.dtype)
        self.finite: list[Callable[[], list[list[Any]]]] = []  # of those that followed
        self.told: Callable[[], list[list[Any]]] | None = None  # once the check is launched
        self.counts = True  # what was folded, as far as is known

    def follow(self, batch: Batch) -> bool:
        """Launch one more batch; False where it has to wait.

        What goes wrong on the way goes wrong again, or not, when all are folded anew."""
        if not self.counts or len(self.finite) == FOLLOWING or self.choice.engine is not batched:
            return False
        try:
            if self.told is None and len(self.finite) >= BEFORE_CHECK:
                self.told = self._ask()
            asked = replace(self.asked, batch=batch, count=batch_size(batch), spot=None)
            finite = run_alike(self.learned.plan, asked, self.asked)
            if finite is None:
                return False
            self.finite.append(finite)
        except Exception:
            self.counts = False
        return True

    def settle(self) -> ChosenEngine | None:
        """The engine, if all that is asked of it holds. Unless what was folded `counts` then, it is gone."""
        found = self._verdict()
        self.counts = self.counts and found is self.choice and all(finite() == [[True]] for finite in self.finite)
        if not self.counts:
            self.asked.tally.clear()
        return found

    def _ask(self) -> Callable[[], list[list[Any]]]:
        """Launch the check: the first and the last sample alone, the last one's votes by the loop, and all that the device is to tell."""
        first, last = (take(self.asked.batch, slice(row, row + 1)) for row in (0, self.asked.count - 1))
        alone = self.parts.look(first)
        with one_sample(self.asked.model):
            value = forward(self.asked.loss, self.asked.model, last)
            self.compared.take_back(value)
        again = torch.cat([*self.again, alone, value.detach()[None]])
        told = values_later([*self.compared.questions(), *self.learned.questions(again)])
        self.compared.trial.let_go()
        return told

    def _verdict(self) -> ChosenEngine | None:
        try:
            told = (self.told or self._ask())()
            own = len(self.compared.found) + len(self.compared.left)
            self.learned.refuse_mixing(told[own:])
            if not self.compared.disagreements(told[:own]):
                self.learned.confirm(self.asked, told[own:], self.compared.heights)
                return self.choice
        except Mixed as reason:
            warnings.warn(f"{reason}; samples are voted on one at a time.", stacklevel=2)
            return ChosenEngine(loop, f"engine loop: {reason}.")
        except Exception:  # as above
            pass
        return None


def held(batch: Batch, tally: Tally, stays: bool) -> Batch | None:
    """The batch as it is now, to be voted on again; a copy unless it `stays` as it is. None where nothing is won by that."""
    leaves = leaves_of(batch)
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} | {tally.device}
    if not all(map(works_alongside, devices)) or not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return None
    return batch if stays else map_tensors(copy_of, batch)


def works_alongside(device: torch.device) -> bool:
    """Whether a device computes while the host goes on."""
    return device.type == "cuda"


def _trial(tally: Tally, samples: int = CHECKED_SAMPLES) -> Tally:
    trial = Tally(tally.parameters)
    trial.reserve(samples)
    return trial


def fold_checked(
    choice: ChosenEngine, model: nn.Module, loss: Loss, batch: Batch, tally: Tally, expected: Tensor | None = None
) -> str | None:
    """Fold the first batch of a tally; where the engine cannot be trusted it is the loop that does it, and the reason is given."""
    trial, size = _trial(tally), batch_size(batch)
    try:
        choice.engine(model, loss, batch, tally, expected=expected, spot=SpotCheck(trial, (0, size - 1)))
        if tally.looped:
            return next(iter(tally.looped))
        reason = _disagreement(model, loss, ends(batch), trial)
    except torch.OutOfMemoryError:  # smaller batches are the way out, not the loop, and whoever asked is to say so
        raise
    except Exception as error:
        reason = _failed(error)
    if reason is not None:
        tally.clear()
        loop(model, loss, batch, tally)
    return reason


def _failed(error: Exception) -> str:
    return f"batched failed with {type(error).__name__}: {error}"


def _disagreement(model: nn.Module, loss: Loss, few: Batch, trial: Tally) -> str | None:
    compared = LoopCheck(trial, computed_in(model, loss, few, trial))
    with one_sample(model):
        for sample in samples(few):
            compared.take_back(forward(loss, model, sample))
    wrong = compared.disagreements(values_of(compared.questions()))
    if not wrong:
        return None
    name, share = max(wrong.items(), key=lambda item: item[1])
    return f"batched disagrees on {len(wrong)} tensors, worst {name!r} ({share:.1%})"


def remember(choice: ChosenEngine, model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """Trust the plan that was checked, for this very loss."""
    plan = plan_for(model, loss, batch, tally)
    if plan is not None and choice.engine is not loop:
        try:
            own = WeakMethod(loss) if isinstance(loss, MethodType) else ref(loss)
        except TypeError:  # it cannot be told from another one later
            return
        plan.trust = Trust(own, choice.bytes_per_sample)


def remembered(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> ChosenEngine | None:
    plan, size = plan_for(model, loss, batch, tally), batch_size(batch)
    if plan is None or plan.trust is None or plan.trust.loss() != loss or size < CHECKED_SAMPLES:
        return None
    needed = plan.trust.bytes_per_sample
    return _trusted(needed, size, tally)


def _in_parts(bytes_per_sample: float, samples: int, tally: Tally) -> Engine:
    """The batched engine, on as many samples at a time as the device has room for."""
    device = tally.device
    if device.type != "cuda" or bytes_per_sample <= 0:
        return batched
    room = max(CHECKED_SAMPLES, int(MEMORY_SHARE * device_room(device) / bytes_per_sample))
    if room >= samples:
        return batched

    def engine(
        model: nn.Module,
        loss: Loss,
        batch: Batch,
        tally: Tally,
        *,
        expected: Tensor | None = None,
        spot: SpotCheck | None = None,
    ) -> None:
        for start in range(0, batch_size(batch), room):
            rows = slice(start, start + room)
            known = None if expected is None else expected[rows]
            some = None if spot is None else spot.within(start, start + room)
            batched(model, loss, take(batch, rows), tally, expected=known, spot=some)

    return engine


def _written_down(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> int:
    """Bytes of a sample's gradients that no forward pass shows: those of weights made of others."""
    plan = plan_for(model, loss, batch, tally)
    names = {name for step in plan.steps if step.role == "derive" for name in step.roots} if plan is not None else set()
    return sum(4 * tally.parameters[name].numel() for name in names) if tally.device.type == "cuda" else 0


def _allocated(tally: Tally) -> int:
    device = tally.device
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(tally: Tally) -> int:
    device = tally.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
