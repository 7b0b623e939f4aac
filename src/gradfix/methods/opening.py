"""From checkpoints and data to a trial: what `transport` and `compare` do before their first method runs.

Work that can be kept is filed under the hash of everything it depends on: weights, examples, settings and
the version of the package. Nothing made from other inputs or settings is ever read back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradfix._version import __version__
from gradfix.align import align
from gradfix.align.correspondence import correspond, token_rows
from gradfix.checkpoints.folder import is_side_file
from gradfix.checkpoints.hashes import file_hashes
from gradfix.checkpoints.kinds import same_weights
from gradfix.checkpoints.matched import read_vocabulary
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import torch_dtype
from gradfix.data import Dataset, check_disjoint, load_data, load_unlabelled
from gradfix.errors import DataError, IncompatibleCheckpoints, UsageError
from gradfix.methods.headed import open_target
from gradfix.methods.search import Search
from gradfix.methods.speaking import heavy, is_adapter
from gradfix.methods.trained import in_full
from gradfix.methods.trial import Lenders, Passes, Splits, Trial
from gradfix.methods.workfolder import Folder, digest
from gradfix.methods.yardsticks import tokens_seen, trained_weights
from gradfix.tasks.base import TASKS, Bound, Example, Task
from gradfix.tasks.classification import Classification
from gradfix.tasks.reading import speaks
from gradfix.training.distil import can_teach, teacher_of
from gradfix.training.free_text import LORA, Speech
from gradfix.training.starts import Old
from gradfix.vectors.taskvector import TaskVector


def rounds(target: Checkpoint, asked: str | None, own: torch.dtype) -> bool:
    """Whether a file is coarser than the model that was measured: by the dtype asked for, or by the target's."""
    written = {torch_dtype(asked)} if asked else {target.info(name).dtype for name in target.names()}
    return any(dtype.is_floating_point and dtype != own and dtype.itemsize <= own.itemsize for dtype in written)


def refuse_itself(trio: Trio, force: bool = False) -> list[str]:
    """A target that is the fine-tune would get its update twice; a note where that is forced."""
    if not same_weights(trio.tuned, trio.target, trio.moved):
        return []
    text = f"the target {trio.target} is the fine-tune itself: its weights equal those of {trio.tuned}"
    if not force:
        raise IncompatibleCheckpoints(
            f"{text}, and its update would be added twice. Give the new base as --target; to score the fine-tune, use "
            "`gradfix evaluate`. --force goes on all the same."
        )
    return [f"{text}, and its update is added a second time"]


def unmoved_on_disk(bound: Bound, target: Checkpoint) -> frozenset[str]:
    """The tensors of the target's files that are no part of the task."""
    still = bound.unmoved()
    if not still:
        return frozenset()
    names = name_map(bound.model, target.names())
    found = {disk for name, disk in names.renamed.items() if name in still}
    found |= {disk for disk, name in names.aliases.items() if name in still}
    return frozenset(found | {disk for disk, place in names.fused.items() if set(place.sources) <= still})


def vector_of(trio: Trio, how: str = "none") -> TaskVector:
    """The task vector under the target's names on disk, permuted to the target where that is asked for."""
    tau = TaskVector.of(trio)
    return tau if how == "none" else TaskVector(align(trio.base, trio.target, method=how).apply(tau))


def lenders_of(trio: Trio, bound: Bound, task: Task | None, speech: Speech | None = None) -> Lenders:
    """What the three checkpoints can lend to a trial; across shapes nothing can be permuted."""
    apart = speech is not None and speaks(bound) and speech.trains(bound) == LORA
    return Lenders(
        aligned=None if trio.apart is not None else lambda how: vector_of(trio, how),
        teacher=lambda: open_teacher(trio, bound, task, beside=not (apart and heavy(bound))),
        old=lambda teacher: None if apart and heavy(bound) else old_side(trio, bound, teacher),
        adapter=is_adapter(trio.given["tuned"]),
    )


def old_side(trio: Trio, bound: Bound, teacher: Bound) -> Old:
    """What answers to what between the old base and the target, by the names of the opened modules.

    Maps whose weight the fine-tune left alone have nothing to carry, and are not compared."""
    tau = TaskVector.own(trio)
    names = dict(teacher.model.named_parameters())
    mapped = tau if set(tau) <= set(names) else name_map(teacher.model, list(tau)).to_module(tau)
    weight = next(iter(names.values()))
    still = set(teacher.unmoved())
    mapped = {n: delta.to(weight.device) for n, delta in mapped.items() if n in names and n not in still}
    tokens = [read_vocabulary(trio.sources[role].path) for role in ("base", "target")]
    found = correspond(
        _shapes(teacher), _shapes(bound), base_config=_config(teacher), target_config=_config(bound),
        base_tokens=tokens[0], target_tokens=tokens[1],
    )  # fmt: skip
    found = found.of_changed(mapped)
    return Old(TaskVector(mapped), found, token_rows(found, _shapes(bound), *tokens))


def _shapes(bound: Bound) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in bound.model.named_parameters()}


