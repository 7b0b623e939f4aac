"""Tasks whose answers are words: how a generating model is opened and how its labels are spelled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from gradfix.errors import UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Bound, Prompts, Task
from gradfix.tasks.loading import load_pretrained, load_tokenizer, locate
from gradfix.tasks.reading import longest

LOSSES = ("mean", "sum")


class AnswerTask(Task):
    """A generating model and the texts of its labels; subclasses name the loader and what it is bound to."""

    loader: ClassVar[str]
    bound: ClassVar[Callable[..., Bound]]
    scorings: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        labels: Mapping[str, Prompts],
        loss: str,
        scoring: str,
        max_length: int | None,
        trust_remote_code: bool,
    ) -> None:
        if loss not in LOSSES:
            raise UsageError(unknown("loss", loss, list(LOSSES)))
        if scoring not in self.scorings:
            raise UsageError(unknown("scoring", scoring, list(self.scorings)))
        self.labels = dict(labels)
        self.texts = spelled_labels(labels)
        self.loss, self.scoring = loss, scoring
        self.max_length, self.trust_remote_code = max_length, trust_remote_code

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Load a model. Its answers are its own words; `head_from` is only the base of a LoRA adapter."""
        import transformers

        home = locate(source, head_from)
        trust = self.trust_remote_code
        tokenizer = load_tokenizer(home.folder, trust_remote_code=trust)
        auto = getattr(transformers, self.loader)
        loaded = load_pretrained(auto, home, dtype, device, trust_remote_code=trust)
        length = longest(self.max_length, tokenizer, loaded.model.config)
        bound = type(self).bound(loaded.model, tokenizer, self.texts, self.loss, self.scoring, length)
        bound.source, bound.notes = home.adapter or home.folder, loaded.notes
        return bound


def spelled_labels(labels: Mapping[str, Prompts]) -> dict[str, str]:
    """One text per label, all different."""
    texts: dict[str, str] = {}
    for label, text in labels.items():
        if not isinstance(text, str):
            raise UsageError(f"the label {label!r} has several texts; an answer needs exactly one.")
        if text in texts.values():
            raise UsageError(f"two labels share the text {text!r}; the answers could not be told apart.")
        texts[label] = text
    return texts
