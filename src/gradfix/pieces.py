"""Flat pieces of a tensor: cut to another size, counted, checked.

The counts and checks run once per piece of every input, so they are the quick ones for the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor


def recut(pieces: Iterable[Tensor], elements: int) -> Iterator[Tensor]:
    """The same entries in pieces of `elements` (the last may be shorter, none is empty).

    Holds at most one piece of either size; a piece that already fits is passed on as it is."""
    held: list[Tensor] = []
    count = 0
    for arriving in pieces:
        piece = arriving
        while count + piece.numel() >= elements:
            head, piece = piece[: elements - count], piece[elements - count :]
            yield torch.cat([*held, head]) if held else head
            held, count = [], 0
        if piece.numel():
            held.append(piece)
            count += piece.numel()
    if held:
        yield torch.cat(held) if len(held) > 1 else held[0]


def nonzeros(piece: Tensor) -> int:
    """How many entries are not zero; torch's own count is ten times slower on the CPU."""
    return int(np.count_nonzero(piece.ne(0).cpu().numpy()))


def all_finite(piece: Tensor) -> bool:
    """No NaN and no Inf: a finite sum says so at once, any other is looked into."""
    wide = torch.promote_types(piece.dtype, torch.float32)
    return math.isfinite(float(piece.sum(dtype=wide))) or bool(torch.isfinite(piece).all())
