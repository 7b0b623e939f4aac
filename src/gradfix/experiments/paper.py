"""What the paper used and what it found: its datasets (`datasets.toml`) and its figures (`paper.toml`).

Every experiment prints the figures beside its own. Methods carry the names of `gradfix.methods.methods.METHODS`, so
that a lookup needs no translation. In a dataset `classes` is in the order of the hub's class numbers; one whose
labels are strings maps each of them. Sizes serve the cost estimate only, tables count what was loaded."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradfix.data import Dataset, load_data
from gradfix.data.load import load_hub
from gradfix.data.splits import without_overlap
from gradfix.errors import DataError

VALIDATION_SHARE, VALIDATION_MOST = 0.1, 5000
_FIGURES: dict[str, Any]
_DATASETS: dict[str, Any]
_FIGURES, _DATASETS = (
    tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("paper", "datasets")
)

ONE_MODEL = "ViT-B/16"  # all that Tab. 3 and 4 show
LABELS: Mapping[str, str] = _FIGURES["labels"]
GENERALISATION: Mapping[str, Sequence[Sequence[float]]] = _FIGURES["generalisation"]
ALPHAS: Mapping[str, Mapping[str, float]] = _FIGURES["alphas"]
FLOPS: Mapping[str, float] = _FIGURES["flops"]
SUPERVISION: Mapping[str, tuple[int, int, Mapping[int, float]]] = {
    task: (about["samples"], about["classes"], {int(k): share for k, share in about["percent"].items()})
    for task, about in _FIGURES["supervision"].items()
}


def accuracies(model: str, method: str, shots: int | None = None) -> dict[str, float]:
    """Per task what the paper reports for a method (and budget) on a model; empty where it reports nothing."""
    row = method if shots is None else f"{shots} {method}"
    return _by_task(_FIGURES["accuracy"].get(model, {}).get(row), "text" if model == "T5" else "vision")


def masks(strategy: str) -> dict[str, float]:
    """Tab. 4: ViT-B/16, one example per class."""
    return _by_task(_FIGURES["masks"].get(strategy))


def merged(setting: str, combiner: str, pipeline: str) -> dict[str, float]:
    return _by_task(_FIGURES["merging"][setting].get(combiner, {}).get(pipeline))


def deviation(model: str, method: str, shots: int) -> float | None:
    """The deviation over seeds, averaged over the tasks."""
    found = _FIGURES["deviation"].get(model, {}).get(f"{shots} {method}")
    return fmean(found) if found else None


def average(values: Mapping[str, float]) -> float | None:
    return fmean(values.values()) if values else None


def _by_task(values: Sequence[float] | None, domain: str = "vision") -> dict[str, float]:
    return dict(zip(_FIGURES["tasks"][domain], values, strict=True)) if values else {}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One dataset. Without `train` it is only ever tested on; without `validation` a tenth of train is cut off."""

    hub: str
    config: str | None = None
    train: str = "train"
    validation: str | None = None
    test: str = "test"
    label: str = "label"
    image: str | None = "image"
    text: str | None = None  # a template over the columns
    classes: Sequence[str] | Mapping[str, str] | None = None
    templates: Sequence[str] = ("{}",)
    size: tuple[int, int] = (0, 0)  # train and test examples, for the estimate

    @property
    def class_count(self) -> int:
        return len(self.classes) if self.classes is not None else 200


def _declared(group: str) -> dict[str, Declared]:
    found = {}
    for name, given in _DATASETS[group].items():
        lists = {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
        found[name] = Declared(**{"image": None if group == "text" else "image", **given, **lists})
    return found


VISION, TEXT = _declared("vision"), _declared("text")
IMAGENET_R = _declared("support")["imagenet_r"]


def load(declared: Declared, local: Mapping[str, str]) -> Dataset:
    """Train, validation and test with our class names; a local folder may stand in for the hub.

    Training examples whose content is also in validation or test are dropped."""
    folder = local.get(_key(declared), local.get(declared.hub))
    raw = load_hub(folder) if folder is not None else load_hub(declared.hub, declared.config)
    splits = {"train": declared.train, "validation": declared.validation, "test": declared.test}
    wanted = {ours: _split(raw, theirs, declared) for ours, theirs in splits.items() if theirs}
    data = load_data(
        wanted,
        label_column=declared.label,
        image_column=declared.image,
        text_template=declared.text,
        labels=_labels(declared, next(iter(wanted.values()))),
        drop_unlabelled=True,
        check_images=False,
    )
    if not declared.train:
        return data
    parts = dict(data.splits)
    if "validation" not in parts:
        parts["train"], parts["validation"] = _cut(parts["train"])
    kept = without_overlap(parts["train"], parts["validation"], parts["test"])
    notes = [*data.notes]
    if len(kept) < len(parts["train"]):
        notes.append(f"{len(parts['train']) - len(kept)} training examples are also in validation or test; dropped.")
    parts["train"] = [parts["train"][index] for index in kept]
    return Dataset(parts, data.labels, declared.hub, tuple(notes))


def _key(declared: Declared) -> str:
    return f"{declared.hub}:{declared.config}" if declared.config else declared.hub


def _split(raw: Mapping[str, Any], name: str, declared: Declared) -> Any:
    if name not in raw:
        raise DataError(f"{declared.hub} has no split {name!r}; there are: {', '.join(raw)}.")
    return raw[name]


def _labels(declared: Declared, rows: Any) -> dict[str, list[str] | str]:
    """The label set by the hub's own names, with our prompts; a text task's label is its answer."""
    feature = (getattr(rows, "features", None) or {}).get(declared.label)
    if isinstance(declared.classes, Mapping):
        words = dict(declared.classes)
    elif declared.classes is None:
        words = {str(name): str(name).replace("_", " ") for name in sorted(set(rows[declared.label]))}
    else:
        names = list(getattr(feature, "names", None) or map(str, range(len(declared.classes))))
        if len(names) != len(declared.classes):
            raise DataError(
                f"{declared.hub} has {len(names)} classes, {len(declared.classes)} were declared. "
                "Is it another version of the dataset?"
            )
        words = dict(zip(names, declared.classes, strict=True))
    if declared.image is None:
        return dict(words.items())
    return {name: [t.replace("{}", word) for t in declared.templates] for name, word in words.items()}


def _cut(train: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """A tenth of the training split for choosing, at most 5000 examples, the same ones every time."""
    count = min(VALIDATION_MOST, max(1, round(VALIDATION_SHARE * len(train))))
    held = set(random.Random(0).sample(range(len(train)), count))
    return [row for index, row in enumerate(train) if index not in held], [train[index] for index in sorted(held)]
