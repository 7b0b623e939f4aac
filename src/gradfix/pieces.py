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

WITHOUT_SIGN = 0x7FFF  # the bits of a bf16 number that are zero in a zero


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
    if piece.dtype is torch.bfloat16:
        return int(np.count_nonzero(_bits(piece) & WITHOUT_SIGN))
    return int(np.count_nonzero(piece.cpu().numpy() != 0))


def differing(left: Tensor, right: Tensor) -> int:
    """How many entries of two pieces are not equal."""
    if left.dtype is not right.dtype:
        return nonzeros(left != right)
    if left.dtype is torch.bfloat16:  # numpy knows no bf16: other bits, unless both are zeros of either sign
        mine, other = _bits(left), _bits(right)
        return int(np.count_nonzero((mine != other) & (((mine | other) & WITHOUT_SIGN) != 0)))
    return int(np.count_nonzero(left.cpu().numpy() != right.cpu().numpy()))


def _bits(piece: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = piece.cpu().view(torch.int16).numpy()
    return found


def all_finite(piece: Tensor) -> bool:
    """No NaN and no Inf: a finite sum says so at once, any other is looked into."""
    wide = torch.promote_types(piece.dtype, torch.float32)
    return math.isfinite(float(piece.sum(dtype=wide))) or bool(torch.isfinite(piece).all())


class Buffers(threading.local):
    """Wide copies of pieces in memory that every thread uses again: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}

    def wide(self, *pieces: Tensor) -> list[Tensor]:
        """Copies in float32, or float64 where a piece is; they hold until the next call in this thread.

        All but the last share one dtype."""
        first = torch.float64 if any(p.dtype is torch.float64 for p in pieces[:-1]) else torch.float32
        kinds = [first] * (len(pieces) - 1) + [torch.promote_types(pieces[-1].dtype, torch.float32)]
        return [self._copy(place, p, kind) for place, (p, kind) in enumerate(zip(pieces, kinds, strict=True))]

    def _copy(self, place: int, piece: Tensor, kind: torch.dtype) -> Tensor:
        held = self._held.get((place, kind))
        if held is None or held.numel() < piece.numel():
            held = self._held[place, kind] = torch.empty(piece.numel(), dtype=kind)
        return held[: piece.numel()].copy_(piece)
