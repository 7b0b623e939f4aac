"""The count while it is being taken: accumulators that an engine adds to, never in the parameter's dtype.

A bf16 accumulator would stick at 256 and an int8 one wraps at 128, so the tally widens itself before it can.
On a GPU many weights share a piece of memory: its allocator keeps up to a megabyte with each, and each costs launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfix.vectors.signvotes import dtype_for

SHELF = 2**27  # entries
APART = 256  # entries between the beginnings of two weights: kernels like addresses that are multiples of 16


class Shelf:
    """Counts that lie together: of one weight, or of many on a GPU."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.rooms: list[int] = []  # entries of each weight, and those between it and the next
        self.size = 0
        self.counts = torch.empty(0)

    def takes(self, entries: int) -> bool:
        return not self.size or self.size + entries <= SHELF

    def add(self, name: str, shape: torch.Size) -> None:
        self.shapes[name] = shape
        self.rooms.append(-(-shape.numel() // APART) * APART)
        self.size += self.rooms[-1]

    def fill(self, counts: Tensor) -> dict[str, Tensor]:
        """A view for each weight."""
        self.counts, found = counts, dict[str, Tensor]()
        for (name, shape), room, part in zip(self.shapes.items(), self.rooms, counts.split(self.rooms)):
            size = shape.numel()
            found[name] = (part if room == size else part[:size]).view(shape)
        return found

    def quarter(self, counts: Tensor) -> dict[str, Tensor]:
        """The same where an entry holds four counts."""
        self.counts, parts = counts, counts.split([room // 4 for room in self.rooms])
        sizes = [-(-shape.numel() // 4) for shape in self.shapes.values()]
        return {name: part[:size] for name, part, size in zip(self.shapes, parts, sizes)}


def lies_with_others(parameter: Tensor) -> bool:
    return parameter.is_cuda


def _shelves(parameters: Mapping[str, Tensor]) -> Iterator[tuple[Shelf, torch.device]]:
    shelf, device = Shelf(), None
    for name, parameter in parameters.items():
        together = lies_with_others(parameter) and parameter.device == device
        if shelf.shapes and not (together and shelf.takes(parameter.numel())):
            assert device is not None
            yield shelf, device
            shelf = Shelf()
        shelf.add(name, parameter.shape)
        device = parameter.device
    if device is not None:
        yield shelf, device


class Tally:
    """Integer accumulators for one model, widened before they can wrap.

    Engines call `reserve(n)` before folding n samples and add `sum_n sign(-g_n)` to `tally[name]`. A batched one says what
    it could not do in one pass: `looped` samples by reason, and `apart`, the weights voted on one sample at a time."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.count = 0
        self.looped: Counter[str] = Counter()
        self.apart: set[str] = set()
        self._buffers: dict[str, Tensor] = {}
        self._shelves = list[Shelf]()
        for shelf, device in _shelves(self.parameters):
            self._buffers |= shelf.fill(torch.zeros(shelf.size, dtype=torch.int8, device=device))
            self._shelves.append(shelf)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def reserve(self, samples: int) -> None:
        self.count += samples
        self._widen(dtype_for(self.count))

    def _widen(self, dtype: torch.dtype) -> None:
        for shelf in self._shelves:  # one by one: the old are gone before all new ones are there
            if shelf.counts.dtype != dtype:
                self._buffers |= shelf.fill(shelf.counts.to(dtype))

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._buffers.items())

    def load(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Continue from an earlier partial count."""
        self.count = count
        self._widen(dtype_for(count))
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[name])

    def clear(self) -> None:
        """Begin again."""
        self.count = 0
        self.looped.clear()
        self.apart.clear()
        torch._foreach_zero_(list(self._buffers.values()))  # a few launches on a GPU, not one a weight

    def put_away(self) -> None:
        """Keep the counts of one sample (-1, 0 or 1) in a fourth of their room; some come out again by `brought_out`."""
        for shelf in self._shelves:
            four = shelf.counts.add_(1).view(torch.uint8).view(-1, 4)
            packed = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
            self._buffers |= shelf.quarter(packed)

    def brought_out(self, names: Sequence[str]) -> Tensor:
        """What was put away of some weights on one device, one after the other: 0, 1 or 2 for a count of -1, 0 or 1."""
        packed = torch.cat([self._buffers[name] for name in names])
        places = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
        codes = (packed[:, None] >> places).bitwise_and_(3).view(-1).view(torch.int8)
        sizes = [self.parameters[name].numel() for name in names]
        if len(codes) == sum(sizes):
            return codes
        parts = codes.split([4 * len(self._buffers[name]) for name in names])
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    def let_go(self) -> None:
        """Of the counts; who they were of is still known."""
        self._buffers = {}
        for shelf in self._shelves:
            shelf.counts = torch.empty(0)

    def told(self) -> list[str]:
        """What was not done in one pass, in words."""
        notes = [f"{samples} samples are voted on one at a time: {why}." for why, samples in self.looped.items()]
        if self.apart:
            notes.append(f"{len(self.apart)} tensors are voted on one sample at a time, first {min(self.apart)!r}.")
        return notes

    def votes(self) -> dict[str, Tensor]:
        dtype = dtype_for(self.count)
        return {name: buffer.to(dtype) for name, buffer in self._buffers.items()}


@dataclass(frozen=True)
class SpotCheck:
    """Samples of a batch, by number, whose votes a pass over all of them counts once more, apart from the others."""

    tally: Tally
    numbers: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """One sample or two."""
        first, last = self.numbers[0], self.numbers[-1]
        return slice(first, last + 1, max(last - first, 1))

    def within(self, start: int, stop: int) -> SpotCheck | None:
        """The same for a part of the batch, if some of them are in it."""
        numbers = tuple(number - start for number in self.numbers if start <= number < stop)
        return SpotCheck(self.tally, numbers) if numbers else None

    def view(self, like: Tensor, name: str, own: Tensor) -> Tensor:
        """The entries of a weight's count that `like` are of `own`, the count of all samples."""
        whole = self.tally[name]
        if like is own:
            return whole
        start = whole.storage_offset() + like.storage_offset() - own.storage_offset()
        return whole.as_strided(like.shape, like.stride(), start)


class Sums(Tally):
    """Real accumulators for the mean rule, in float32 or better: `tally[name]` is the sum of gradients so far.

    Sums of reals depend on their order, so samples are added one after the other, resumed or not."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.count = 0
        self._buffers = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in self.parameters.items()
        }

    def reserve(self, samples: int) -> None:
        self.count += samples

    def load(self, tensors: Mapping[str, Tensor], count: int) -> None:
        self.count = count
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[name])

    def mean(self) -> dict[str, Tensor]:
        return {name: buffer / self.count for name, buffer in self.items()}
