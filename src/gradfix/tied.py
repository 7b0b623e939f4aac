"""Tied weights in a stream: every stored copy of a tensor is moved by the same update under the same votes.

A loader ties weights only where the file holds equal copies, so copies must come out with the same bits, also
where the mask or the merge draws coins by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from gradfix.checkpoints.open import Checkpoint
from gradfix.preflight import Plan
from gradfix.updates import Piece, Update
from gradfix.votes.ballot import Ballot, OpenVotes
from gradfix.votes.tally import SignVotes

AnyVotes = SignVotes | OpenVotes | str | os.PathLike[str]


class TiedUpdate(Update):
    """Another update, asked for a copy by the name of its original; a copy is counted with its original."""

    def __init__(self, update: Update, tied: Mapping[str, str]) -> None:
        self.update, self.tied, self.light = update, tied, update.light

    def piece_size(self, name: str) -> int:
        return self.update.piece_size(self.tied.get(name, name))

    def pieces(self, name: str) -> Iterator[Piece]:
        return self.update.pieces(self.tied.get(name, name))

    def took(self, name: str, piece: Piece) -> None:
        if name not in self.tied:
            self.update.took(name, piece)

    def facts(self, name: str) -> Any:
        return None if name in self.tied else self.update.facts(name)

    def recall(self, name: str, facts: Any) -> None:
        if name not in self.tied:
            self.update.recall(name, facts)


class TiedBallot(Ballot):
    """Votes that hold for all copies of a tensor, whichever of their names they were taken under."""

    def __init__(
        self,
        votes: AnyVotes | None,
        mask: str,
        margin: float | None,
        seed: int | None,
        plan: Plan,
        target: Checkpoint,
    ) -> None:
        super().__init__(votes, mask, margin, seed, plan, target)
        groups: dict[str, list[str]] = {}
        for copy, original in plan.tied.items():
            groups.setdefault(original, [original]).append(copy)
        self._voted = {
            name: next((n for n in names if Ballot.has(self, n)), names[0])
            for names in groups.values()
            for name in names
        }

    def has(self, name: str) -> bool:
        return super().has(self._voted.get(name, name))

    def pieces(self, name: str, count: int, elements: int) -> Iterator[Tensor]:
        return super().pieces(self._voted.get(name, name), count, elements)
