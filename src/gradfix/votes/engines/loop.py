"""The loop engine: one sample at a time, any model.

A hook on every parameter folds the sign of its finished gradient into the tally and frees the
gradient, so at most one sample's gradient of a layer is alive at a time. It is the reference every
other engine is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.errors import UnsafeResult
from gradfix.votes.engines.passes import Batch, Loss, batch_size, losses_of, one_sample, samples
from gradfix.votes.tally import Tally

Engine = Callable[..., None]  # of model, loss, batch and tally

SILENT = (
    "every weight abstained: no gradient reached any parameter. Does the loss depend on the model, and "
    "do its parameters require gradients? Under torch.inference_mode none do."
)


class NotFinite(Exception):
    """An engine found a loss that is NaN or infinite; nothing of the batch has been counted."""


@dataclass(frozen=True)
class Batches:
    """Batches that are put together when asked for, so that a process makes only those it needs.

    `where` are the samples' names for messages."""

    collate: Callable[[Sequence[Any]], Batch]
    rows: Sequence[Any]
    size: int
    where: Sequence[str] | None = None

    def __len__(self) -> int:
        return (len(self.rows) + self.size - 1) // self.size

    def __getitem__(self, index: int) -> Batch:
        return self.collate(self.rows[index * self.size : (index + 1) * self.size])

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


@contextmanager
def folding(parameters: Mapping[str, Tensor], fold: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call `fold(name, gradient)` for every finished gradient, then drop the gradient."""
    handles = []
    for name, parameter in parameters.items():

        def hook(parameter: Tensor, name: str = name) -> None:
            if parameter.grad is not None:
                fold(name, parameter.grad)
                parameter.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loop(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """Fold one micro-batch, sample by sample."""
    tally.reserve(batch_size(batch))
    fold_each(model, loss, batch, tally)


def fold_each(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """The same for samples that are already counted."""

    def fold(name: str, gradient: Tensor) -> None:
        buffer = tally[name]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        buffer.sub_(gradient.sign().to(buffer.dtype))

    with folding(tally.parameters, fold):
        for sample in samples(batch):
            backward(loss, model, sample)


def backward(loss: Loss, model: nn.Module, sample: Batch) -> Tensor:
    """One sample's loss, after its gradients went to the hooks of `folding`."""
    with one_sample(model):
        with torch.enable_grad():
            value = losses_of(model, loss, sample).sum()
        refuse_detached(value)
        value.backward()
    return value.detach()


def refuse_detached(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise UnsafeResult(SILENT)
