"""engine="auto": the fastest engine that gives this model's votes, checked before it is trusted.

The batched engine votes on the first batch and counts its last sample once more; the loop takes these votes back, and what is
left must be rounding. The losses of the batch as a whole must be those of half of it and of single samples, or its samples
depend on each other. That is tried without a plan first; where it does not work out, a plan is made and the same asked of it
with two samples and both halves. Where something is wrong still, the batch is voted on again by the loop. The choice and its reason go into the notes of the votes.
What was found out holds for later calls with the same model, loss and kind of batch, as long as the plan does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import values_of
from gradfix.errors import DataError
from gradfix.system.modules import device_room
from gradfix.votes.batched.engine import batched, computed_in, plan_for, prepare
from gradfix.votes.batched.first_pass import LEAST_SAMPLES, Mixed, learn, turns
from gradfix.votes.batched.passplan import NeedsLoop, Trust
from gradfix.votes.batched.recorded import BatchVote
from gradfix.votes.engines.loop import Engine, backward, folding, loop
from gradfix.votes.engines.passes import Batch, Loss, batch_size, every_second, map_tensors, samples, take
from gradfix.votes.tally import SpotCheck, Tally

CHECKED_SAMPLES = 2  # of a plan
MEMORY_SHARE = 0.8
# Share of a tensor's votes by two samples that rounding may change; a wrong rule flips about half of the signs.
ALLOWED = {torch.float64: 0.001, torch.float32: 0.02}
ALLOWED_16 = 0.25
# Gradients this small, of the largest of all weights and of their own tensor, are rounding.
NOISE = {dtype: (1e3 * torch.finfo(dtype).eps,) * 2 for dtype in (torch.float64, torch.float32)}
NOISE_16 = (0.01, 0.05)
MEANINGLESS = 100  # among votes of two samples
TOGETHER = 2**23  # entries whose signs are taken back at once: small tensors cost launches, not sums
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
    size, held = batch_size(batch), _allocated(tally)
    if size < LEAST_SAMPLES or tally.count:
        return None
    trial = _trial(tally, 1)
    asked = BatchVote(model, loss, batch, tally, size, spot=SpotCheck(trial, (size - 1,)))
    try:
        again = [parts.turn(start) for start in turns(size)]
        learned = learn(asked)
        bytes_per_sample = (_peak(tally) - held) / size
        again.append(parts.look(take(batch, slice(0, 1))))
        compared = LoopCheck(trial, learned.plan.dtype)
        again += compared.launch(model, loss, take(batch, slice(size - 1, size)))
        learned.refuse_mixing(torch.cat(again))
        if not compared.disagreements():
            learned.confirm(asked, compared.heights)
            return _trusted(bytes_per_sample, size, tally)
    except Mixed as reason:
        warnings.warn(f"{reason}; samples are voted on one at a time.", stacklevel=2)
        tally.clear()
        return ChosenEngine(loop, f"engine loop: {reason}.")
    except Exception:  # what a model or its data do wrong is found again, and told
        pass
    tally.clear()
    return None


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
    compared.launch(model, loss, few)
    wrong = compared.disagreements()
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


class LoopCheck:
    """Whether the loop can take back a trial's votes, up to what rounding in a dtype explains. Many tensors at a time.

    Entries whose gradient is zero but for rounding have signs that mean nothing, and are left out: key biases, also
    where they are a third of a packed bias, and all that attention over one token leaves to queries and keys."""

    def __init__(self, trial: Tally, dtype: torch.dtype) -> None:
        self.trial = trial
        self.of_all, self.noise = NOISE.get(dtype, NOISE_16)
        self.allowed = ALLOWED.get(dtype, ALLOWED_16) * trial.count / CHECKED_SAMPLES
        self.heights: dict[str, float] = {}  # of every tensor, the largest gradient in any sample
        self.waiting: list[tuple[str, Tensor]] = []
        self.entries = 0
        self.found: list[tuple[list[str], Tensor]] = []

    def launch(self, model: nn.Module, loss: Loss, batch: Batch) -> list[Tensor]:
        """Take back the votes of these samples, one after the other; gives their losses. The device is not waited for."""
        losses = []
        with folding(self.trial.parameters, self.add):
            for sample in samples(batch):
                losses.append(backward(loss, model, sample)[None])
                self.flush()
        return losses

    def disagreements(self) -> dict[str, float]:
        """Tensors with votes that are left, and the share of these. Waits for the device."""
        counts, wrong = self._told(), dict[str, float]()
        scale = max(self.heights.values(), default=0.0)
        for name, (left, untold) in counts.items():
            if self.heights.get(name, scale) <= self.of_all * scale:
                continue
            count = self.trial[name].numel() - untold
            share = (left - untold) / max(count, 1)
            # One flipped sign of a tiny tensor is no verdict.
            if share > max(self.allowed, 2 / max(count, 1)):
                wrong[name] = share
        return wrong

    def add(self, name: str, gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if self.waiting and self.waiting[0][1].device != dense.device:
            self.flush()
        if dense.numel():
            self.waiting.append((name, dense))
            self.entries += dense.numel()
        if self.entries >= TOGETHER:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        names, gradients = [name for name, _ in self.waiting], [dense.reshape(-1) for _, dense in self.waiting]
        self.waiting, self.entries = [], 0
        flat, sizes = torch.cat(gradients), [len(gradient) for gradient in gradients]
        highest = (
            torch.stack(torch._foreach_norm(gradients, math.inf)) if len(gradients) > 1 else flat.abs().max()[None]
        )
        bounds = torch.where(highest > 0, self.noise * highest, -1)  # silence is no rounding
        small = torch.cat([bound.expand(size) for bound, size in zip(bounds.unbind(), sizes)])
        own = [self.trial[name].view(-1) for name in names]
        votes = torch.cat(own).add_(flat.sign().to(own[0].dtype)).masked_fill_(flat.abs() <= small, MEANINGLESS)
        torch._foreach_copy_(own, list(votes.split(sizes)))
        self.found.append((names, highest))

    def _told(self) -> dict[str, tuple[int, int]]:
        """Of every tensor the votes left, and how many of them mean nothing.

        The device is waited for here and nowhere before, so that it works off the batch while samples are launched."""
        left = list(_left(self.trial))
        highest, counts = (values_of([values for _, values in found]) for found in (self.found, left))
        for (names, _), heights in zip(self.found, highest):
            for name, height in zip(names, heights):
                self.heights[name] = max(self.heights.get(name, height), height)
        pairs = {n: pair for (names, _), told in zip(left, counts) for n, *pair in zip(names, told[::2], told[1::2])}
        return {name: (round(kept), round(none)) for name, (kept, none) in pairs.items()}


def _left(trial: Tally) -> Iterator[tuple[list[str], Tensor]]:
    """Per tensor, the votes that were not taken back, and how many of them mean nothing."""
    for names in _together(trial):
        votes = [trial[name].view(-1) for name in names]
        flat, sizes = torch.cat(votes), [len(own) for own in votes]
        kinds = (flat != 0, flat >= MEANINGLESS // 2)
        sums = [torch.stack(torch._foreach_norm(kind.float().split(sizes), 1)) for kind in kinds]  # in a few launches
        yield names, torch.stack(sums, 1)


def _together(trial: Tally) -> Iterator[list[str]]:
    """Names of tensors on one device that are looked at at once."""
    some, entries = list[str](), 0
    for name, votes in trial.items():
        if some and (entries + votes.numel() > TOGETHER or votes.device != trial[some[0]].device):
            yield some
            some, entries = [], 0
        if votes.numel():
            some.append(name)
            entries += votes.numel()
    if some:
        yield some


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