def _config(bound: Bound) -> dict[str, Any]:
    config = getattr(bound.model, "config", None)
    return dict(config.to_dict()) if config is not None and hasattr(config, "to_dict") else {}


def open_teacher(trio: Trio, bound: Bound, task: Task | None, beside: bool = True) -> Bound | None:
    """The fine-tune with its own head and vocabulary; an adapter is added onto its base.

    None where the task has nothing to teach: neither scores over a closed label set nor words. Not `beside` the target,
    it waits in the host's memory until it is asked."""
    if not can_teach(bound) and not speaks(bound):
        return None
    weight = next(bound.model.parameters())
    base, tuned = trio.given["base"], trio.given["tuned"]
    if task is None or not isinstance(tuned, str | os.PathLike) or not isinstance(base, str | os.PathLike):
        return None if trio.apart is not None else teacher_of(bound, base, TaskVector.of(trio), task)
    return open_tuned(trio, task, weight.dtype, weight.device if beside else "cpu")


def open_tuned(trio: Trio, task: Task, dtype: torch.dtype, device: Any) -> Bound:
    """The fine-tune as the task sees it: an adapter put onto its base, a bare file with the base's config."""
    base, tuned = trio.given["base"], trio.given["tuned"]
    # A classifier has a head of its own; a frozen one is that of the encoder before it was tuned.
    head_from = None if isinstance(task, Classification) else base
    return task.open(tuned, dtype=dtype, device=device, head_from=head_from, base=base)


def open_old(trio: Trio, trial: Trial, task: Task | None) -> Bound | None:
    """The fine-tune as a model of its own, for tasks that have no teacher; None where it came as tensors."""
    if task is None or not all(isinstance(trio.given[role], str | os.PathLike) for role in ("base", "tuned")):
        return None
    weight = next(trial.model.parameters())
    return open_tuned(trio, task, weight.dtype, weight.device)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a comparison is asked for, as given."""

    base: Source
    tuned: Source
    target: Source | Bound
    data: Any
    task: str | Task | None = None
    target_tuned: Source | None = None
    validation: Any = "auto"
    unlabelled: Any = None
    head: str = "error"
    strict: bool = False
    align: str = "none"
    finetune: Mapping[str, Any] | bool = True
    task_options: Mapping[str, Any] = field(default_factory=dict)
    search: Search = field(default_factory=Search)
    passes: Passes = field(default_factory=Passes)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    work: Path | None = None
    speech: Speech = field(default_factory=Speech)
    general: Sequence[str] | None = None


class Opened:
    """Everything checked and opened, and the identity that cached work is filed under."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.dataset = request.data if isinstance(request.data, Dataset) else _loaded(request)
        self.splits, self.notes = read_splits(self.dataset, request.validation, request.unlabelled)
        self.task = _task(request.task, self.dataset, request.task_options)
        target = request.target.model if isinstance(request.target, Bound) else request.target
        self.trio = Trio.open(
            request.base, request.tuned, target, head=request.head, strict=request.strict, across=True
        )
        refuse_itself(self.trio)
        if self.trio.apart is not None:
            self.notes.append(f"the target has another shape than the base: {self.trio.apart}")
        self.bound = self._bound()
        self.notes += self.bound.notes if self.trio.apart is not None else ()
        self.opened = dict(self.trio.sources)
        if request.target_tuned is not None:
            self.opened["target_tuned"] = open_checkpoint(request.target_tuned)
        self.fingerprints = {role: checkpoint.fingerprint() for role, checkpoint in self.opened.items()}
        self.identity = self._identity()
        self.folder = None
        if request.work is not None:
            self.folder = Folder(request.work, digest(self.identity), digest(self._votes_identity()))
        tau = vector_of(self.trio, request.align)
        lent = lenders_of(self.trio, self.bound, self.task, request.speech)
        self.trial = Trial(
            self.bound, tau if self.trio.apart is None else None, self.splits, search=request.search,
            passes=request.passes, store=self.folder, lenders=replace(lent, tuned_target=self._tuned_target()),
        )  # fmt: skip
        self.trial.speech = request.speech

    def _bound(self) -> Bound:
        request = self.request
        if isinstance(request.target, Bound):
            return request.target
        if self.task is None:
            raise UsageError("a checkpoint needs a task to open it: give task=, or an opened target.")
        if not isinstance(request.target, str | os.PathLike):
            raise UsageError("the target must be a path, a hub id or an opened (Bound) model.")
        return open_target(self.trio, self.task, request.dtype, request.device)

    def _identity(self) -> dict[str, Any]:
        request, splits = self.request, self.splits
        parts = {
            "train": splits.train, "validation": splits.validation, "test": splits.test,
            "unlabelled": splits.unlabelled,
        }  # fmt: skip
        settings = {**(vars(self.task) if self.task is not None else {}), **request.task_options}
        return {
            "version": __version__,
            "inputs": self.fingerprints,
            "side_files": {role: _side_files(checkpoint) for role, checkpoint in self.opened.items()},
            "data": Dataset({n: list(p) for n, p in parts.items() if p}, {}, "").hashes(),  # type: ignore[arg-type]
            "labels": {str(name): str(prompt) for name, prompt in self.dataset.labels.items()},
            "task": type(self.bound).__name__,
            "task_options": {name: str(value) for name, value in sorted(settings.items())},
            "regime": "few_shot" if splits.validation is None else "validation",
            "search": asdict(request.search),
            "finetune": str(request.finetune),
            **{"head": request.head, "align": request.align},
            **asdict(request.passes),
            "dtype": str(request.dtype),
            "device": torch.device(request.device).type,
            **({"speech": repr((request.speech, request.general))} if speaks(self.bound) else {}),
        }

    def _votes_identity(self) -> dict[str, Any]:
        """What votes depend on: not on the vector, nor on what is searched."""
        about = ("data", "labels", "task", "task_options", "head", "batch_size", "engine", "allow_fewer")
        return {
            **{name: self.identity[name] for name in (*about, "dtype", "device")},
            "target": self.fingerprints["target"],
            "side_files": _side_files(self.opened["target"]),
        }

    def _tuned_target(self) -> Callable[[], TaskVector] | None:
        given, target = self.request.target_tuned, self.trio.sources["target"]
        if given is not None:
            return lambda: TaskVector.between(target, given)
        return None if self.request.finetune is False else self._fine_tune

    def _fine_tune(self) -> TaskVector:
        options = {} if isinstance(self.request.finetune, bool) else self.request.finetune
        checkpoint = self.folder.checkpoint("tuned-target") if self.folder is not None else None
        update, work = in_full(self.bound, self.splits.train, options, checkpoint)
        self.trial.bill.own += work
        return update

    def provenance(self) -> dict[str, Any]:
        inputs = {
            role: {
                "name": checkpoint.path.name if checkpoint.path is not None else "in memory",
                "weights": self.fingerprints[role],
                "files": file_hashes(checkpoint),
            }
            for role, checkpoint in self.opened.items()
        }
        splits, left_out = self.splits, ("inputs", "side_files", "data", "version")
        counts = {name: len(getattr(splits, name) or ()) for name in ("train", "validation", "test")}
        name = Path(self.dataset.source).name
        return {
            "inputs": inputs,
            "data": {"name": name, "sha256": self.identity["data"], "examples": counts},
            "config": {key: value for key, value in self.identity.items() if key not in left_out},
            "parameters": trained_weights(self.bound),
            "tokens": tokens_seen(self.trial),
        }


