"""Which rows of an activation belong to which sample, and what a batch of losses still reaches.

Model code is free to flatten (samples x tokens), to put tokens first, or to split images into windows, and
shapes alone do not tell which. So the engine asks autograd once: with only one sample's loss switched on, the
output gradient of a layer is non-zero in that sample's rows alone. A layout that explains what was seen is kept;
where none does, the samples are mixed and the layer cannot vote in one pass.

Operations that pick rows by an index may hand a row to another sample in another batch: a head on the masked tokens
alone, say. The class token at each text's end does not: it is picked from its own sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

DOUBT = 0.1  # of a power of two, that rounding and sums in another order may explain
_PICKING = ("Index", "Gather", "Scatter", "MaskedSelect", "Take")
_ALONG = {torch.gather, Tensor.gather, torch.index_select, Tensor.index_select}
INDEXING = _ALONG | {Tensor.__getitem__, Tensor.__setitem__}  # the calls that may leave every row with its sample


@dataclass(frozen=True)
class SampleLayout:
    """Samples lie along `dim`; `rows` consecutive (or, `interleaved`, strided) entries belong to each."""

    dim: int
    rows: int
    interleaved: bool = False

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        return self.dim < len(shape) and shape[self.dim] == samples * self.rows

    def split(self, tensor: Tensor, samples: int) -> Tensor:
        """The same entries with the samples first: (samples, ..., rows, ...)."""
        if self.rows == 1:
            return tensor.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        if self.interleaved:
            return tensor.unflatten(self.dim, (self.rows, samples)).movedim(self.dim + 1, 0)
        return tensor.unflatten(self.dim, (samples, self.rows)).movedim(self.dim, 0)

    def moved(self, dim: int) -> SampleLayout:
        return replace(self, dim=dim)

    def take(self, tensor: Tensor, sample: int) -> Tensor:
        """One sample's entries, the dimension kept."""
        if self.interleaved:
            return tensor.unflatten(self.dim, (self.rows, -1)).select(self.dim + 1, sample)
        return tensor.narrow(self.dim, sample * self.rows, self.rows)


class OwnedRows:
    """Rows along `dim` that belong to samples in no order, and as many to each as there happen to be.

    Taken apart, every sample gets as many rows as the one with most; those it has not are zero."""

    rows, interleaved = 1, False

    def __init__(self, dim: int, owner: Tensor) -> None:
        self.dim, self.owner = dim, owner

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        return self.dim < len(shape) and shape[self.dim] == len(self.owner)

    def split(self, tensor: Tensor, samples: int) -> Tensor:
        places = self._places(samples)
        missing = tensor.new_zeros(1).expand(*tensor.shape[: self.dim], 1, *tensor.shape[self.dim + 1 :])
        padded = torch.cat([tensor, missing], self.dim)
        return padded.index_select(self.dim, places.flatten()).unflatten(self.dim, places.shape).movedim(self.dim, 0)

    def take(self, tensor: Tensor, sample: int) -> Tensor:
        return tensor.index_select(self.dim, (self.owner == sample).nonzero().flatten())

    def moved(self, dim: int) -> OwnedRows:
        return OwnedRows(dim, self.owner)

    def part(self, start: int, end: int) -> OwnedRows:
        return OwnedRows(self.dim, self.owner[start:end])

    def _places(self, samples: int) -> Tensor:
        """(samples, most rows of one); the row behind the last where a sample has no more."""
        count = torch.bincount(self.owner, minlength=samples)
        order = self.owner.argsort(stable=True)
        rank = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[self.owner[order]]
        most = int(count.max()) if len(order) else 0
        places = torch.full((samples, most), len(order), device=order.device)
        places[self.owner[order], rank] = order
        return places


Layout = SampleLayout | OwnedRows
Along = dict[int, Tensor]  # by dimension, something about each of its entries


