"""Flat pieces of a tensor: cut to another size, counted, checked.

The counts and checks run once per piece of every input, so they are the quick ones for the CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

MINUS_ZERO = np.int16(-0x8000)  # the sign bit of a 16-bit float alone, and the smallest integer
SHORT = (torch.bfloat16, torch.float16)


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
    """How many entries are not zero; torch's own comparisons are six times slower on the CPU."""
    if piece.dtype in SHORT:
        return int(np.count_nonzero(_bits(piece) << 1))
    return int(np.count_nonzero(piece.cpu().numpy() != 0))


def differing(left: Tensor, right: Tensor) -> int:
    """How many entries of two pieces are not equal."""
    if left.dtype is not right.dtype:
        return int(np.count_nonzero((left != right).cpu().numpy()))
    if left.dtype not in SHORT:
        return int(np.count_nonzero(left.cpu().numpy() != right.cpu().numpy()))
    mine, other = _bits(left), _bits(right)
    count = int(np.count_nonzero(mine != other))
    if left.numel() and MINUS_ZERO in (mine.min(), other.min()):  # zeros of either sign are equal
        count -= int(np.count_nonzero((mine != other) & ((mine | other) == MINUS_ZERO)))
    return count


def _bits(piece: Tensor) -> np.ndarray[Any, Any]:
    """numpy knows no bf16, and compares fp16 slowly."""
    found: np.ndarray[Any, Any] = piece.cpu().view(torch.int16).numpy()
    return found


def all_finite(piece: Tensor) -> bool:
    """No NaN and no Inf: a finite sum says so at once, any other is looked into."""
    wide = torch.promote_types(piece.dtype, torch.float32)
    return math.isfinite(float(piece.sum(dtype=wide))) or bool(torch.isfinite(piece).all())


class Buffers(threading.local):
    """Room for pieces that every thread uses again: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        """Room for so many entries; it is the same room for the same role in this thread."""
        held = self._held.get((role, dtype))
        if held is None or held.numel() < count:
            held = self._held[role, dtype] = torch.empty(count, dtype=dtype)
        return held[:count]

    def wide(self, role: str, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """The piece in this dtype, to be read only: itself where it has it already, else a copy."""
        return piece if piece.dtype is dtype else self.empty(role, piece.numel(), dtype).copy_(piece)
