"""The embedded demo: small real vision transformers and real images, shipped inside the package.

Base A is fine-tuned on a task and has two possible successors: `related` was continued from A's own
ancestor, `unrelated` shares nothing with A but the architecture. The models and the scores in
data/figures.json come from `python -m scripts.pocket.train`; nothing is downloaded.

`TASKS` names the shipped tasks, `PRIMARY` the one the demo uses, `CLASSES` the ten labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfix.errors import UsageError
from gradfix.pocket import shipped
from gradfix.pocket.corruptions import CORRUPTIONS
from gradfix.pocket.shipped import CLASSES, PAIRS
from gradfix.registry import unknown

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import ViTForImageClassification

    TASKS: tuple[str, ...]
    PRIMARY: str

__all__ = [
    "CLASSES", "PAIRS", "PRIMARY", "TASKS", "PocketPair", "Source", "figures", "images", "loss",
    "materialise", "model", "pair", "pair_tasks", "raw_images", "sources",
]  # fmt: skip

Weights = dict[str, "Tensor"]


@dataclass(frozen=True)
class PocketPair:
    """Four float32 state dicts under module names: `tuned - base` is to be moved to `target`."""

    name: str
    task: str
    base: Weights
    tuned: Weights
    target: Weights
    target_tuned: Weights


@dataclass(frozen=True)
class Source:
    """One base and its fine-tune, for experiments with several sources."""

    name: str
    base: Weights
    tuned: Weights


def pair(name: str, task: str | None = None) -> PocketPair:
    """The "unrelated" or the "related" pair, tuned on `task` (the primary one unless given)."""
    if name not in PAIRS:
        raise UsageError(unknown("pair", name, list(PAIRS)))
    task = _known(task, PAIRS[name])
    source, target = PAIRS[name]
    states = (
        shipped.read_base(source),
        shipped.read_tuned(source, task),
        shipped.read_base(target),
        shipped.read_tuned(target, task),
    )
    return PocketPair(name, task, *map(_to_module, states))


def sources(task: str | None = None) -> tuple[list[Source], PocketPair]:
    """Two sources of one task, A and B_related, and the unrelated pair whose target takes both."""
    names = ("A", "B_related")
    task = _known(task, names)
    found = [
        Source(name, _to_module(shipped.read_base(name)), _to_module(shipped.read_tuned(name, task))) for name in names
    ]
    return found, pair("unrelated", task)


def model(state: Mapping[str, Tensor]) -> ViTForImageClassification:
    """A model of its own with these weights, in eval mode."""
    built = shipped.network()
    built.load_state_dict(state)
    return built


def images(split: str, task: str | None = None) -> tuple[Tensor, Tensor]:
    """Model-ready pixels (n, 3, 28, 28) and class numbers of a split: "train", "validation" or "test".

    "train" is the pool from which few-shot examples are picked; none of these images were trained on.
    The classes take turns, so the first 10 * k rows hold k of each."""
    import torch

    pixels, labels = raw_images(split, task)
    return shipped.normalise(torch.from_numpy(pixels)).contiguous(), torch.from_numpy(labels)


def raw_images(split: str, task: str | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same images as uint8 (n, 28, 28), as a person would look at them; task "clean" is the original."""
    pixels, labels = shipped.read_images(split)
    return CORRUPTIONS[task if task == "clean" else _known(task)](pixels), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy per sample of a batch (pixels, class numbers)."""
    from torch.nn.functional import cross_entropy

    pixels, labels = batch
    return cross_entropy(model(pixel_values=pixels).logits, labels, reduction="none")


def figures() -> dict[str, Any]:
    """What was measured when the models were made; accuracies in percent. Do not modify."""
    return shipped.read_figures()


def materialise(folder: str | Path, task: str | None = None) -> dict[str, Any]:
    """Write the pairs tuned on `task` as Hugging Face folders and every task's images as parquet files.

    Returns {"unrelated": {"base": path, "tuned": ..., "target": ..., "target_tuned": ...},
    "related": {...}, "tasks": {task: path}}; the related pair is there for the primary task only, see
    `pair_tasks`. Needs neither torch nor transformers."""
    return shipped.materialise(Path(folder), _known(task), shipped.read_figures()["tasks"])


def pair_tasks(name: str) -> tuple[str, ...]:
    """The tasks for which a pair is shipped: all for "unrelated", the primary one for "related"."""
    if name not in PAIRS:
        raise UsageError(unknown("pair", name, list(PAIRS)))
    return shipped.common_tasks(PAIRS[name])


def _known(task: str | None, models: tuple[str, ...] = ()) -> str:
    names = list(shipped.common_tasks(models))
    if task is None:
        return names[0]
    if task not in names:
        among = f" for {' and '.join(models)}" if models else ""
        raise UsageError(unknown(f"pocket task{among}", task, names))
    return task


def _to_module(state: shipped.State) -> Weights:
    import torch

    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    names = shipped.module_names()
    return {names[name]: value for name, value in tensors.items()}


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return tuple(shipped.read_figures()["tasks"])
    if name == "PRIMARY":
        return shipped.read_figures()["primary"]
    raise AttributeError(f"module 'gradfix.pocket' has no attribute {name!r}")