def owned(layout: Layout, size: int, samples: int) -> OwnedRows:
    """The same rows, each with its owner."""
    if isinstance(layout, OwnedRows):
        return layout
    numbers = torch.arange(size)
    return OwnedRows(layout.dim, numbers % samples if layout.interleaved else numbers // layout.rows)


def candidates(shape: Sequence[int], samples: int) -> list[SampleLayout]:
    """Every layout the shape allows, the most usual first."""
    exact = [SampleLayout(dim, 1) for dim, size in enumerate(shape) if size == samples]
    flat = [(dim, size // samples) for dim, size in enumerate(shape) if size > samples and size % samples == 0]
    return exact + [SampleLayout(dim, rows, mixed) for dim, rows in flat for mixed in (False, True)]


def explain(
    layouts: Sequence[SampleLayout], samples: int, seen: Sequence[tuple[Sequence[int], Along]]
) -> SampleLayout | None:
    """The first layout under which the gradient of each asked group of samples stays within their rows.

    `seen` pairs a group with where the output gradient is not zero under the losses of that group alone. Where
    nothing was seen, only the usual layout is believed."""
    if not any(speaks(along) for _, along in seen):
        return next((layout for layout in layouts if layout == SampleLayout(0, 1)), None)
    for layout in layouts:
        if all(_inside(layout, along, group, samples) for group, along in seen):
            return layout
    return None


def speaks(along: Along) -> bool:
    return any(bool(entries.any()) for entries in along.values())


def _inside(layout: SampleLayout, along: Along, group: Sequence[int], samples: int) -> bool:
    entries = along.get(layout.dim)
    if entries is None or len(entries) != samples * layout.rows:
        return False
    by_sample = layout.moved(0).split(entries, samples).flatten(1).any(1).tolist()
    return not any(spoke and sample not in group for sample, spoke in enumerate(by_sample))


def lone_samples(samples: int) -> list[list[int]]:
    """Samples to switch on, one at a time; never only the first, whose number a pooled first token shares."""
    return [[1], [0]] if samples == 2 else [[1], [samples - 1]]


class RowSums:
    """What one backward pass shows of every row along every dimension: sums that scale with its sample's loss."""

    def __init__(self, gradient: Tensor) -> None:
        gradient, shape = gradient.real if gradient.is_complex() else gradient, gradient.shape
        self.sums: dict[int, Tensor] = {}
        parts = torch.stack([gradient.abs(), gradient.clamp(min=0)])
        for dim in range(len(shape)):
            others = [other + 1 for other in range(len(shape)) if other != dim]
            self.sums[dim] = parts.sum(others, dtype=torch.float64) if others else parts.double()


def digit_base(dtypes: Collection[torch.dtype]) -> int:
    """Losses are scaled by powers of two below 2^base, which changes no digit of a gradient that stays in range."""
    return 4 if torch.float16 in dtypes else 32


def tags(samples: int, base: int) -> list[list[int]]:
    """Exponents by which to scale the losses, pass after pass: first none, then the digits of each sample's number."""
    passes = [[0] * samples]
    digit = 1
    while digit < max(samples, 2):
        passes.append([number // digit % base for number in range(samples)])
        digit *= base
    return passes


def owners(seen: Sequence[RowSums], samples: int, base: int) -> dict[int, Tensor]:
    """Per dimension, whose each row is (-1 where no loss reaches it); without the dimensions whose rows mix samples."""
    found = {}
    for dim, (whole, upper) in seen[0].sums.items():
        reached = whole > 0
        owner, clear = torch.zeros_like(whole), ~torch.isnan(whole)
        for place, scaled in enumerate(seen[1:]):
            again, above = scaled.sums[dim]
            digit = torch.where(reached, again / whole, 1).log2()
            power = digit.round()
            same = (digit - power).abs() < DOUBT
            same &= (above - upper * power.exp2()).abs() <= DOUBT * again
            clear &= torch.where(reached, same & (power >= 0) & (power < base), again == 0)
            owner += power * base**place
        if bool((clear & (owner < samples)).all()):
            found[dim] = torch.where(reached, owner, -1).long()
    return found


def explain_owned(
    layouts: Sequence[SampleLayout], samples: int, found: dict[int, Tensor], allows: Callable[[Layout], bool]
) -> Layout | None:
    """The first regular layout that gives every reached row its owner; else rows in no order, where they are allowed."""
    for layout in layouts:
        owner = found.get(layout.dim)
        if owner is not None:
            expected = owned(layout, len(owner), samples).owner.to(owner.device)
            if bool(((owner == expected) | (owner < 0)).all()):
                return layout
    irregular = (OwnedRows(dim, owner.clamp(min=0)) for dim, owner in found.items())
    return next((layout for layout in irregular if allows(layout)), None)


def silence(gradient: Tensor, samples: int) -> Along:
    """Along every dimension that can hold the samples, the entries that are zero throughout."""
    zero, dims = gradient == 0, range(gradient.ndim)
    others = {dim: tuple(other for other in dims if other != dim) for dim in dims if gradient.shape[dim] % samples == 0}
    return {dim: zero.all(rest) if rest else zero for dim, rest in others.items()}


def speech(silences: Sequence[Along]) -> list[Along]:
    """The entries that are not, on the CPU: a device is waited for once."""
    parts = [part for along in silences for part in along.values()]
    if not parts:
        return list(silences)
    found = iter((~torch.cat(parts)).cpu().split([len(part) for part in parts]))
    return [{dim: next(found) for dim in along} for along in silences]


def keeps_rows(func: Any, args: Sequence[Any], samples: int, depends: Callable[[Tensor], bool]) -> bool:
    """Whether an indexing call leaves every row with its sample, whatever the batch; `depends` on the batch or not."""
    data = args[0] if args else None
    if not isinstance(data, Tensor) or not data.ndim or data.shape[0] != samples:
        return False
    if func is Tensor.__setitem__:
        return not (isinstance(args[2], Tensor) and args[2].requires_grad)
    if func in _ALONG and len(args) > 1 and isinstance(args[1], int):
        return args[1] % data.ndim != 0
    if func is not Tensor.__getitem__:
        return False
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if isinstance(first, slice):
        return first == slice(None)
    return isinstance(first, Tensor) and not depends(first) and _counts(first, samples)


def _counts(index: Tensor, samples: int) -> bool:
    """0, 1, 2 ... along the first dimension, the same in all others."""
    if index.dtype != torch.long or not index.ndim or index.shape[0] != samples:
        return False
    return bool((index.reshape(samples, -1) == torch.arange(samples, device=index.device)[:, None]).all())


@dataclass(frozen=True)
class Reach:
    """What a backward pass could still reach: named parameters, other leaves, reentrant checkpoints, and picked rows."""

    parameters: frozenset[str]
    others: bool
    hidden: bool
    picks: bool


def behind(losses: Tensor) -> set[Any]:
    """All graph nodes that the losses depend on."""
    return {node for node, _ in _walk(losses)}


def reach(
    losses: Tensor, parameters: dict[str, nn.Parameter], anchor: Tensor, in_place: Collection[Any] | None = None
) -> Reach:
    """With `in_place`, the nodes that index and leave every row with its sample, it is told whether others do."""
    names = {id(p): name for name, p in parameters.items()}
    found: set[str] = set()
    hidden = others = picks = False
    for node, following in _walk(losses):
        if in_place is not None and not picks:
            picks = _picks(node) and node not in in_place
        if not following:
            variable = getattr(node, "variable", anchor)
            if id(variable) in names:
                found.add(names[id(variable)])
            others = others or variable is not anchor
        elif isinstance(node, BackwardCFunction):
            hidden = hidden or "CheckpointFunctionBackward" in type(node).__name__
    return Reach(frozenset(found), others, hidden, picks)


def lasting_node(output: Tensor) -> Any:
    """The graph node that sees the output's gradient, whatever is done to the output in place.

    A view's own node leaves the graph then, and its base's stays: linear layers give views of products."""
    if not output._is_view():
        return output.grad_fn
    base = output._base
    assert base is not None
    same = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base.grad_fn if same else None


def picked_rows(losses: Tensor, in_place: Collection[Any]) -> set[Any]:
    """Graph nodes behind which rows are picked by an index, other than by nodes that leave them `in_place`.

    Two batches of one shape may then differ in whose row is whose, so the layout must be found anew."""
    nodes = list(_walk(losses))
    parents: dict[Any, list[Any]] = {}
    for node, following in nodes:
        for child, _ in following:
            parents.setdefault(child, []).append(node)
    found: set[Any] = set()
    waiting = [node for node, _ in nodes if _picks(node) and node not in in_place]
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _picks(node: Any) -> bool:
    return _is_picking(node.name())


@functools.cache
def _is_picking(name: str) -> bool:
    return any(word in name for word in _PICKING)


def _walk(losses: Tensor) -> Iterator[tuple[Any, Any]]:
    """Every graph node once, with those it hands gradients to. Every pass comes by here while a device may wait."""
    seen: set[Any] = {None, losses.grad_fn}
    waiting: list[Any] = [losses.grad_fn] if losses.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        yield node, following
        for child, _ in following:
            if child not in seen:
                seen.add(child)
                waiting.append(child)
