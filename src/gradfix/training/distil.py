"""Distillation: a few steps that make one model answer like another, without forgetting the labels at hand.

The teacher answers every input once, beforehand. The student is trained in place: the caller decides whether
its weights are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Bound

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the student is taught. The defaults are flat: half or twice of any of them costs little.

    `rate` is in units of the task vector's typical size per weight, so it fits models of any width. `betas` forget
    fast: in a few dozen steps the usual ones carry the first, steep gradients to the end.
    `prior` is how many labelled samples the teacher's word is worth; `pool` how many inputs it is asked about."""

    steps: int = 32
    rate: float = 0.2
    betas: tuple[float, float] = (0.5, 0.9)
    labelled: int = 12
    unlabelled: int = 40
    pool: int = 640
    temperature: float = 2.0
    prior: float = 16.0
    probes: int = 48


@dataclass(frozen=True)
class Lesson:
    """Inputs the student is taught on, and the teacher's logits for them."""

    inputs: Batch
    answers: Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def take(self, rows: Tensor) -> Lesson:
        return Lesson(take(self.inputs, rows), self.answers[rows.to(self.answers.device)])


def take(batch: Batch, rows: Tensor) -> dict[str, Tensor]:
    """Some samples of a batch, token sequences cut to the longest of them."""
    picked = {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}
    if "attention_mask" in picked:
        mask = picked["attention_mask"]
        seen = mask.bool().flatten(0, -2).any(0).nonzero()
        width = int(seen.max()) + 1 if len(seen) else mask.shape[-1]
        for name, tensor in picked.items():
            if tensor.shape == mask.shape:
                picked[name] = tensor[..., :width]
    return picked


@torch.no_grad()
def answers(bound: Bound, batch: Batch, size: int = 128) -> Tensor:
    """The model's logits, in pieces of similar length."""
    count = len(next(iter(batch.values())))
    order = torch.arange(count)
    if "attention_mask" in batch:
        order = batch["attention_mask"].flatten(1).sum(1).argsort().cpu()
    with left_as_it_was(bound.model):
        parts = [bound.logits(bound.model, take(batch, rows)).float() for rows in order.split(size)]
    found = torch.cat(parts)
    return found[order.argsort().to(found.device)]


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) per sample at a temperature, in units that do not depend on it."""
    wanted = functional.log_softmax(teacher / temperature, -1)
    found = functional.log_softmax(student / temperature, -1)
    return (wanted.exp() * (wanted - found)).sum(-1) * temperature**2


def unbiased_divergence(student: Tensor, teacher: Tensor) -> float:
    """The divergence after giving every class the constant that makes the mean logits equal.

    A constant per class is the first thing any training repairs; what is left says how much the student knows."""
    return float(divergence(student - (student - teacher).mean(0), teacher).mean())


def distil(bound: Bound, labelled: Batch, lesson: Lesson, rate: float, recipe: Recipe, seed: int) -> int:
    """Train `bound.model` in place; returns how many samples went forward and backward.

    The loss is w * cross-entropy on the labelled samples + the divergence from the teacher on the others, with
    w = N / (N + prior) for N labelled samples. An empty lesson leaves the cross-entropy alone."""
    names = set(bound.trainable())
    weights = [p for name, p in bound.model.named_parameters() if name in names and p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=recipe.betas, weight_decay=0.0)
    count = len(labelled["labels"])
    shares = (min(recipe.labelled, count), min(recipe.unlabelled, len(lesson)))
    draws = [
        _draws(n, size, seed + 1 + i)
        for i, (n, size) in enumerate(zip((count, len(lesson)), shares, strict=True))
    ]
    weight = count / (count + recipe.prior) if len(lesson) else 1.0
    with left_as_it_was(bound.model), torch.enable_grad():
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * _schedule(step, recipe.steps)
            seen = take(labelled, next(draws[0]))
            if len(lesson):
                loss = _both(bound, seen, lesson.take(next(draws[1])), weight, recipe.temperature)
            else:
                loss = bound.loss(bound.model, seen).mean()
            if not torch.isfinite(loss):
                raise DataError(f"the loss is not finite in step {step + 1} of the polish; try a lower rate.")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return recipe.steps * sum(shares)


def _both(bound: Bound, seen: Batch, lesson: Lesson, weight: float, temperature: float) -> Tensor:
    """Labels and teacher in one forward pass."""
    labels = seen["labels"]
    found = bound.logits(bound.model, join(seen, lesson.inputs))
    known, asked = found[: len(labels)], found[len(labels) :]
    told = divergence(asked, lesson.answers.to(asked), temperature).mean()
    return weight * functional.cross_entropy(known, labels) + told


def join(first: Batch, second: Batch) -> dict[str, Tensor]:
    """The samples of both batches; shorter token sequences are padded, and masked, on the right."""
    joined = {}
    for name in first:
        if name not in second:
            continue
        parts = [first[name], second[name].to(first[name])]
        if parts[0].dim() in (2, 3) and "attention_mask" in first:
            width = max(part.shape[-1] for part in parts)
            parts = [functional.pad(part, (0, width - part.shape[-1])) for part in parts]
        joined[name] = torch.cat(parts)
    return joined


def typical_size(vector: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """The median over tensors of the root mean square entry; tensors of zeros do not count."""
    sizes = [float(vector[name].double().square().mean().sqrt()) for name in names if name in vector]
    sizes = sorted(size for size in sizes if size > 0)
    return sizes[len(sizes) // 2] if sizes else 0.0


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over a tenth, then half a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - warm) / (steps - warm + 1)))


def _draws(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Shuffled passes over the rows, cut into batches of one size."""
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.long)
    while True:
        while len(waiting) < size:
            waiting = torch.cat([waiting, torch.randperm(count, generator=generator)])
        yield waiting[:size]
        waiting = waiting[size:]
