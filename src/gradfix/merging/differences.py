"""Task vectors that are never held: differences of files, read side by side and masked on the way.

Every distinct file is read once per walk, however many vectors share it. The arithmetic runs in worker
threads a few pieces ahead of the reader; pieces arrive in order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradfix.checkpoints.open import CHUNK, Checkpoint
from gradfix.checkpoints.trio import Plan
from gradfix.merging.bundles import Bundle
from gradfix.stream.ballot import Ballot
from gradfix.stream.pieces import Buffers
from gradfix.system.threads import PieceWorkers, ahead
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.transported import mask_piece

SPAN = 2  # pieces of every file read at a time

T = TypeVar("T")
Votes = SignVotes | str | os.PathLike[str]


@dataclass
class Side:
    """One opened vector."""

    base: Checkpoint
    tuned: Checkpoint
    votes: Votes | None
    vocabulary: Mapping[str, Any]  # how token rows were matched, where they had to be
    ballot: Ballot | None = None

    def identity(self) -> Any:
        """By what an interrupted run recognises the vector again; None where it cannot."""
        parts = [self.base.identity(), self.tuned.identity()]
        return None if None in parts else [*parts, self.ballot and self.ballot.identity()]


class Differences(Bundle):
    """The vectors as differences read from files, masked by their ballots where they have one."""

    def __init__(self, sides: list[Side], plan: Plan, counting: Callable[[int], None] | None = None) -> None:
        self.sides, self.pool, self.counting = sides, PieceWorkers(), counting
        self.count = len(sides)
        names = [name for name in plan.transported if name not in plan.tied]
        self.shapes = {name: sides[0].base.info(name).shape for name in names}
        kinds = {c.info(n).dtype for side in sides for c in (side.base, side.tuned) for n in names}
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32

    def pieces(self, name: str, size: int) -> Iterator[list[Tensor]]:
        walk = self._heard([name], size)
        return ahead(self.pool, lambda raw: self.all_shown(raw, self.deltas(self.widened(raw))), walk)

    def measured(self, measure: Callable[[list[Tensor]], T], name: str | None = None) -> Iterator[T]:
        names = sorted(self.shapes) if name is None else [name]
        room = Buffers()

        def shown(raw: Raw) -> list[Tensor]:
            return self.all_shown(raw, self.deltas(self.widened(raw, room), room))

        def work(stretch: Raw) -> list[T]:
            return [measure(shown(raw)) for raw in stretch.parts(CHUNK)]

        return chain.from_iterable(ahead(self.pool, work, self._heard(names, SPAN * CHUNK)))

    def _heard(self, names: Iterable[str], size: int) -> Iterator[Raw]:
        """A walk for a method's statistics; `counting` hears how many bytes of the files went by."""
        for name in names:
            for raw in self.raw(name, size, lambda source, name=name: source.chunks(name, size)):  # type: ignore[misc]
                if self.counting is not None:
                    self.counting(sum(p.numel() * p.dtype.itemsize for p in raw.pieces.values()))
                yield raw

    def raw(self, name: str, size: int, read: Callable[[Checkpoint], Iterator[Tensor]]) -> Iterator[Raw]:
        """Every distinct file once, and what each mask is shown."""
        sources = {id(c): c for side in self.sides for c in (side.base, side.tuned)}
        entries = math.prod(self.shapes[name])
        ballots = [
            s.ballot.pieces(name, entries, size) if s.ballot and s.ballot.has(name) else None
            for s in self.sides
        ]
        for pieces in zip(*(read(source) for source in sources.values()), strict=True):
            seen = [None if ballot is None else next(ballot) for ballot in ballots]
            yield Raw(dict(zip(sources, pieces, strict=True)), seen)

    def widened(self, raw: Raw, room: Buffers | None = None) -> dict[int, Tensor]:
        """Every file's stretch in float32 or better; in `room` it holds until the next call in this thread."""
        kinds = {key: torch.promote_types(piece.dtype, torch.float32) for key, piece in raw.pieces.items()}
        if room is None:
            return {key: piece.to(kinds[key]) for key, piece in raw.pieces.items()}
        return {key: room.wide(str(key), piece, kinds[key]) for key, piece in raw.pieces.items()}

    def deltas(self, wide: Mapping[int, Tensor], room: Buffers | None = None) -> list[Tensor]:
        """Per vector the difference of its two files."""
        pairs = [(wide[id(side.tuned)], wide[id(side.base)]) for side in self.sides]
        if room is None or self.dtype is torch.float64:
            return [tuned - base for tuned, base in pairs]
        rooms = [room.empty(f"delta {i}", len(base), self.dtype) for i, (_, base) in enumerate(pairs)]
        return [torch.sub(*pair, out=own) for pair, own in zip(pairs, rooms, strict=True)]

    def all_shown(self, raw: Raw, deltas: list[Tensor]) -> list[Tensor]:
        """What the masks leave of the differences."""
        return [self._shown(*parts) for parts in zip(self.sides, deltas, raw.seen, strict=True)]

    def _shown(self, side: Side, delta: Tensor, seen: Tensor | None) -> Tensor:
        if side.ballot is None:
            return delta.to(self.dtype)
        if seen is None:
            return torch.zeros_like(delta, dtype=self.dtype)
        return mask_piece(side.ballot.rule, delta, seen, side.ballot.options).to(self.dtype)


@dataclass(frozen=True)
class Raw:
    """The same stretch of every file (by the checkpoint's id) and of every ballot."""

    pieces: dict[int, Tensor]
    seen: list[Tensor | None]

    def parts(self, size: int) -> Iterator[Raw]:
        """The stretch in pieces of `size` entries; the last may be shorter."""
        for first in range(0, len(next(iter(self.pieces.values()))), size):
            here = slice(first, first + size)
            seen = [None if votes is None else votes[here] for votes in self.seen]
            yield Raw({key: piece[here] for key, piece in self.pieces.items()}, seen)
