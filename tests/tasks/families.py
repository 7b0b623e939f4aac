"""One table of task and tiny family: what every task must do is tested over all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradfix.tasks import TASKS, Bound
from tiny import IMAGE_LABELS, TEXT_LABELS, save_tiny, toy_images, toy_texts

TEXT_PROMPTS: dict[str, Any] = {"negative": "a bad poor film", "positive": "a good fine film"}
IMAGE_PROMPTS: dict[str, Any] = {label: f"a photo of {label}" for label in IMAGE_LABELS}


@dataclass(frozen=True)
class Case:
    """A task on a family, and the fine-tune that learns the toy data."""

    task: str
    family: str
    images: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 3e-3
    steps: int = 40

    def __str__(self) -> str:
        return "-".join([self.task, self.family, *map(str, self.options.values())])

    def labels(self) -> dict[str, Any]:
        if self.task == "zero-shot":
            return IMAGE_PROMPTS if self.images else TEXT_PROMPTS
        return {label: label for label in (IMAGE_LABELS if self.images else TEXT_LABELS)}

    def save(self, folder: Path, seed: int = 0) -> Path:
        return save_tiny(self.family, folder / f"{self.family}-{seed}", seed)

    def open(self, folder: Path, dtype: torch.dtype = torch.float32) -> Bound:
        return TASKS[self.task](self.labels(), **self.options).open(folder, dtype=dtype)

    def rows(self, count: int, seed: int = 0) -> Sequence[dict[str, Any]]:
        return toy_images(count, seed) if self.images else toy_texts(count, seed)


CASES = [
    Case("zero-shot", "bert"),
    Case("zero-shot", "bert", options={"pooling": "cls"}),
    Case("zero-shot", "clip", images=True),
    Case("zero-shot", "siglip", images=True),
    Case("zero-shot", "open_clip", images=True),
    Case("classification", "bert_classifier"),
    Case("classification", "vit", images=True),
    Case("classification", "timm", images=True),
    Case("seq2seq", "t5", lr=1e-2),
    Case("seq2seq", "t5", options={"loss": "sum"}, lr=1e-2),
    Case("causal", "llama"),
    Case("causal", "gpt2"),
    Case("causal", "mixtral"),
]
