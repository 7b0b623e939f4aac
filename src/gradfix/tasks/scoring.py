"""Score weights on labelled examples; the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Batch, Bound
from gradfix.votes.engines.passes import Loss


def evaluate(model: nn.Module, task: Bound, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy in percent, mean loss and the number of samples; further measures of the task by their names."""
    with left_as_it_was(model), torch.no_grad():
        marks = task.mark(model, batches)
    if marks.count == 0:
        raise DataError("no examples to score; check the data and its split.")
    further = {name: 100 * value / marks.count for name, value in marks.further.items()}
    return {
        "accuracy": 100 * marks.right / marks.count,
        "loss": marks.loss / marks.count,
        "samples": marks.count,
        **further,
    }


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    with left_as_it_was(model), torch.no_grad():
        losses = torch.cat([loss(model, batch).double().cpu() for batch in batches])
    return float(losses.mean())
