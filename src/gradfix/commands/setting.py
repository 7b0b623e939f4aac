"""The common start of every workflow: data, task, few-shot set, and who may look at what."""

from __future__ import annotations

import hashlib
import inspect
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import locked, make_parent, torch_dtype
from gradfix.commands.configs import MOST_SHOTS, CompareConfig, DataOptions, ShotOptions, TransportConfig, given
from gradfix.commands.guard import release
from gradfix.data import (
    Dataset,
    Row,
    check_disjoint,
    few_shot,
    load_data,
    load_unlabelled,
    without_duplicates,
    without_overlap,
)
from gradfix.data.files import Spelling
from gradfix.errors import DataError, IncompatibleCheckpoints, OutputError, UsageError
from gradfix.methods.opening import open_tuned
from gradfix.tasks.base import TASKS, Bound, Task
from gradfix.tasks.scoring import mean_loss
from gradfix.training.free_text import LORA

NO_VALIDATION = "none"
Counted = TypeVar("Counted", bound=ShotOptions | CompareConfig)


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
    pool: list[Row]  # what the few-shot set was drawn from
    per_class: int
    allow_fewer: bool


def device_of(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()  # not on "meta", which holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"device {name!r} is not available on this machine.") from None
    return name


def room_for_weights(options: Any) -> dict[int | str, int] | None:
    """What --max-memory gives to weights, by the name of the device; None where nobody said."""
    from accelerate.utils.modeling import convert_file_size_to_int

    if options.max_memory is None:
        return None
    try:
        size = convert_file_size_to_int(options.max_memory)
    except ValueError:
        size = 0
    if size < 1:
        raise UsageError(f"--max-memory must be a size such as 20GiB or 500MB, got {options.max_memory!r}.")
    return {_place(options): size}


def _place(options: Any) -> int | str:
    device = torch.device(device_of(options.device))
    return device.index or 0 if device.type == "cuda" else device.type


@contextmanager
def offload_folder(options: Any) -> Iterator[Path]:
    """The folder of --offload, held: another run would overwrite the weights that this one reads."""
    folder = Path(options.offload)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; give a folder for the weights that do not fit as --offload.")
    make_parent(folder)
    with locked(folder):
        yield folder


@contextmanager
def weights_on_disk(options: Any) -> Iterator[None]:
    """With --offload every model that is opened inside stays on disk. Two are open at a time, and share what there is."""
    if options.offload is None:
        if options.max_memory is not None:
            raise UsageError(
                "--max-memory says how much of the weights --offload keeps in memory: give --offload FOLDER."
            )
        yield
        return
    from accelerate.utils import get_max_memory

    place = _place(options)
    room = room_for_weights(options) or {place: get_max_memory()[place] // 2}  # the other half is for passes
    with offload_folder(options) as folder, _left_on_disk(folder, {place: room[place] // 2}):
        yield


@contextmanager
def _left_on_disk(folder: Path, room: Mapping[int | str, int]) -> Iterator[None]:
    """Every model that is opened inside stays on disk, but for what there is room for.

    Each has its part of the folder, for weights that are not in its files as it wants them; afterwards they are gone."""
    from gradfix.tasks.loading import Builder, building
    from gradfix.votes.distributed.offload import load_offloaded

    parts: set[Path] = set()

    def build(make: Callable[[], nn.Module], source: Checkpoint) -> nn.Module:
        own = folder / hashlib.sha256(str(source.path).encode()).hexdigest()[:16]
        parts.add(own)
        return load_offloaded(make, source, own, room).model

    try:
        with building(Builder(build, wears=True)):
            yield
    finally:
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)


def read_data(source: str, options: DataOptions, **more: Any) -> Dataset:
    import gradfix.tasks  # noqa: F401  fills the registry

    columns = list(options.text_column)
    return load_data(
        source,
        bare=TASKS[options.task].takes_bare,
        label_column=options.label_column,
        text_column=columns[0] if len(columns) == 1 else columns or None,
        image_column=options.image_column,
        text_template=options.text_template,
        drop_unlabelled=options.drop_unlabelled,
        label_names=options.label_names or None,
        spelling=Spelling(options.encoding, options.separator),
        **more,
    )


def read_unlabelled(source: str, options: DataOptions) -> list[Row]:
    columns = list(options.text_column)
    return load_unlabelled(
        source,
        text_column=columns[0] if len(columns) == 1 else columns or None,
        image_column=options.image_column,
        text_template=options.text_template,
        spelling=Spelling(options.encoding, options.separator),
    )


def unseen_unlabelled(options: Any, test: Sequence[Row] | None) -> list[Row]:
    """The inputs of --unlabelled, none of which the test split knows."""
    rows = read_unlabelled(options.unlabelled, options)
    if options.drop_duplicates is not None and test:
        rows = [rows[index] for index in without_overlap(rows, test)]
    check_disjoint({"unlabelled": rows, "test": test or ()})
    return rows


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


def apart(start: Prepared, lose: str | None) -> Prepared:
    """The same data, but what train and test share is left to one of them."""
    dataset = start.dataset
    kept, notes = without_duplicates({name: dataset.splits.get(name) for name in ("train", "test")}, lose)
    splits = {**dataset.splits, **{name: rows for name, rows in kept.items() if rows is not None}}
    return replace(start, dataset=replace(dataset, splits=splits), notes=(*start.notes, *notes))


def with_shots(options: Counted, pool: Sequence[Row]) -> Counted:
    """The options with a number of examples per class: all there are, up to a limit, where nobody said one."""
    if options.shots not in (None, ()):
        return options
    counts = Counter(str(row.get("label") or "") for row in pool)
    most = min(MOST_SHOTS, max(counts.values(), default=0))
    shots: Any = (most,) if isinstance(options, CompareConfig) else most
    return replace(options, shots=shots, allow_fewer=options.allow_fewer or min(counts.values(), default=0) < most)


def draw(start: Prepared, options: ShotOptions, validation: str | None = None, base: str | None = None) -> Shots:
    """The few-shot set of a seed, with validation and test kept apart by content."""
    whole = start.dataset.pick("train")
    if whole is start.dataset.splits.get("test"):
        raise DataError(
            f"{start.dataset.source} has only a test split; examples are drawn from train. Add a train file."
        )
    sides: dict[str, list[Row] | None] = {
        "train": whole, "validation": validation_rows(start, validation), "test": start.dataset.splits.get("test")
    }  # fmt: skip
    kept, dropped = without_duplicates(sides, options.drop_duplicates)
    pool, held, test = kept["train"] or [], kept["validation"], kept["test"]
    options = with_shots(options, pool)
    teacher_alone = options.shots == 0 and getattr(options, "unlabelled", None) is not None
    indices = [] if teacher_alone else _pick(start, options, pool, base)
    fewshot = [pool[index] for index in indices]
    parts: dict[str, Sequence[Row]] = {"the few-shot set": fewshot}
    if held is not None:
        parts["validation"] = held
    if test is not None:
        parts["test"] = test
    used = used_note(len(fewshot), pool, bool(start.dataset.labels))
    notes = (*start.notes, *dropped, *check_disjoint(parts), *used)
    places = {id(row): number for number, row in enumerate(whole)}
    return Shots(
        fewshot, [places[id(row)] for row in fewshot], held, test, notes, pool, options.shots or 0, options.allow_fewer
    )


def used_note(count: int, pool: Sequence[Row], classes: bool) -> list[str]:
    """How many of the labelled examples are used; of texts alone there is nothing to say. Pairs and answers have no classes."""
    told = [row for row in pool if row.get("label") is not None or row.get("text_pair") is not None]
    classes = classes and any(row.get("label") is not None for row in told)
    more = "" if count == len(told) else f"; --shots K takes K {'per class' if classes else 'of them'}"
    return [f"using {count} of {len(told)} labelled examples{more}"] if told else []


def dtype_of(config: TransportConfig) -> str:
    """A LoRA is trained beside weights in bfloat16 where there is a device for it, unless a dtype was asked for."""
    half = config.train == LORA and "dtype" not in given(config) and device_of(config.device) != "cpu"
    return "bf16" if half else config.dtype


def refuse_swapped(config: TransportConfig, start: Prepared, shots: Shots, trio: Trio) -> None:
    """A fine-tune that is worse than its base on its own task was probably given the wrong way round."""
    if config.head != "error":
        return  # the base has no head of its own to be scored with
    losses = {}
    settings = torch_dtype(dtype_of(config)), device_of(config.device)
    for role in ("base", "tuned"):  # one after the other: two models may not fit
        if role == "tuned":
            bound = open_tuned(trio, start.task, *settings)
        else:
            bound = start.task.open(config.base, dtype=settings[0], device=settings[1])
        losses[role] = mean_loss(bound.model, bound.loss, bound.batches(shots.fewshot, config.batch_size))
        del bound
        release()
    if losses["tuned"] > losses["base"]:
        raise IncompatibleCheckpoints(
            f"on these examples {config.tuned} (loss {losses['tuned']:.3f}) is worse than its base {config.base} "
            f"(loss {losses['base']:.3f}). Were --base and --tuned swapped, or is this another task? "
            "--force (or --no-check) goes on all the same."
        )


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
        return few_shot(pool, options.shots or 0, options.seed, options.allow_fewer, labels=list(start.dataset.labels))
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
        features, labels, per_class=options.shots or 0, method=options.select, seed=options.seed,
        allow_fewer=options.allow_fewer,
    )  # fmt: skip
    return [int(index) for index in chosen]
