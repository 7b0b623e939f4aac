"""Tied weights in a stream: every stored copy of a tensor is moved by the same update and counted once.

A loader ties weights only where the file holds equal copies, so copies must come out with the same bits, also
where the mask or the merge draws coins by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradfix.stream.updates import Piece, Update


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
