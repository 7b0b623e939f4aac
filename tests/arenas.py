"""A small in-memory setting for comparisons: an MLP over number strings, seconds to train, the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.data import Dataset, load_data
from gradfix.tasks.base import Batch, Bound, Example

LABELS = ["<script>alert(1)</script>", "left", "right"]
WIDTH = 6


class NumbersBound(Bound):
    """Classify texts that hold six numbers."""

    def __init__(self, model: nn.Module, labels: Sequence[str] = LABELS) -> None:
        self.model, self.labels = model, list(labels)

    def collate(self, examples: Sequence[Example]) -> Batch:
        numbers = torch.tensor([[float(word) for word in example["text"].split()] for example in examples])
        answers = torch.tensor([self.labels.index(example["label"]) for example in examples])
        return {"numbers": numbers, "labels": answers}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["numbers"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.logits(model, batch), batch["labels"], reduction="none")

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.logits(model, batch).argmax(-1)

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        return batch["numbers"]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, len(LABELS)))


def rows(count: int, seed: int, shift: float) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(LABELS), WIDTH, generator=torch.Generator().manual_seed(7)) * 1.2
    found = []
    for index in range(count):
        label = index % len(LABELS)
        point = centres[(label + (1 if shift and index % 5 == 0 else 0)) % len(LABELS)] * (1 - shift)
        point = point + centres.roll(1, 0)[label] * shift + torch.randn(WIDTH, generator=generator)
        found.append({"text": " ".join(f"{value:.5f}" for value in point.tolist()), "label": LABELS[label]})
    return found


def trained(start: nn.Module, examples: Sequence[Example], steps: int, rate: float) -> nn.Module:
    model = network(0)
    model.load_state_dict(start.state_dict())
    batch = NumbersBound(model).collate(examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        NumbersBound(model).loss(model, batch).mean().backward()
        optimizer.step()
    return model


def setting() -> dict[str, Any]:
    """Arguments of `compare`: a related pair, and a task on which the target starts badly."""
    ancestor = trained(network(1), rows(120, 1, 0.0), 30, 0.01)
    base = trained(ancestor, rows(120, 2, 0.0), 10, 0.01)
    target = trained(ancestor, rows(120, 3, 0.1), 10, 0.01)
    train = rows(180, 4, 0.7)
    tuned = trained(base, train, 40, 0.01)
    return {
        "base": base,
        "tuned": tuned,
        "target": NumbersBound(target),
        "target_tuned": trained(target, train, 40, 0.01),
        "data": dataset(train),
    }


def dataset(train: Sequence[Example] | None = None, validation: bool = True) -> Dataset:
    splits = {"train": train or rows(180, 4, 0.7), "test": rows(90, 6, 0.7)}
    if validation:
        splits["validation"] = rows(60, 5, 0.7)
    return load_data(splits, labels={label: label for label in LABELS})
