"""The merge as what a stream adds to the target: the vectors of one stretch, combined by the method's rule.

The files are hashed and every vector is counted on the way; an interrupted run finds its counts in the journal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.input_hashes import InputHashes
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput
from gradfix.merging.bundles import Merge, Place, Rule
from gradfix.merging.differences import SPAN, Differences, Raw, Side
from gradfix.stream.counts import Fate, total
from gradfix.stream.pieces import Buffers, all_finite, nonzeros
from gradfix.stream.updates import Piece, Update


class Combined(Update):
    """The merged update, piece by piece; `count` says afterwards what was seen of a vector."""

    def __init__(self, bundle: Differences, method: Merge, rule: Rule, hashes: InputHashes) -> None:
        self.bundle, self.method, self.rule, self.hashes = bundle, method, rule, hashes
        self.room = Buffers()
        self.light = "density" not in method.options  # to trim or to draw is more work than to add
        self._counts: dict[str, list[Fate]] = {}

    def piece_size(self, name: str) -> int:
        return SPAN * self.rule_size(name)

    def rule_size(self, name: str) -> int:
        """The entries a rule is shown at a time."""
        return self.method.piece_size(self.bundle.shapes[name])

    def pieces(self, name: str) -> Iterator[Piece]:
        size = self.piece_size(name)
        walk = self.bundle.raw(name, size, lambda source: self.hashes.chunks(source, name, size))
        for number, raw in enumerate(walk):
            yield _Stretch(self, name, number * SPAN, raw)

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
    """The same stretch of all files, shown to the rule in parts."""

    def __init__(self, owner: Combined, name: str, index: int, raw: Raw) -> None:
        self.owner, self.name, self.index, self.raw = owner, name, index, raw
        self.counts = [Fate() for _ in owner.bundle.sides]

    def blocks(self) -> Iterator[Tensor]:
        shape = self.owner.bundle.shapes[self.name]
        for index, part in enumerate(self.raw.parts(self.owner.rule_size(self.name)), self.index):
            yield self.owner.rule(Place(self.name, shape, index), self._shown(part))

    def _shown(self, part: Raw) -> list[Tensor]:
        """What the masks leave of the vectors, counted."""
        bundle, room = self.owner.bundle, self.owner.room
        wide = bundle.widened(part, room)
        bases = {id(side.base): wide[id(side.base)] for side in bundle.sides}
        squares = {key: float(torch.dot(base, base)) for key, base in bases.items()}
        deltas = bundle.deltas(wide, room)
        shown = bundle.all_shown(part, deltas)
        for place, side in enumerate(bundle.sides):
            counted = self._counted(side, part, deltas[place], shown[place])
            counted.base_square = squares[id(side.base)]
            self.counts[place].add(counted)
        return shown

    def _counted(self, side: Side, part: Raw, delta: Tensor, left: Tensor) -> Fate:
        square = float(torch.dot(delta, delta))
        if not math.isfinite(square):
            self._blame(side, part)
        if side.ballot is not None:
            return Fate(nonzeros(delta), nonzeros(left), tau_square=square)
        # Nothing is dropped, and a square above zero says that there is something.
        nonzero = delta.numel() if square > 0 else nonzeros(delta)
        return Fate(nonzero, nonzero, tau_square=square)

    def _blame(self, side: Side, part: Raw) -> None:
        for checkpoint in (side.base, side.tuned):
            if not all_finite(part.pieces[id(checkpoint)]):
                raise CorruptInput(
                    f"tensor {self.name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it."
                )

    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        """The vectors have been checked while they were counted."""
        return []
