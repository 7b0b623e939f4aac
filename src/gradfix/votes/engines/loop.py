"""The loop engine: one sample at a time, any model.

A hook on every parameter folds the sign of its finished gradient into the tally and frees the
gradient, so at most one sample's gradient of a layer is alive at a time. It is the reference every
other engine is compared with: `LoopCheck` does that for a few samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.errors import UnsafeResult
from gradfix.votes.engines.passes import Batch, Loss, batch_size, losses_of, one_sample, samples
from gradfix.votes.tally import Tally

Engine = Callable[..., None]  # of model, loss, batch and tally

SILENT = (
    "every weight abstained: no gradient reached any parameter. Does the loss depend on the model, and "
    "do its parameters require gradients? Under torch.inference_mode none do."
)

CHECKED_SAMPLES = 2  # of a plan
# Share of a tensor's votes by two samples that rounding may change; a wrong rule flips about half of the signs.
ALLOWED = {torch.float64: 0.001, torch.float32: 0.02}
ALLOWED_16 = 0.25
# Gradients this small, of the largest of all weights and of their own tensor, are rounding.
NOISE = {dtype: (1e3 * torch.finfo(dtype).eps,) * 2 for dtype in (torch.float64, torch.float32)}
NOISE_16 = (0.01, 0.05)
MEANINGLESS = 100  # among votes of two samples
TOGETHER = 2**24  # entries whose signs are taken back at once: small tensors cost launches, not sums


class NotFinite(Exception):
    """An engine found a loss that is NaN or infinite; nothing of the batch has been counted."""


@dataclass(frozen=True)
class Batches:
    """Batches that are put together when asked for, so that a process makes only those it needs.

    `where` are the samples' names for messages."""

    collate: Callable[[Sequence[Any]], Batch]
    rows: Sequence[Any]
    size: int
    where: Sequence[str] | None = None

    def __len__(self) -> int:
        return (len(self.rows) + self.size - 1) // self.size

    def __getitem__(self, index: int) -> Batch:
        return self.collate(self.rows[index * self.size : (index + 1) * self.size])

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


