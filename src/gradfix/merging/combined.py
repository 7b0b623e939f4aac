"""The merge as what a stream adds to the target: the vectors of one stretch, combined by the method's rule.

The files are hashed and every vector is counted on the way; an interrupted run finds its counts in the journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.input_hashes import InputHashes
from gradfix.checkpoints.open import Checkpoint
from gradfix.differences import Differences, Raw, Side
from gradfix.errors import CorruptInput
from gradfix.fates import Fate, total
from gradfix.merging.bundles import Merge, Place, Rule
from gradfix.pieces import Buffers, all_finite, nonzeros
from gradfix.updates import Piece, Update


class Combined(Update):
    """The merged update, piece by piece; `count` says afterwards what was seen of a vector."""

    def __init__(self, bundle: Differences, method: Merge, rule: Rule, hashes: InputHashes) -> None:
        self.bundle, self.method, self.rule, self.hashes = bundle, method, rule, hashes
        self.room = Buffers()
        self._counts: dict[str, list[Fate]] = {}

    def piece_size(self, name: str) -> int:
        return self.method.piece_size(self.bundle.shapes[name])

    def pieces(self, name: str) -> Iterator[Piece]:
        size = self.piece_size(name)
        walk = self.bundle.raw(name, size, lambda source: self.hashes.chunks(source, name, size))
        for index, raw in enumerate(walk):
            yield _Stretch(self, Place(name, self.bundle.shapes[name], index), raw)

    def took(self, name: str, piece: Piece) -> None:
        assert isinstance(piece, _Stretch)
        counts = self._counts.setdefault(name, [Fate() for _ in self.bundle.sides])
        for whole, part in zip(counts, piece.counts, strict=True):
            whole.add(part)

    def facts(self, name: str) -> Any:
        return [asdict(count) for count in self._counts[name]]

    def recall(self, name: str, facts: Any) -> None:
        self._counts[name] = [Fate(**count) for count in facts]

    def count(self, vector: int) -> Fate:
        """What was seen of one vector: entries that differ, those its mask kept, and the squares."""
        return total(counts[vector] for counts in self._counts.values())


class _Stretch(Piece):
    """The same stretch of all files."""

    def __init__(self, owner: Combined, place: Place, raw: Raw) -> None:
        self.owner, self.place, self.raw = owner, place, raw
        self.counts: list[Fate] = []

    def blocks(self) -> Iterator[Tensor]:
        bundle, room = self.owner.bundle, self.owner.room
        wide = bundle.widened(self.raw, room)
        bases = {id(side.base): wide[id(side.base)] for side in bundle.sides}
        squares = {key: float(torch.dot(base, base)) for key, base in bases.items()}
        deltas = bundle.deltas(wide, room)
        shown = bundle.all_shown(self.raw, deltas)
        self.counts = self._counted(deltas, shown, squares)
        yield self.owner.rule(self.place, shown)

    def _counted(self, deltas: list[Tensor], shown: list[Tensor], squares: Mapping[int, float]) -> list[Fate]:
        counts = []
        for side, delta, left in zip(self.owner.bundle.sides, deltas, shown, strict=True):
            square = float(torch.dot(delta, delta))
            if not math.isfinite(square):
                self._blame(side)
            if side.ballot is not None:
                nonzero, kept = nonzeros(delta), nonzeros(left)
            else:  # nothing is dropped, and a square above zero says that there is something
                nonzero = kept = delta.numel() if square > 0 else nonzeros(delta)
            counts.append(Fate(nonzero, kept, tau_square=square, base_square=squares[id(side.base)]))
        return counts

    def _blame(self, side: Side) -> None:
        for checkpoint in (side.base, side.tuned):
            if not all_finite(self.raw.pieces[id(checkpoint)]):
                raise CorruptInput(
                    f"tensor {self.place.name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it."
                )

    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        """The vectors have been checked while they were counted."""
        return []
