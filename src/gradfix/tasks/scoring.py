"""Score weights on labelled examples; the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.votes.engines.passes import Batch, Loss


class Scorer(Protocol):
    """The part of a task that scoring needs."""

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predicted label indices and per-sample losses."""
        ...


def evaluate(model: nn.Module, task: Scorer, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy in percent, mean loss and the number of samples. A batch holds its answers as "labels"."""
    right, loss, count = 0, 0.0, 0
    with left_as_it_was(model), torch.no_grad():
        for batch in batches:
            answers = batch["labels"]
            guesses, losses = task.judge(model, batch)
            right += int((guesses == answers).sum())
            loss += float(losses.double().sum())
            count += len(answers)
    if count == 0:
        raise DataError("no examples to score; check the data and its split.")
    return {"accuracy": 100 * right / count, "loss": loss / count, "samples": count}


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    with left_as_it_was(model), torch.no_grad():
        losses = torch.cat([loss(model, batch).double().cpu() for batch in batches])
    return float(losses.mean())
