"""Flat pieces of a tensor, cut to another size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
