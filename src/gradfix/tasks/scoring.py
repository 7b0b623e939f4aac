"""Score weights on labelled examples; the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.system.processes import current
from gradfix.votes.engines.passes import Batch, Loss


class Scorer(Protocol):
    """The part of a task that scoring needs."""

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predicted label indices and per-sample losses."""
        ...


def judged(model: nn.Module, task: Scorer, batches: Iterable[Batch]) -> list[tuple[int, float, list[int]]]:
    """Right answers, summed loss and answers of every batch; processes that share the work each take some of them.

    The batches are those of one process, so the figures are the same whoever scored them."""

    def judge(batch: Batch) -> tuple[int, float, list[int]]:
        guesses, losses = task.judge(model, batch)
        return int((guesses == batch["labels"]).sum()), float(losses.double().sum()), guesses.tolist()

    with left_as_it_was(model), torch.no_grad():
        return current().each(judge, batches)


def evaluate(model: nn.Module, task: Scorer, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy in percent, mean loss and the number of samples. A batch holds its answers as "labels"."""
    found = judged(model, task, batches)
    right, loss, count = sum(r for r, _, _ in found), sum(s for _, s, _ in found), sum(len(a) for _, _, a in found)
    if count == 0:
        raise DataError("no examples to score; check the data and its split.")
    return {"accuracy": 100 * right / count, "loss": loss / count, "samples": count}


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    with left_as_it_was(model), torch.no_grad():
        losses = torch.cat([loss(model, batch).double().cpu() for batch in batches])
    return float(losses.mean())
