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
from torch.utils._pytree import tree_flatten, tree_map_only

from gradfix.errors import DataError, UnsafeResult
from gradfix.votes.tally import Tally

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Engine = Callable[[nn.Module, Loss, Batch, Tally], None]

SILENT = (
    "every weight abstained: no gradient reached any parameter. Does the loss depend on the model, and "
    "do its parameters require gradients?"
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


def batch_size(batch: Batch) -> int:
    sizes = {leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise DataError(
            f"a batch must hold tensors with one common first dimension, got sizes {sorted(sizes)}."
        )
    return int(sizes.pop())


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """The same pytree with only some samples."""
    return tree_map_only(Tensor, lambda leaf: leaf[rows] if leaf.ndim else leaf, batch)


def samples(batch: Batch) -> Iterator[Batch]:
    for row in range(batch_size(batch)):
        yield take(batch, slice(row, row + 1))


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
    with torch.enable_grad():
        value = loss(model, sample).sum()
    refuse_detached(value)
    value.backward()
    return value.detach()


def refuse_detached(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise UnsafeResult(SILENT)
