"""One model, saved with and without a head: the same tensors under another prefix.

`BertModel` writes `embeddings...`, `BertForSequenceClassification` writes `bert.embeddings...`. Before
checkpoints are compared, base and fine-tune are shown under the target's prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfix.checkpoints.open import CHUNK, Checkpoint
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo


class Renamed(Checkpoint):
    """Another checkpoint under other names."""

    def __init__(self, whole: Checkpoint, original: dict[str, str]) -> None:
        self.whole, self.original = whole, original
        self.path, self.notes = whole.path, whole.notes

    def names(self) -> list[str]:
        return list(self.original)

    def info(self, name: str) -> TensorInfo:
        return self.whole.info(self.original[name])

    def read(self, name: str) -> Tensor:
        return self.whole.read(self.original[name])

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        return self.whole.chunks(self.original[name], elements)

    def span(self, name: str, first: int, count: int) -> Tensor:
        return self.whole.span(self.original[name], first, count)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return self.whole.stored(self.original[name])

    def identity(self) -> Any:
        whole = self.whole.identity()
        return None if whole is None else [whole, self.original]

    @property
    def files(self) -> list[Path]:
        return self.whole.files

    def __contains__(self, name: object) -> bool:
        return name in self.original


def match_prefix(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or a view of it under the target's prefix where that makes most names agree."""
    goal = set(target.names())
    names = checkpoint.names()
    if len(goal & set(names)) * 2 > len(names):
        return checkpoint
    for prefix in (_common(target.names()), _common(names)):
        added = {f"{prefix}.{name}": name for name in names}
        removed = {name.removeprefix(f"{prefix}."): name for name in names}
        for renamed in (added, removed):
            if prefix and len(goal & set(renamed)) * 2 > len(names):
                return Renamed(checkpoint, renamed)
    return checkpoint


def _common(names: list[str]) -> str:
    """The first name part that most tensors share, or nothing."""
    parts = Counter(name.split(".", 1)[0] for name in names if "." in name)
    return next((part for part, count in parts.most_common(1) if count * 2 > len(names)), "")
