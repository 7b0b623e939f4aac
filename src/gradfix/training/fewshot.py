"""Few-shot fine-tuning: the baseline a user would try first, under the same label budget.

The model is trained in place and handed out at every checkpoint of its path, so one run serves all step
counts. Dropout stays off: with a few dozen examples it adds more noise than it removes, and a path must
be repeatable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Bound, Example
from gradfix.training.costs import Work


def tune(
    bound: Bound,
    examples: Sequence[Example],
    *,
    rate: float,
    stops: Sequence[int],
    batch: int,
    seed: int,
    weight_decay: float = 0.0,
) -> Iterator[tuple[int, Work]]:
    """AdamW at a constant rate; yields (steps done, work so far) at each stop, the model as it is then."""
    names = set(bound.trainable())
    weights = [p for name, p in bound.model.named_parameters() if name in names and p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=weight_decay)
    order = _draws(len(examples), min(batch, len(examples)), seed)
    work = Work()
    for step in range(1, max(stops) + 1):
        rows = next(order)
        with left_as_it_was(bound.model), torch.enable_grad():
            loss = bound.loss(bound.model, bound.collate([examples[i] for i in rows])).mean()
            if not torch.isfinite(loss):
                raise DataError(f"few-shot fine-tuning at rate {rate:g} diverged in step {step}.")
            loss.backward()
            optimizer.step()
        work += Work(forward=len(rows), backward=len(rows), steps=1)
        if step in stops:
            yield step, work


def _draws(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Shuffled passes over the examples, cut into batches of one size."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]
