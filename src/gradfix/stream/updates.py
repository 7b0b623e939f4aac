"""What a stream adds to the target: read in order, computed by workers, piece by piece, masked, added and counted.

A transport's update is the difference of two files, a merge's comes out of many, and some are there already. All
hand out pieces whose arithmetic is done later, in a worker and while their numbers lie in its cache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.weights import CHUNK, Checkpoint
from gradfix.errors import UnsafeResult
from gradfix.stream.ballot import Ballot
from gradfix.stream.pieces import Buffers, all_finite, differing, nonzeros
from gradfix.vectors.taskvector import MAX_NORM_RATIO, no_change, not_a_fine_tune
from gradfix.vectors.transported import mask_piece, share

SPAN = 4  # chunks read at a time
BLOCK = 1 << 18  # entries computed at a time; with fewer, threads wait for Python more than they compute
WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)
SMALL = 1e9  # times a change whose squares add up, this moves no number of a wide range over its end


@dataclass
class Counts:
    """What was counted of one transported tensor while it passed by."""

    nonzero: int = 0
    kept: int = 0
    survived: int = 0  # kept entries whose weight really changed after rounding to the output's dtype
    tau_square: float = 0.0
    base_square: float = 0.0
    present: int = 0  # entries that some vector changes, where a merge drops some of them before a mask does

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def norm_ratio(self) -> float:
        """Size of the change beside the size of what was changed."""
        return (self.tau_square / self.base_square) ** 0.5 if self.base_square else 0.0

    def kept_share(self) -> float:
        """The share of the update, or of what was merged into it, that is left."""
        return share(self.kept, self.present or self.nonzero)

    def as_json(self) -> dict[str, Any]:
        return {"kept": round(self.kept_share(), 6), "survived_rounding": round(share(self.survived, self.kept), 6)}


def total(counts: Iterable[Counts]) -> Counts:
    whole = Counts()
    for part in counts:
        whole.add(part)
    return whole


class Piece(ABC):
    """A stretch of one tensor's update, not yet computed."""

    base_square = 0.0  # of what the update is a change of; known once the blocks have been walked
    present = 0  # entries that at least one merged vector changes; known then as well

    @abstractmethod
    def blocks(self) -> Iterator[Tensor]:
        """The update, some entries at a time; each holds until the next is asked for and may be changed."""

    @abstractmethod
    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        """Where a NaN can have come from."""


class Update(ABC):
    """The pieces of every tensor, and what is counted of them."""

    cheap = True  # is the arithmetic less work than reading, hashing and writing?

    @abstractmethod
    def piece_size(self, name: str) -> int: ...

    @abstractmethod
    def pieces(self, name: str) -> Iterator[Piece]:
        """In order, of `piece_size` entries each; the last may be shorter."""

    def computed(self, name: str, piece: Piece) -> None:
        """This piece has been computed; called in order, in one thread."""
        return

    def facts(self, name: str) -> Any:
        """What was counted of a whole tensor, as JSON, for the journal."""
        return None

    def recall(self, name: str, facts: Any) -> None:
        """The facts of a tensor that an interrupted run has written."""
        return

    def identity(self) -> Any:
        """By what an interrupted run recognises the update again, as JSON; None where it cannot."""
        return None

    def judge(self, whole: Counts, target: Checkpoint, force: bool) -> dict[str, Any]:
        """Details for the manifest, once everything has passed by; raises for what should not be written."""
        if whole.nonzero == 0:
            raise UnsafeResult("the update is zero in every weight: nothing would be transported.")
        return {}


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

    def identity(self) -> Any:
        parts = [self.base.identity(), self.tuned.identity()]
        return None if None in parts else parts

    def judge(self, whole: Counts, target: Checkpoint, force: bool) -> dict[str, Any]:
        if whole.nonzero == 0:
            raise no_change(self.base, self.tuned)
        if whole.norm_ratio() > MAX_NORM_RATIO and not force:
            raise not_a_fine_tune(self.base, self.tuned, whole.norm_ratio(), target)
        return {}


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


class Ready(Update):
    """An update that is there already, tensor by tensor."""

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.buffers = source, Buffers()

    def piece_size(self, name: str) -> int:
        return SPAN * CHUNK

    def pieces(self, name: str) -> Iterator[Piece]:
        return (_Stretch(self, values) for values in self.source.chunks(name, self.piece_size(name)))


class _Stretch(Piece):
    """Some entries of an update that is there."""

    def __init__(self, owner: Ready, values: Tensor) -> None:
        self.owner, self.values = owner, values

    def blocks(self) -> Iterator[Tensor]:
        dtype = torch.promote_types(self.values.dtype, torch.float32)
        for block in self.values.split(BLOCK):
            yield self.owner.buffers.empty("delta", len(block), dtype).copy_(block)

    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        return [(self.owner.source, self.values)]


class TiedUpdate(Update):
    """Another update, asked for a copy by the name of its original; a copy is counted with its original.

    A loader ties weights only where the file holds equal copies, so copies must come out with the same bits, also
    where the mask or the merge draws coins by name."""

    def __init__(self, update: Update, tied: Mapping[str, str]) -> None:
        self.update, self.tied, self.cheap = update, tied, update.cheap

    def piece_size(self, name: str) -> int:
        return self.update.piece_size(self.tied.get(name, name))

    def pieces(self, name: str) -> Iterator[Piece]:
        return self.update.pieces(self.tied.get(name, name))

    def computed(self, name: str, piece: Piece) -> None:
        if name not in self.tied:
            self.update.computed(name, piece)

    def facts(self, name: str) -> Any:
        return None if name in self.tied else self.update.facts(name)

    def recall(self, name: str, facts: Any) -> None:
        if name not in self.tied:
            self.update.recall(name, facts)


class NotFiniteError(Exception):
    """A NaN or Inf came in, or came out."""


@dataclass(frozen=True)
class Mover:
    """The arithmetic of one stream: target + alpha * mask(update), counted, checked and rounded once.

    Every pass over the numbers costs as much as the next, so sums that are taken anyway stand for checks of all
    entries: they are finite only if the entries are."""

    ballot: Ballot
    alpha: float
    buffers: Buffers = field(default_factory=Buffers)

    def move(self, into: Tensor, delta: Tensor, target: Tensor, seen: Tensor | None) -> Counts:
        """Fill `into`; `delta` does not survive it."""
        goal = self.buffers.wide("target", target, torch.promote_types(target.dtype, torch.float32))
        masked = mask_piece(self.ballot.rule, delta, seen, self.ballot.options)
        counts = Counts(nonzero=nonzeros(delta), tau_square=float(torch.dot(delta, delta)))
        counts.kept = counts.nonzero if masked is delta else nonzeros(masked)
        sound = math.isfinite(counts.tau_square)
        whole = sound or all_finite(delta)
        moved = masked.to(goal.dtype)
        if self.alpha != 1:
            moved.mul_(self.alpha)
        moved.add_(goal)
        into.copy_(moved)
        # What rounding alone does to the target is no part of the update.
        counts.survived = differing(into, self.buffers.wide("rounded", target, into.dtype))
        if sound and abs(self.alpha) < SMALL and into.dtype is target.dtype and target.dtype in WIDE_RANGE:
            whole = math.isfinite(float(moved.sum())) or all_finite(into)
        elif whole:
            whole = all_finite(into)
        if not whole:
            raise NotFiniteError
        return counts
