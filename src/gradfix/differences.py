"""Task vectors that are never held: differences of files, read side by side and masked on the way.

Every distinct file is read once per walk, however many vectors share it. The arithmetic runs in worker
threads a few pieces ahead of the reader; pieces arrive in order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput
from gradfix.merging.bundles import Bundle, Place, Rule
from gradfix.pieces import all_finite, nonzeros
from gradfix.preflight import Plan
from gradfix.threads import ahead, piece_workers
from gradfix.transported import mask_piece
from gradfix.votes.ballot import Ballot
from gradfix.votes.tally import SignVotes

Votes = SignVotes | str | os.PathLike[str]


@dataclass(frozen=True)
class Count:
    """What was seen of one vector."""

    nonzero: int = 0
    kept: int = 0
    tau_square: float = 0.0
    base_square: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Side:
    """One opened vector, and what was counted while it streamed by for the last time."""

    base: Checkpoint
    tuned: Checkpoint
    votes: Votes | None
    vocabulary: Mapping[str, Any]  # how token rows were matched, where they had to be
    ballot: Ballot | None = None
    count: Count = field(default_factory=Count)


class Differences(Bundle):
    """The vectors as differences read from files, masked by their ballots where they have one."""

    def __init__(self, sides: list[Side], plan: Plan, hashes: InputHashes) -> None:
        self.sides, self.hashes, self.pool = sides, hashes, piece_workers()
        self.count = len(sides)
        floating = [n for n in plan.transported if sides[0].base.info(n).dtype.is_floating_point]
        self.shapes = {name: sides[0].base.info(name).shape for name in floating}
        kinds = {c.info(n).dtype for side in sides for c in (side.base, side.tuned) for n in floating}
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32

    def pieces(self, name: str, size: int) -> Iterator[list[Tensor]]:
        raw = self._raw(name, size, lambda c: c.chunks(name, size))
        return ahead(self.pool, lambda piece: self._all_shown(piece, self._deltas(piece)), raw)

    def merged(self, name: str, size: int, rule: Rule) -> Iterator[Tensor]:
        """The last walk: merge, hash the files, count what the masks keep."""

        def work(item: tuple[int, _Raw]) -> tuple[Tensor, list[Count]]:
            index, raw = item
            deltas = self._deltas(raw)
            shown = self._all_shown(raw, deltas)
            result = rule(Place(name, self.shapes[name], index), shown)
            return result, self._counted(name, raw, deltas, shown)

        raw = self._raw(name, size, lambda c: self.hashes.chunks(c, name, size))
        for result, counts in ahead(self.pool, work, enumerate(raw)):
            for side, count in zip(self.sides, counts, strict=True):
                side.count += count
            yield result

    def _raw(self, name: str, size: int, read: Callable[[Checkpoint], Iterator[Tensor]]) -> Iterator[_Raw]:
        """Every distinct file once, and what each mask is shown."""
        sources = {id(c): c for side in self.sides for c in (side.base, side.tuned)}
        entries = math.prod(self.shapes[name])
        ballots = [
            s.ballot.pieces(name, entries, size) if s.ballot and s.ballot.has(name) else None
            for s in self.sides
        ]
        for pieces in zip(*(read(source) for source in sources.values()), strict=True):
            seen = [None if ballot is None else next(ballot) for ballot in ballots]
            yield _Raw(dict(zip(sources, pieces, strict=True)), seen)

    def _deltas(self, raw: _Raw) -> list[Tensor]:
        """Per vector the difference of its two files."""
        wide = {key: _wide(piece) for key, piece in raw.pieces.items()}
        return [wide[id(side.tuned)] - wide[id(side.base)] for side in self.sides]

    def _all_shown(self, raw: _Raw, deltas: list[Tensor]) -> list[Tensor]:
        """What the masks leave of the differences."""
        return [self._shown(*parts) for parts in zip(self.sides, deltas, raw.seen, strict=True)]

    def _shown(self, side: Side, delta: Tensor, seen: Tensor | None) -> Tensor:
        if side.ballot is None:
            return delta.to(self.dtype)
        if seen is None:
            return torch.zeros_like(delta, dtype=self.dtype)
        return mask_piece(side.ballot.rule, delta, seen, side.ballot.options).to(self.dtype)

    def _counted(self, name: str, raw: _Raw, deltas: list[Tensor], shown: list[Tensor]) -> list[Count]:
        bases = {id(side.base): _wide(raw.pieces[id(side.base)]) for side in self.sides}
        squares = {key: float(torch.dot(base, base)) for key, base in bases.items()}
        counts = []
        for side, delta, left in zip(self.sides, deltas, shown, strict=True):
            square = float(torch.dot(delta, delta))
            if not math.isfinite(square):
                _blame(name, raw, side)
            if side.ballot is not None:
                nonzero, kept = nonzeros(delta), nonzeros(left)
            else:  # nothing is dropped, and a square above zero says that there is something
                nonzero = kept = delta.numel() if square > 0 else nonzeros(delta)
            counts.append(Count(nonzero, kept, square, squares[id(side.base)]))
        return counts


@dataclass(frozen=True)
class _Raw:
    """The same stretch of every file (by the checkpoint's id) and of every ballot."""

    pieces: dict[int, Tensor]
    seen: list[Tensor | None]


def _wide(piece: Tensor) -> Tensor:
    return piece if piece.dtype is torch.float64 else piece.float()


def _blame(name: str, raw: _Raw, side: Side) -> None:
    for checkpoint in (side.base, side.tuned):
        if not all_finite(raw.pieces[id(checkpoint)]):
            raise CorruptInput(f"tensor {name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it.")
