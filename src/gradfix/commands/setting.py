"""The common start of every workflow: data, task, few-shot set, and who may look at what."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.write import torch_dtype
from gradfix.commands.configs import DataOptions, ShotOptions
from gradfix.data import Dataset, Row, check_disjoint, few_shot, load_data, load_unlabelled
from gradfix.errors import DataError, UsageError
from gradfix.tasks.base import TASKS, Bound, Task

NO_VALIDATION = "none"


@dataclass(frozen=True)
class Prepared:
    """Checked data and the task over it; no model is loaded yet."""

    options: DataOptions
    dataset: Dataset
    task: Task
    notes: tuple[str, ...] = ()

    def open(self, source: str, *, head_from: str | None = None, base: str | None = None) -> Bound:
        return self.task.open(
            source,
            dtype=torch_dtype(self.options.dtype),
            device=device_of(self.options.device),
            head_from=head_from,
            base=base,
        )


@dataclass(frozen=True)
class Shots:
    """The labelled examples a method may see, and the splits it may not vote on."""

    fewshot: list[Row]
    indices: list[int]
    validation: list[Row] | None
    test: list[Row] | None
    notes: tuple[str, ...]


def device_of(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()  # not on "meta", which holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"device {name!r} is not available on this machine.") from None
    return name


def read_data(source: str, options: DataOptions, **more: Any) -> Dataset:
    columns = list(options.text_column)
    return load_data(
        source,
        label_column=options.label_column,
        text_column=columns[0] if len(columns) == 1 else columns or None,
        image_column=options.image_column,
        text_template=options.text_template,
        drop_unlabelled=options.drop_unlabelled,
        **more,
    )


def read_unlabelled(source: str, options: DataOptions) -> list[Row]:
    columns = list(options.text_column)
    return load_unlabelled(
        source,
        text_column=columns[0] if len(columns) == 1 else columns or None,
        image_column=options.image_column,
        text_template=options.text_template,
    )


def setting(options: DataOptions) -> Prepared:
    """Read and check the data, then make the task; no model is touched before the data is known to be good."""
    dataset = read_data(options.data, options)
    heal_torchvision()
    return Prepared(options, dataset, make_task(options, dataset), dataset.notes)


def make_task(options: DataOptions, dataset: Dataset) -> Task:
    """The task by name, with those of the options it takes; one it does not take is an error, not ignored."""
    import gradfix.tasks  # noqa: F401  fills the registry

    kind = TASKS[options.task]
    takes = inspect.signature(kind).parameters
    given = {
        "pooling": options.pooling,
        "max_length": options.max_length,
        "templates": options.templates or None,
        "architecture": options.architecture,
        "scoring": options.scoring,
        "freeze_head": options.freeze_head or None,
        "new_head": getattr(options, "seed", 0) if getattr(options, "new_head", False) else None,
        "trust_remote_code": options.trust_remote_code or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in takes:
            raise UsageError(f"--{name.replace('_', '-')} means nothing to the task {options.task!r}.")
    return kind(dataset.labels, **given)  # type: ignore[call-arg]


def draw(start: Prepared, options: ShotOptions, validation: str | None = None, base: str | None = None) -> Shots:
    """The few-shot set of a seed, with validation and test kept apart by content."""
    pool = start.dataset.pick("train")
    if pool is start.dataset.splits.get("test"):
        raise DataError(
            f"{start.dataset.source} has only a test split; examples are drawn from train. Add a train file."
        )
    teacher_alone = options.shots == 0 and getattr(options, "unlabelled", None) is not None
    indices = [] if teacher_alone else _pick(start, options, pool, base)
    fewshot = [pool[index] for index in indices]
    held = validation_rows(start, validation)
    test = start.dataset.splits.get("test")
    parts: dict[str, Sequence[Row]] = {"the few-shot set": fewshot}
    if held is not None:
        parts["validation"] = held
    if test is not None:
        parts["test"] = test
    return Shots(fewshot, indices, held, test, (*start.notes, *check_disjoint(parts)))


def validation_rows(start: Prepared, validation: str | None) -> list[Row] | None:
    """Validation data by the user's word: a source, 'none', or the data's own split."""
    if validation == NO_VALIDATION:
        return None
    if validation is None:
        return start.dataset.splits.get("validation") if len(start.dataset.splits) > 1 else None
    dataset = read_data(validation, start.options, labels=start.dataset.labels)
    rows = dataset.pick("validation", "train")
    if not rows:
        raise DataError(f"{validation} holds no examples.")
    return rows


def _pick(start: Prepared, options: ShotOptions, pool: list[Row], base: str | None) -> list[int]:
    if options.select == "random":
        return few_shot(pool, options.shots, options.seed, options.allow_fewer, labels=list(start.dataset.labels))
    if base is None:
        raise UsageError(f"--select {options.select} needs --base: the features come from the old base's encoder.")
    from gradfix.vectors.selection import select

    bound = start.open(base)
    with torch.no_grad():
        features = torch.cat(
            [bound.features(bound.model, b).float().cpu() for b in bound.batches(pool, options.batch_size)]
        )
    # Rows without labels are one class, as few_shot has it.
    labels = [str(row.get("label") or "") for row in pool]
    chosen = select(
        features, labels, per_class=options.shots, method=options.select, seed=options.seed,
        allow_fewer=options.allow_fewer,
    )  # fmt: skip
    return [int(index) for index in chosen]
