"""Classification: a model that carries its own head.

`AutoModelForSequenceClassification`, `AutoModelForImageClassification` and timm. Classes are matched by name
between the head and the data, never by position. A head that only the fine-tune has can be lent to the bare
base with `head_from`; it then stays frozen."""

from __future__ import annotations

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, DataError, IncompatibleCheckpoints, UsageError
from gradfix.tasks.base import TASKS, Batch, ClosedSet, Example, Prompts, Task, label_indices, settings_of
from gradfix.tasks.loading import (
    LOADER_ERRORS,
    Home,
    Loaded,
    first_line,
    freeze_all_but,
    load_exactly,
    load_image_processor,
    load_partly,
    load_tokenizer,
    locate,
    quiet_transformers,
    read_json,
)
from gradfix.tasks.reading import column, longest, masked_mean, processed, tokenise


class Classifier(ABC):
    """A family of models with a classification head."""

    model: Any
    names: list[str]  # the head's classes in order
    notes: list[str]
    added_head: bool = False  # the head is not the checkpoint's own

    @abstractmethod
    def inputs(self, examples: Sequence[Example]) -> Batch: ...

    @abstractmethod
    def logits(self, model: Any, batch: Batch) -> Tensor: ...

    @abstractmethod
    def features(self, model: Any, batch: Batch) -> Tensor: ...

    @abstractmethod
    def head(self) -> list[str]:
        """Names of the head's parameters."""

    def save_config(self, folder: Path) -> None:  # noqa: B027
        """Rewrite the config where the head is not the checkpoint's own."""


class HuggingFaceClassifier(Classifier):
    """Text or images through transformers' own classes."""

    def __init__(self, home: Home, options: HeadOptions, images: bool) -> None:
        from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

        self.images = images
        auto = AutoModelForImageClassification if images else AutoModelForSequenceClassification
        self.model, self.notes, self.added_head = load_with_head(auto, home, options)
        config = self.model.config
        if images:
            self.processor = load_image_processor(home)
        else:
            self.tokenizer = load_tokenizer(home)
            self.max_length = longest(options.max_length, self.tokenizer, config)
            if config.pad_token_id is None:
                # decoders look for the last real token with it
                config.pad_token_id = self.tokenizer.pad_token_id
        self.names = [str(config.id2label[index]) for index in range(config.num_labels)]

    def inputs(self, examples: Sequence[Example]) -> Batch:
        if not self.images:
            return tokenise(self.tokenizer, examples, self.max_length, self.model)
        return processed(self.processor, examples, self.model)

    def _shown(self, batch: Batch) -> Batch:
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(**self._shown(batch)).logits

    def features(self, model: Any, batch: Batch) -> Tensor:
        hidden = getattr(model, model.base_model_prefix)(**self._shown(batch)).last_hidden_state
        if "attention_mask" not in batch:
            return hidden.flatten(2).mean(-1) if hidden.ndim == 4 else hidden.mean(1)
        return masked_mean(hidden, batch["attention_mask"])

    def head(self) -> list[str]:
        prefix = f"{self.model.base_model_prefix}."
        return [name for name, _ in self.model.named_parameters() if not name.startswith(prefix)]

    def save_config(self, folder: Path) -> None:
        if self.added_head:
            self.model.config.architectures = [type(self.model).__name__]
            write_text(folder / "config.json", self.model.config.to_json_string())


class TimmClassifier(Classifier):
    """A folder in timm's own hub format (config.json with "architecture").

    The weights are read by gradfix and must match the model name by name, so that what is saved later is what
    timm reads back."""

    def __init__(self, home: Home) -> None:
        timm, folder = _timm(), home.folder
        try:
            about, name, arguments = timm.models._hub.load_model_config_from_path(folder)
            classes = about.get("num_classes")
            model = timm.create_model(name, **{"num_classes": classes, **(arguments or {})}, pretrained_cfg=about)
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder}: timm cannot build this model ({first_line(error)}).") from None
        if not model.num_classes:
            raise CorruptInput(f"{folder} has no classification head (num_classes is 0).")
        load_exactly(model, open_checkpoint(folder), folder)
        self.model = model.to(device=home.device, dtype=home.dtype).eval()
        data = timm.data.resolve_data_config({}, model=model)
        self.transform = timm.data.create_transform(**data, is_training=False)
        given = about.get("label_names")
        self.names = [str(name) for name in given or range(model.num_classes)]
        self.notes = []
        self.dtype, self.device = home.dtype, home.device

    def inputs(self, examples: Sequence[Example]) -> Batch:
        pixels = torch.stack([self.transform(image) for image in column(examples, "image")])
        return {"pixel_values": pixels.to(device=self.device, dtype=self.dtype)}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(batch["pixel_values"])

    def features(self, model: Any, batch: Batch) -> Tensor:
        return model.forward_head(model.forward_features(batch["pixel_values"]), pre_logits=True)

    def head(self) -> list[str]:
        owned = {id(parameter) for parameter in self.model.get_classifier().parameters()}
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in owned]


def _timm() -> Any:
    heal_torchvision()
    try:
        import timm
        import timm.data
    except ImportError:
        raise UsageError("this is a timm model; install gradfix[vision] to use it.") from None
    return timm


