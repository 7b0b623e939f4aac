"""A checkpoint of zeros: the base of an update that is already a difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.open import CHUNK, Checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo


class Zeros(Checkpoint):
    """The names and shapes of another checkpoint, nothing in them."""

    def __init__(self, like: Checkpoint) -> None:
        self.like = like

    def names(self) -> list[str]:
        return self.like.names()

    def info(self, name: str) -> TensorInfo:
        return self.like.info(name)

    def read(self, name: str) -> Tensor:
        return torch.zeros(self.info(name).shape, dtype=self.info(name).dtype)

    def identity(self) -> Any:
        return self.like.identity()

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        info = self.info(name)
        for first in range(0, info.numel, elements):
            yield torch.zeros(min(elements, info.numel - first), dtype=info.dtype)
