"""The exact k-th largest magnitude of a vector that is never held: counted, 16 bits at a time.

Floats of one sign are ordered like their bit patterns, so a histogram over the upper bits finds the
bin of the k-th largest entry and a second walk over the data resolves the lower bits. float32 takes two
walks, float64 four, and memory is one histogram per vector whatever the vector's size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DIGIT = 16
BINS = 1 << DIGIT

Measure = Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True)
class Level:
    """The magnitude at a rank, how many entries are larger, and how many have this very magnitude."""

    magnitude: float
    above: int
    equal: int


def magnitudes_at(
    measured: Callable[[Measure], Iterator[None]], ranks: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[list[Level]]:
    """Per vector, the magnitudes at the given ranks; rank 1 is the largest.

    `measured(f)` calls f with the vectors side by side in flat pieces of `dtype`, the same every time and in any
    thread."""
    width = torch.finfo(dtype).bits
    searches = [[_Search(rank) for rank in wanted] for wanted in ranks]
    for shift in range(width - DIGIT, -1, -DIGIT):
        counts: dict[tuple[int, int], Tensor] = {
            (vector, search.prefix): torch.zeros(BINS, dtype=torch.int64)
            for vector, wanted in enumerate(searches)
            for search in wanted
        }
        for _ in measured(_Counting(counts, shift, dtype)):
            pass
        for vector, wanted in enumerate(searches):
            for search in wanted:
                search.descend(counts[vector, search.prefix])
    return [[search.level(dtype) for search in wanted] for wanted in searches]


class _Counting:
    """Adds a piece to the histograms; whole numbers, so the order of the pieces does not matter."""

    def __init__(self, counts: dict[tuple[int, int], Tensor], shift: int, dtype: torch.dtype) -> None:
        self.counts, self.shift, self.dtype = counts, shift, dtype
        self.first = shift == torch.finfo(dtype).bits - DIGIT
        self.turn = threading.Lock()

    def __call__(self, pieces: Sequence[Tensor]) -> None:
        bits: dict[int, Tensor] = {}
        for (vector, prefix), histogram in self.counts.items():
            if vector not in bits:
                bits[vector] = _pattern(pieces[vector], self.dtype)
            found = _digits(bits[vector], self.shift, prefix, self.first)
            with self.turn:
                histogram.add_(found)


class _Search:
    """A rank on its way down the digits: the bits found so far, and the rank among entries with these bits."""

    def __init__(self, rank: int) -> None:
        self.prefix, self.rank, self.above, self.equal = 0, rank, 0, 0

    def descend(self, histogram: Tensor) -> None:
        from_top = histogram.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, self.rank))
        larger = int(from_top[place - 1]) if place else 0
        self.rank, self.above, self.equal = self.rank - larger, self.above + larger, int(from_top[place]) - larger
        self.prefix = (self.prefix << DIGIT) | (BINS - 1 - place)

    def level(self, dtype: torch.dtype) -> Level:
        return Level(_magnitude(self.prefix, dtype), self.above, self.equal)


def _pattern(piece: Tensor, dtype: torch.dtype) -> Tensor:
    return piece.detach().abs().view(torch.int64 if dtype is torch.float64 else torch.int32)


def _digits(bits: Tensor, shift: int, prefix: int, first: bool) -> Tensor:
    if first:
        return torch.bincount(bits >> shift, minlength=BINS).cpu()
    # Few entries share the prefix; a range and numpy's compress pick them out five times faster than an index.
    values = bits.cpu().numpy()
    low = prefix << (shift + DIGIT)
    picked = np.compress((values >= low) & (values <= low + (1 << (shift + DIGIT)) - 1), values)
    return torch.from_numpy(np.bincount((picked >> shift) & (BINS - 1), minlength=BINS))


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    holder = torch.int64 if dtype is torch.float64 else torch.int32
    return float(torch.tensor(bits, dtype=holder).view(dtype))