def read_splits(dataset: Dataset, validation: Any, unlabelled: Any) -> tuple[Splits, list[str]]:
    """Who may look at what, checked by content, and what there is to say about it."""
    train, test = dataset.splits.get("train"), dataset.splits.get("test") or []
    if train is None:
        raise DataError(
            f"{dataset.source} has no train split, and examples are drawn from it ({', '.join(dataset.splits)} found). "
            "Add a train file."
        )
    held = _validation(dataset, validation)
    parts = {"train": train, "validation": held or [], "test": test}
    notes = [*dataset.notes, *check_disjoint({name: part for name, part in parts.items() if part})]
    if not test:
        notes.append(f"{dataset.source} has no test split: methods are chosen, and nothing checks the choice")
    extra = _unlabelled(unlabelled)
    if extra:
        check_disjoint({"unlabelled": extra, "test": test})
    return Splits(train, held, test, extra), notes


def _validation(dataset: Dataset, wanted: Any) -> Sequence[Example] | None:
    if isinstance(wanted, str) and wanted == "none":
        return None
    if wanted is None or (isinstance(wanted, str) and wanted == "auto"):
        return dataset.splits.get("validation")
    other = wanted if isinstance(wanted, Dataset) else load_data(wanted, labels=dataset.labels or None)
    return other.pick("validation", "train")


def _unlabelled(source: Any) -> Sequence[Example] | None:
    """Rows are taken as they are: nobody asks for their labels."""
    if source is None or (isinstance(source, Sequence) and not isinstance(source, str)):
        return source
    return source.pick("train") if isinstance(source, Dataset) else load_unlabelled(source)


def _side_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Hashes of what a model is built and reads its inputs with: configuration, tokenizer, image transform."""
    if checkpoint.path is None or not checkpoint.path.is_dir():
        return {}
    weights = {path.name for path in checkpoint.files}
    files = [f for f in sorted(checkpoint.path.iterdir()) if f.name not in weights and is_side_file(f)]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _loaded(request: Request) -> Dataset:
    import gradfix.tasks  # noqa: F401  fills the registry

    task = TASKS[request.task] if isinstance(request.task, str) else type(request.task)
    return load_data(request.data, bare=getattr(task, "takes_bare", False))


def _task(task: str | Task | None, dataset: Dataset, options: Mapping[str, Any]) -> Task | None:
    if not isinstance(task, str):
        return task
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import gradfix.tasks  # noqa: F401  fills the registry

    make: Callable[..., Task] = TASKS[task]
    return make(dataset.labels, **options)
