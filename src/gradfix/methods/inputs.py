"""The inputs of a comparison: checked, opened, and summed up in one identity.

Cached work is filed under that identity, so nothing made from other inputs or settings is ever read back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gradfix._version import __version__
from gradfix.checkpoints.folder import is_side_file
from gradfix.checkpoints.hashes import file_hashes
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.data import Dataset, check_disjoint, load_data, load_unlabelled
from gradfix.errors import DataError, UsageError
from gradfix.methods.search import Search
from gradfix.methods.trial import Arena
from gradfix.methods.workfolder import Folder, digest
from gradfix.tasks.base import TASKS, Bound, Example, Task
from gradfix.training.teacher import teacher_of
from gradfix.vectors.taskvector import TaskVector


class Inputs:
    """Everything checked and opened, and the identity that cached work is filed under."""

    def __init__(
        self,
        *,
        base: Source,
        tuned: Source,
        target: Source | Bound,
        target_tuned: Source | None,
        data: Any,
        task: str | Task | None,
        validation: Any,
        unlabelled: Any,
        finetune: Mapping[str, Any] | bool,
        task_options: Mapping[str, Any],
        search: Search,
        batch_size: int,
        dtype: torch.dtype,
        device: str,
        engine: str,
        allow_fewer: bool,
        work: Path | None,
    ) -> None:
        self.dataset = data if isinstance(data, Dataset) else load_data(data)
        self.train, self.test = _split(self.dataset, "train"), _split(self.dataset, "test")
        self.validation = _validation(self.dataset, validation)
        parts = {"train": self.train, "validation": self.validation or [], "test": self.test}
        self.notes = [
            *self.dataset.notes,
            *check_disjoint({name: part for name, part in parts.items() if part}),
        ]
        self.unlabelled = _unlabelled(unlabelled)
        if self.unlabelled:
            check_disjoint({"unlabelled": self.unlabelled, "test": self.test})
        self.task = _task(task, self.dataset, task_options)
        self.sources = {"base": base, "tuned": tuned, "target_tuned": target_tuned}
        self.bound = _open(target, self.task, dtype, device)
        self.target: Source = target.model if isinstance(target, Bound) else target
        self.sources["target"] = self.target
        self.finetune = finetune
        tau = TaskVector.between(base, tuned)
        opened = {
            role: open_checkpoint(source, base=base if role == "tuned" else None)
            for role, source in self.sources.items()
            if source is not None
        }
        self.fingerprints = {role: checkpoint.fingerprint() for role, checkpoint in opened.items()}
        self.identity = {
            "version": __version__,
            "inputs": self.fingerprints,
            "side_files": {role: _side_files(checkpoint) for role, checkpoint in opened.items()},
            "data": _hashes({**parts, "unlabelled": self.unlabelled or []}),
            "labels": {str(name): str(prompt) for name, prompt in self.dataset.labels.items()},
            "task": type(self.bound).__name__,
            "task_options": {name: str(value) for name, value in sorted(_settings(self.task, task_options))},
            "regime": "few_shot" if self.validation is None else "validation",
            "search": asdict(search),
            "finetune": str(finetune),
            "batch_size": batch_size,
            "dtype": str(dtype),
            "device": torch.device(device).type,
            "engine": engine,
            "allow_fewer": allow_fewer,
        }
        voting = (
            "data",
            "labels",
            "task",
            "task_options",
            "batch_size",
            "dtype",
            "device",
            "engine",
            "allow_fewer",
        )
        votes_identity = {name: self.identity[name] for name in voting}
        votes_identity["target"] = self.fingerprints["target"]
        votes_identity["side_files"] = _side_files(opened["target"])
        self.folder = (
            Folder(work, digest(self.identity), digest(votes_identity)) if work is not None else None
        )
        self.arena = Arena(
            bound=self.bound,
            tau=tau,
            train=self.train,
            validation=self.validation,
            test=self.test,
            search=search,
            batch_size=batch_size,
            engine=engine,
            allow_fewer=allow_fewer,
            store=self.folder,
            aligned=lambda how: _align(base, self.target, tau, how),
            tuned_target=self._tuned_target(target_tuned),
            unlabelled=self.unlabelled,
            teacher=lambda: teacher_of(self.bound, base, tau, self.task),
        )

    def _tuned_target(self, given: Source | None) -> Callable[[], TaskVector] | None:
        if given is not None:
            return lambda: TaskVector.between(self.target, given)
        return None if self.finetune is False else self._fine_tune

    def _fine_tune(self) -> TaskVector:
        from gradfix.methods.references import tuned_target

        options = {} if isinstance(self.finetune, bool) else self.finetune
        checkpoint = self.folder.checkpoint("tuned-target") if self.folder is not None else None
        update, work = tuned_target(self.bound, self.train, options, checkpoint)
        self.arena.bill.own += work
        return update

    def provenance(self) -> dict[str, Any]:
        inputs = {}
        for role, source in self.sources.items():
            if source is None:
                continue
            checkpoint = open_checkpoint(source, base=self.sources["base"] if role == "tuned" else None)
            name = checkpoint.path.name if checkpoint.path is not None else "in memory"
            inputs[role] = {
                "name": name,
                "weights": self.fingerprints[role],
                "files": file_hashes(checkpoint),
            }
        counts = {"train": len(self.train), "validation": len(self.validation or ()), "test": len(self.test)}
        return {
            "inputs": inputs,
            "data": {
                "name": Path(self.dataset.source).name,
                "sha256": self.identity["data"],
                "examples": counts,
            },
            "config": {
                k: v for k, v in self.identity.items() if k not in ("inputs", "side_files", "data", "version")
            },
            "parameters": self.parameters(),
            "tokens": self.tokens(),
        }

    def parameters(self) -> int:
        names = set(self.bound.trainable())
        return sum(p.numel() for name, p in self.bound.model.named_parameters() if name in names)

    def tokens(self) -> float:
        """Tokens a sample sends through the weights: its words, on average over the test set, or a picture's patches."""
        batches = self.arena.batches("test")
        batch = next(batches)
        if "attention_mask" in batch:
            masks = [part["attention_mask"] for part in chain([batch], batches)]
            return float(torch.cat([mask.sum(-1).double().flatten() for mask in masks]).mean())
        if "input_ids" in batch:
            widths = [
                (len(part["input_ids"]), part["input_ids"].shape[-1]) for part in chain([batch], batches)
            ]
            return sum(count * width for count, width in widths) / sum(count for count, _ in widths)
        config = getattr(self.bound.model, "config", None)
        config = getattr(config, "vision_config", config)
        size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
        if isinstance(size, int) and isinstance(patch, int):
            return float((size // patch) ** 2 + 1)
        return 1.0


def _side_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Hashes of what a model is built and reads its inputs with: configuration, tokenizer, image transform."""
    if checkpoint.path is None or not checkpoint.path.is_dir():
        return {}
    weights = {path.name for path in checkpoint.files}
    files = [f for f in sorted(checkpoint.path.iterdir()) if f.name not in weights and is_side_file(f)]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _split(dataset: Dataset, name: str) -> Sequence[Example]:
    if name not in dataset.splits:
        raise DataError(
            f"{dataset.source} has no {name} split, and compare needs one ({', '.join(dataset.splits)} found). "
            "Give a folder with train and test files."
        )
    return dataset.splits[name]


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


def _settings(task: Task | None, options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Everything a task was made with (pooling, lengths, prompts): units made with another are not read."""
    return list({**(vars(task) if task is not None else {}), **options}.items())


def _task(task: str | Task | None, dataset: Dataset, options: Mapping[str, Any]) -> Task | None:
    if not isinstance(task, str):
        return task
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import gradfix.tasks  # noqa: F401  fills the registry

    make: Callable[..., Task] = TASKS[task]
    return make(dataset.labels, **options)


def _open(target: Source | Bound, task: Task | None, dtype: torch.dtype, device: str) -> Bound:
    if isinstance(target, Bound):
        return target
    if task is None:
        raise UsageError("a checkpoint needs a task to open it: give task=, or an opened target.")
    if not isinstance(target, (str, os.PathLike)):
        raise UsageError("the target must be a path, a hub id or an opened (Bound) model.")
    return task.open(target, dtype=dtype, device=device)


def _align(base: Source, target: Source, tau: TaskVector, how: str) -> TaskVector:
    from gradfix.align import align

    return align(base, target, method=how).apply(tau)


def _hashes(parts: Mapping[str, Sequence[Example]]) -> dict[str, str]:
    return Dataset({n: list(p) for n, p in parts.items() if p}, {}, "").hashes()  # type: ignore[arg-type]