@contextmanager
def folding(parameters: Mapping[str, Tensor], fold: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call `fold(name, gradient)` for every finished gradient, then drop the gradient."""
    handles = []
    for name, parameter in parameters.items():

        def hook(parameter: Tensor, name: str = name) -> None:
            if parameter.grad is not None:
                fold(name, parameter.grad)
                parameter.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loop(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """Fold one micro-batch, sample by sample."""
    tally.reserve(batch_size(batch))
    fold_each(model, loss, batch, tally)


def fold_each(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """The same for samples that are already counted."""

    def fold(name: str, gradient: Tensor) -> None:
        buffer = tally[name]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        buffer.sub_(gradient.sign().to(buffer.dtype))

    with folding(tally.parameters, fold):
        for sample in samples(batch):
            backward(loss, model, sample)


def backward(loss: Loss, model: nn.Module, sample: Batch) -> Tensor:
    """One sample's loss, after its gradients went to the hooks of `folding`."""
    with one_sample(model):
        value = forward(loss, model, sample)
        value.backward()
    return value.detach()


def forward(loss: Loss, model: nn.Module, sample: Batch) -> Tensor:
    """One sample's loss, and the graph behind it; both ways through it are to be made in `one_sample`."""
    with torch.enable_grad():
        value = losses_of(model, loss, sample).sum()
    refuse_detached(value)
    return value


def refuse_detached(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise UnsafeResult(SILENT)


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
        self.found: list[tuple[list[str], Tensor]] = []  # heights of some tensors
        self.left: list[tuple[list[str], Tensor]] = []  # what is left of their votes

    def take_back(self, value: Tensor) -> None:
        """The votes of one sample, by the graph of its loss. The device is not waited for."""
        with folding(self.trial.parameters, self.add):
            value.backward()
            self.flush()

    def questions(self) -> list[Tensor]:
        """What the device is to tell, once all samples are taken back."""
        self.left = list(_left(self.trial))
        return [values for _, values in (*self.found, *self.left)]

    def disagreements(self, told: Sequence[list[Any]]) -> dict[str, float]:
        """Tensors with votes that are left, and the share of these, by the answers to `questions`."""
        counts, wrong = self._counts(told), dict[str, float]()
        scale = max(self.heights.values(), default=0.0)
        for name, (left, untold) in counts.items():
            if self.heights.get(name, scale) <= self.of_all * scale:
                continue
            count = self.trial.parameters[name].numel() - untold
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
        flat, sizes = torch.cat(gradients), [gradient.numel() for gradient in gradients]
        highest = (
            torch.stack(torch._foreach_norm(gradients, math.inf)) if len(gradients) > 1 else flat.abs().max()[None]
        )
        del gradients  # each copy is as large as many weights
        self.found.append((names, highest))
        signs, small = flat.sign().to(torch.int8), self._is_small(flat, sizes, highest)
        del flat
        self.compare(names, sizes, signs, small)

    def _is_small(self, flat: Tensor, sizes: list[int], highest: Tensor) -> Tensor:
        """The entries that are rounding beside the highest of their tensor."""
        bounds = torch.where(highest > 0, self.noise * highest, -1)  # silence is no rounding
        return flat.abs() <= torch.cat([bound.expand(size) for bound, size in zip(bounds.unbind(), sizes)])

    def compare(self, names: list[str], sizes: list[int], signs: Tensor, small: Tensor) -> None:
        """Take the signs of some gradients back, where they are not too `small` to mean anything."""
        own = [self.trial[name].view(-1) for name in names]
        votes = torch.cat(own).add_(signs).masked_fill_(small, MEANINGLESS)
        torch._foreach_copy_(own, list(votes.split(sizes)))

    def _counts(self, told: Sequence[list[Any]]) -> dict[str, tuple[int, int]]:
        """Of every tensor the votes left, and how many of them mean nothing."""
        highest, counts = told[: len(self.found)], told[len(self.found) :]
        for (names, _), heights in zip(self.found, highest):
            for name, height in zip(names, heights):
                self.heights[name] = max(self.heights.get(name, height), height)
        pairs = {
            n: pair for (names, _), both in zip(self.left, counts) for n, *pair in zip(names, both[::2], both[1::2])
        }
        return {name: (round(kept), round(none)) for name, (kept, none) in pairs.items()}


class LoneCheck(LoopCheck):
    """The same for a trial of one sample that is put away: nothing of it is brought out but what is compared just then."""

    def __init__(self, trial: Tally, dtype: torch.dtype) -> None:
        super().__init__(trial, dtype)
        self.seen: set[str] = set()

    def add(self, name: str, gradient: Tensor) -> None:
        if name in self.seen:
            raise UnsafeResult(f"the gradient of {name!r} comes in several parts, and only the first was compared.")
        self.seen.add(name)
        super().add(name, gradient)

    def compare(self, names: list[str], sizes: list[int], signs: Tensor, small: Tensor) -> None:
        left = self.trial.brought_out(names).add_(signs) != 1
        self.left.append((names, _counted(left | small, small, sizes)))

    def questions(self) -> list[Tensor]:
        for names in _together(self.trial, self.seen):  # the loop had no gradient of them
            left = self.trial.brought_out(names) != 1
            sizes = [self.trial.parameters[name].numel() for name in names]
            self.left.append((names, _counted(left, torch.zeros_like(left), sizes)))
        return [values for _, values in (*self.found, *self.left)]


def _left(trial: Tally) -> Iterator[tuple[list[str], Tensor]]:
    """Per tensor, the votes that were not taken back, and how many of them mean nothing."""
    for names in _together(trial):
        votes = [trial[name].view(-1) for name in names]
        flat = torch.cat(votes)
        yield names, _counted(flat != 0, flat >= MEANINGLESS // 2, [len(own) for own in votes])


def _counted(left: Tensor, none: Tensor, sizes: list[int]) -> Tensor:
    """How many entries of each tensor are left, and how many mean nothing; in a few launches."""
    sums = [torch.stack(torch._foreach_norm(kind.float().split(sizes), 1)) for kind in (left, none)]
    return torch.stack(sums, 1)


def _together(trial: Tally, but: Collection[str] = ()) -> Iterator[list[str]]:
    """Names of tensors on one device that are looked at at once."""
    some, entries = list[str](), 0
    for name, own in trial.parameters.items():
        if name in but or not own.numel():
            continue
        if some and (entries + own.numel() > TOGETHER or own.device != trial.parameters[some[0]].device):
            yield some
            some, entries = [], 0
        some.append(name)
        entries += own.numel()
    if some:
        yield some
