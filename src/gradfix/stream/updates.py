"""What a stream adds to the target, before the mask: read in order, computed by workers, piece by piece.

A transport's update is the difference of two files, a merge's comes out of many. Both hand out pieces whose
arithmetic is done later, in a worker and while their numbers lie in its cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.input_hashes import InputHashes
from gradfix.checkpoints.open import CHUNK, Checkpoint
from gradfix.stream.pieces import Buffers

SPAN = 4  # chunks read at a time
BLOCK = 1 << 18  # entries computed at a time; with fewer, threads wait for Python more than they compute


class Piece(ABC):
    """A stretch of one tensor's update, not yet computed."""

    base_square = 0.0  # of what the update is a change of; known once the blocks have been walked

    @abstractmethod
    def blocks(self) -> Iterator[Tensor]:
        """The update, some entries at a time; each holds until the next is asked for and may be changed."""

    @abstractmethod
    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        """Where a NaN can have come from."""


class Update(ABC):
    """The pieces of every tensor, and what is counted of them."""

    light = True  # is the arithmetic less work than reading, hashing and writing?

    @abstractmethod
    def piece_size(self, name: str) -> int: ...

    @abstractmethod
    def pieces(self, name: str) -> Iterator[Piece]:
        """In order, of `piece_size` entries each; the last may be shorter."""

    def took(self, name: str, piece: Piece) -> None:
        """This piece has been computed; called in order, in one thread."""
        return

    def facts(self, name: str) -> Any:
        """What was counted of a whole tensor, as JSON, for the journal."""
        return None

    def recall(self, name: str, facts: Any) -> None:
        """The facts of a tensor that an interrupted run has written."""
        return


class Difference(Update):
    """Fine-tune minus base."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, hashes: InputHashes) -> None:
        self.base, self.tuned, self.hashes = base, tuned, hashes
        self.buffers = Buffers()

    def piece_size(self, name: str) -> int:
        return SPAN * CHUNK

    def pieces(self, name: str) -> Iterator[Piece]:
        size = self.piece_size(name)
        before, after = (self.hashes.chunks(source, name, size) for source in (self.base, self.tuned))
        for base, tuned in zip(before, after, strict=True):
            yield _Pair(self, base, tuned)


class _Pair(Piece):
    """The same stretch of both files."""

    def __init__(self, owner: Difference, base: Tensor, tuned: Tensor) -> None:
        self.owner, self.base, self.tuned = owner, base, tuned

    def blocks(self) -> Iterator[Tensor]:
        double = torch.float64 in (self.base.dtype, self.tuned.dtype)
        dtype = torch.float64 if double else torch.float32
        buffers = self.owner.buffers
        for first in range(0, len(self.base), BLOCK):
            base, tuned = self.base[first : first + BLOCK], self.tuned[first : first + BLOCK]
            before, after = buffers.wide("base", base, dtype), buffers.wide("tuned", tuned, dtype)
            room = buffers.empty("delta", len(base), dtype) if after is tuned else after
            delta = torch.sub(after, before, out=room)
            self.base_square += float(torch.dot(before, before))
            yield delta

    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        return [(self.owner.base, self.base), (self.owner.tuned, self.tuned)]
