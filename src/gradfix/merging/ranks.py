"""The exact k-th largest magnitude of a vector that is never held: counted, 16 bits at a time.

Floats of one sign are ordered like their bit patterns, so a histogram over the upper bits finds the
bin of the k-th largest entry and a second walk over the data resolves the lower bits. float32 takes two
walks, float64 four, and memory is one histogram per vector whatever the vector's size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

DIGIT = 16
BINS = 1 << DIGIT

Walk = Callable[[], Iterator[Sequence[Tensor]]]


def magnitudes_at(walk: Walk, ranks: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[float]]:
    """Per vector, the magnitudes at the given ranks; rank 1 is the largest.

    `walk()` yields the vectors side by side in flat pieces of `dtype`, the same every time it is called."""
    width = torch.finfo(dtype).bits
    searches = [[_Search(rank) for rank in wanted] for wanted in ranks]
    for shift in range(width - DIGIT, -1, -DIGIT):
        counts: dict[tuple[int, int], Tensor] = {
            (vector, search.prefix): torch.zeros(BINS, dtype=torch.int64)
            for vector, wanted in enumerate(searches)
            for search in wanted
        }
        for pieces in walk():
            bits: dict[int, Tensor] = {}
            for (vector, prefix), histogram in counts.items():
                if vector not in bits:
                    bits[vector] = _pattern(pieces[vector], dtype)
                histogram.add_(_digits(bits[vector], shift, prefix, first=shift == width - DIGIT))
        for vector, wanted in enumerate(searches):
            for search in wanted:
                search.descend(counts[vector, search.prefix])
    return [[_magnitude(search.prefix, dtype) for search in wanted] for wanted in searches]


class _Search:
    """A rank on its way down the digits: the bits found so far, and the rank among entries with these bits."""

    def __init__(self, rank: int) -> None:
        self.prefix, self.rank = 0, rank

    def descend(self, histogram: Tensor) -> None:
        from_top = histogram.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, self.rank))
        if place:
            self.rank -= int(from_top[place - 1])
        self.prefix = (self.prefix << DIGIT) | (BINS - 1 - place)


def _pattern(piece: Tensor, dtype: torch.dtype) -> Tensor:
    return piece.detach().abs().view(torch.int64 if dtype is torch.float64 else torch.int32)


def _digits(bits: Tensor, shift: int, prefix: int, first: bool) -> Tensor:
    if first:
        return torch.bincount(bits >> shift, minlength=BINS).cpu()
    # Few entries share the prefix, and numpy picks few out of many faster.
    picked = bits.cpu().numpy()[((bits >> (shift + DIGIT)) == prefix).cpu().numpy()]
    return torch.from_numpy(np.bincount((picked >> shift) & (BINS - 1), minlength=BINS))


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    holder = torch.int64 if dtype is torch.float64 else torch.int32
    return float(torch.tensor(bits, dtype=holder).view(dtype))
