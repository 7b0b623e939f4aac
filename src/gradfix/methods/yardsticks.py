"""What results are measured against: the old fine-tune on its own base, and the sizes that costs are counted in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch

from gradfix.errors import GradfixError
from gradfix.methods.trial import Trial
from gradfix.tasks.base import Bound
from gradfix.tasks.embedding import EmbeddingBound, texts_of
from gradfix.tasks.scoring import evaluate
from gradfix.training.free_text import alone

SAMPLE = 256  # rows whose length stands for all


def had(trial: Trial, open_old: Callable[[], Bound | None]) -> dict[str, float] | None:
    """What a user had: the old fine-tune with its own base, head and tokenizer, on the test examples.

    `open_old` opens it where it is no teacher. None where there are none, or where it cannot be opened; a note says why."""
    found: dict[str, float] | None = trial.shared("had", lambda: _had(trial, open_old))
    return found


def _had(trial: Trial, open_old: Callable[[], Bound | None]) -> dict[str, float] | None:
    test = trial.splits.test
    if not test:
        return None
    try:
        old = trial.teacher() or open_old()
        if old is None:
            return None
        with alone(old, trial.bound):
            return evaluate(old.model, old, old.scoring_batches(test, trial.passes.batch_size))
    except GradfixError as error:
        trial.notes.append(f"the old fine-tune could not be scored on its own base: {error}")
        return None


def trained_weights(bound: Bound) -> int:
    names = set(bound.trainable())
    return sum(p.numel() for name, p in bound.model.named_parameters() if name in names)


def tokens_seen(trial: Trial) -> float:
    """Tokens a sample sends through the weights: its words, on average, or a picture's patches."""
    splits = trial.splits
    if isinstance(trial.bound, EmbeddingBound):
        rows = splits.test or splits.validation or splits.train or splits.unlabelled or ()
        texts = [text for row in rows[:SAMPLE] for text in texts_of(row)]
        return float(trial.bound.encoder.read(texts)["attention_mask"].sum(-1).double().mean())
    if not splits.test:
        trial.define("seen", splits.validation or splits.train[:128])
    batches = trial.batches("test" if splits.test else "seen")
    batch = next(batches)
    if "attention_mask" in batch:
        masks = [part["attention_mask"] for part in chain([batch], batches)]
        return float(torch.cat([mask.sum(-1).double().flatten() for mask in masks]).mean())
    if "input_ids" in batch:
        parts = [part["input_ids"] for part in chain([batch], batches)]
        return sum(len(part) * part.shape[-1] for part in parts) / sum(len(part) for part in parts)
    config = getattr(trial.model, "config", None)
    config = getattr(config, "vision_config", config)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int):
        return float((size // patch) ** 2 + 1)
    return 1.0