@dataclass(frozen=True)
class HeadOptions:
    """Where a head comes from when the checkpoint has none."""

    labels: Sequence[str]
    head_from: Path | None = None
    new_head: int | None = None
    max_length: int | None = None


def load_with_head(auto: Any, home: Home, options: HeadOptions) -> tuple[Any, list[str], bool]:
    """The model, notes, and whether its head came from elsewhere: lent by `head_from`, or fresh from a seed."""
    loaded = load_partly(auto, home)
    if not loaded.missing:
        return loaded.model, loaded.notes, False
    _refuse_gaps(home, loaded)
    if options.head_from is not None:
        lender = load_partly(auto, replace(home, folder=options.head_from, adapter=None))
        if lender.missing:
            raise IncompatibleCheckpoints(f"neither {home} nor {options.head_from} has a classification head.")
        loaded = load_partly(auto, home, **_classes(lender.model.config.id2label))
        _borrow(loaded, lender, options.head_from)
        return loaded.model, [*loaded.notes, f"the head is that of {options.head_from}"], True
    if options.new_head is None:
        raise IncompatibleCheckpoints(
            f"{home} has no classification head (no {loaded.missing[0]!r}). Give a checkpoint that has one "
            "(head_from; for a transport --head copy), or train a new one (new_head; finetune --new-head)."
        )
    with torch.random.fork_rng():
        torch.manual_seed(options.new_head)
        loaded = load_partly(auto, home, **_classes(dict(enumerate(options.labels))))
    return loaded.model, [*loaded.notes, f"the head is new, drawn from seed {options.new_head}"], True


def _refuse_gaps(home: Home, loaded: Loaded) -> None:
    """A head may be missing; a part of the encoder may not."""
    prefix = f"{loaded.model.base_model_prefix}."
    inside = [n for n in loaded.missing if n.startswith(prefix) and not n.startswith(f"{prefix}pooler.")]
    if inside:
        raise CorruptInput(
            f"{home} lacks {len(inside)} tensors, first {inside[0]!r}. The file is incomplete or of another model."
        )


def _classes(names: Mapping[int, str]) -> dict[str, Any]:
    return {"id2label": dict(names), "label2id": {name: index for index, name in names.items()}}


def _borrow(loaded: Loaded, lender: Loaded, source: Path) -> None:
    theirs = dict(lender.model.named_parameters())
    ours = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name in loaded.missing:
            if name not in theirs or theirs[name].shape != ours[name].shape:
                raise IncompatibleCheckpoints(f"the head of {source} does not fit: tensor {name!r} differs.")
            ours[name].copy_(theirs[name])


class ClassificationBound(ClosedSet):
    """A classifier whose answers are numbered as the data's labels are."""

    def __init__(self, classifier: Classifier, labels: Sequence[str], freeze_head: bool, folder: Path) -> None:
        self.classifier, self.model, self.notes = classifier, classifier.model, classifier.notes
        self.labels, self.source = list(labels), folder
        self._index = {label: index for index, label in enumerate(labels)}
        self._columns = torch.tensor(match_labels(labels, classifier.names, folder))
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

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name not in self._frozen]

    def asked(self) -> str:
        return settings_of(self, self.classifier)

    def save_extras(self, folder: Path) -> None:
        self.classifier.save_config(folder)


def match_labels(labels: Sequence[str], names: Sequence[str], folder: Path) -> list[int]:
    """The head's column of each label, by name; unnamed classes (LABEL_0, ...) answer to their number."""
    places = {name: index for index, name in enumerate(names)}
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        places |= {str(index): index for index in range(len(names))}
    odd = [label for label in labels if label not in places]
    if odd:
        near = difflib.get_close_matches(odd[0], names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise DataError(
            f"the data's label {odd[0]!r} is no class of {folder}; its {len(names)} classes are: {shown}.{hint} "
            "Rename the labels, or the classes in the model's id2label."
        )
    return [places[label] for label in labels]


@TASKS.register("classification")
class Classification(Task):
    """Text and image classifiers of transformers, and timm.

    `freeze_head` leaves the head out of training and votes. `new_head` (a seed) puts a fresh head on a
    checkpoint that has none; a head lent by `head_from` is always frozen."""

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

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
    ) -> ClassificationBound:
        trust = self.trust_remote_code
        home = locate(source, head_from, dtype=dtype, device=device, trust_remote_code=trust)
        lender = locate(head_from).folder if head_from is not None else None
        classifier = self._classifier(home, HeadOptions(list(self.labels), lender, self.new_head, self.max_length))
        lent = classifier.added_head and lender is not None
        return ClassificationBound(classifier, list(self.labels), self.freeze_head or lent, home.adapter or home.folder)

    def _classifier(self, home: Home, options: HeadOptions) -> Classifier:
        config = read_json(home.folder / "config.json")
        if "architecture" in config:
            if home.adapter is not None:
                raise UsageError(f"{home.adapter}: adapters of timm models cannot be read; merge it first.")
            return TimmClassifier(home)
        with quiet_transformers():
            from transformers.models.auto.modeling_auto import (
                MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as IMAGE_MODELS,
            )
        return HuggingFaceClassifier(home, options, config.get("model_type") in IMAGE_MODELS)
