"""Kinds of checkpoints: tiny ones, made with the tools people use, each a complete trio with data and a scorer.

`KINDS[name].make(folder)` writes `base`, `tuned` (a folder, an adapter or a file), `target` and `data`.
The target is the base after a little more training by its vendor, so a good transport scores well on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradfix._compat import heal_torchvision
from tests.journeys.scorers import Scorer
from tests.journeys.toys import next_release

heal_torchvision()
Maker = Callable[[Path], None]


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint.

    `head` says that only the fine-tune has a head, so the user adds `--head copy`; `adapter` that the fine-tune
    is a peft folder, `lost_base` one whose named base is gone; `side` that a scorer needs the untuned encoder."""

    name: str
    says: str  # for the table in the docs
    task: str
    make: Maker
    score: Scorer
    head: bool = False
    adapter: bool = False
    lost_base: bool = False
    side: bool = False
    tuned: str = "tuned"
    options: tuple[str, ...] = ()  # on every command that reads data

    @property
    def shaping(self) -> tuple[str, ...]:
        """The flags that shape the checkpoints, the same in transport and compare."""
        return ("--head", "copy") if self.head else ()


KINDS: dict[str, Kind] = {}


def add(kind: Kind) -> None:
    assert kind.name not in KINDS, kind.name
    KINDS[kind.name] = kind


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)


def save_pair(folder: Path, model: Any, extras: Callable[[Path], None], **options: Any) -> None:
    """Write base and target: the same model before and after the vendor's next release."""
    model.save_pretrained(folder / "base", **options)
    next_release(model)
    model.save_pretrained(folder / "target", **options)
    for role in ("base", "target"):
        extras(folder / role)


def class_names(labels: tuple[str, ...]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def copy_files(source: Path, goal: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copy(file, goal / file.name)


def tower(layers: str = "num_hidden_layers", **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        layers: 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "initializer_range": 0.1,
        **more,
    }


def freeze(model: nn.Module, *prefixes: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))


def load_all() -> dict[str, Kind]:
    """Every kind; the modules below register theirs on import."""
    from tests.journeys import adapters, encoders, forms, pictures, speakers  # noqa: F401

    return KINDS
