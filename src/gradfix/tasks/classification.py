"""Classification: a model that carries its own head.

`AutoModelForSequenceClassification`, `AutoModelForImageClassification` and timm. Classes are matched by name
between the head and the data, never by position. A head that only the fine-tune has can be lent to the bare
base with `head_from`; it then stays frozen."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.data.columns import by_number
from gradfix.errors import DataError, UsageError
from gradfix.tasks.base import TASKS, Batch, ClosedSet, Example, Prompts, Task, label_indices, settings_of
from gradfix.tasks.classifiers import Classifier, HuggingFaceClassifier, TimmClassifier
from gradfix.tasks.heads import LENT, HeadOptions, places
from gradfix.tasks.loading import Home, freeze_all_but, locate, quiet_transformers, read_json


class ClassificationBound(ClosedSet):
    """A classifier whose answers are numbered as the data's labels are."""

    def __init__(
        self,
        classifier: Classifier,
        labels: Sequence[str],
        freeze_head: bool,
        folder: Path,
        head_of: Path | None = None,
    ) -> None:
        self.classifier, self.model, self.notes = classifier, classifier.model, classifier.notes
        self.labels, self.source = list(labels), folder
        self._index = {label: index for index, label in enumerate(labels)}
        self._columns = torch.tensor(match_labels(labels, classifier.names, head_of or folder))
        self._frozen = set(classifier.head()) if freeze_head else set()
        freeze_all_but(self.model, self.trainable())

    def collate(self, examples: Sequence[Example]) -> Batch:
        answers = label_indices(examples, self._index)
        inputs = self.classifier.inputs(examples)
        return {**inputs, "labels": answers.to(next(iter(inputs.values())).device)}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = self.classifier.logits(model, batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits[:, self._columns.to(logits.device)]

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.classifier.features(model, batch)

    def head_names(self) -> list[str]:
        return self.classifier.head()

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name not in self._frozen]

    def asked(self) -> str:
        return settings_of(self, self.classifier)

    def cuts(self) -> tuple[str, ...]:
        return self.classifier.limit.notes() if self.classifier.limit is not None else ()

    def save_extras(self, folder: Path) -> None:
        self.classifier.save_config(folder)


def match_labels(labels: Sequence[str], names: Sequence[str], folder: Path) -> list[int]:
    """The head's column of each label, by name; unnamed classes (LABEL_0, ...) answer to their number."""
    columns = places(names)
    odd = [label for label in labels if label not in columns]
    if odd:
        near = difflib.get_close_matches(odd[0], names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise DataError(
            f"the data's label {odd[0]!r} is no class of {folder}; its {len(names)} classes are: {shown}.{hint} "
            f"{by_number(names) if odd[0].isdigit() else _way_out(columns)}"
        )
    return [columns[label] for label in labels]


def _way_out(columns: Mapping[str, int]) -> str:
    if "LABEL_0" in columns and "0" in columns:
        return (
            "They have no names: write the labels as their numbers (0, 1, ...), or name the classes in order in "
            "id2label of a config.json beside the weights."
        )
    return "Rename the labels, or the classes in the model's id2label; finetune --new-head replaces the head."


@TASKS.register("classification")
class Classification(Task):
    """Text and image classifiers of transformers, and timm.

    `freeze_head` leaves the head out of training and votes. `new_head` (a seed) puts a fresh head on a
    checkpoint that has none for these labels; a head lent by `head_from` is always frozen."""

    def __init__(
        self,
        labels: Mapping[str, Prompts],
        *,
        freeze_head: bool = False,
        new_head: int | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if len(labels) < 2:
            raise UsageError("a classification task needs at least two labels.")
        self.labels = dict(labels)
        self.freeze_head, self.new_head = freeze_head, new_head
        self.max_length, self.trust_remote_code = max_length, trust_remote_code

    def with_new_head(self, seed: int) -> Classification:
        """The same task, with a fresh head on a checkpoint that has none for its labels."""
        return Classification(
            self.labels, freeze_head=self.freeze_head, new_head=seed, max_length=self.max_length,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> ClassificationBound:
        how: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": self.trust_remote_code}
        home = locate(source, head_from if base is None else base, **how)
        lender = locate(head_from, base, **how) if head_from is not None else None
        options = HeadOptions(list(self.labels), lender, self.new_head, self.max_length)
        classifier = self._classifier(home, options)
        frozen = self.freeze_head or classifier.origin == LENT
        head_of = lender.source if lender is not None and classifier.origin == LENT else None
        return ClassificationBound(classifier, list(self.labels), frozen, home.source, head_of)

    def _classifier(self, home: Home, options: HeadOptions) -> Classifier:
        config = read_json(home.folder / "config.json")
        if "architecture" in config:
            if home.adapter is not None:
                raise UsageError(f"{home.adapter}: adapters of timm models cannot be read; merge it first.")
            return TimmClassifier(home, options)
        with quiet_transformers():
            from transformers.models.auto.modeling_auto import (
                MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as IMAGE_MODELS,
            )
        return HuggingFaceClassifier(home, options, config.get("model_type") in IMAGE_MODELS)
