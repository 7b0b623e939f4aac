"""Families of models with a classification head: transformers' own classes for texts and images, and timm."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, UsageError
from gradfix.tasks.base import Batch, Example
from gradfix.tasks.heads import LENT, NEW, OWN, HeadMisfit, HeadOptions, answers_to, class_names, load_with_head
from gradfix.tasks.loading import (
    LOADER_ERRORS,
    Home,
    first_line,
    load_exactly,
    load_image_processor,
    load_tokenizer,
    read_json,
)
from gradfix.tasks.reading import TokenLimit, column, longest, masked_mean, processed, tokenise


class Classifier(ABC):
    """A family of models with a classification head."""

    model: Any
    names: list[str]  # the head's classes in order
    notes: list[str]
    origin: str = OWN  # whose head it is: the checkpoint's own, lent or new
    limit: TokenLimit | None = None

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
        headed = load_with_head(auto, home, options)
        self.model, self.notes, self.origin = headed.model, headed.notes, headed.origin
        config = self.model.config
        if images:
            self.processor = load_image_processor(home)
        else:
            self.tokenizer = load_tokenizer(home)
            self.max_length = longest(options.max_length, self.tokenizer, self.model)
            self.limit = TokenLimit(self.max_length)
            if config.pad_token_id is None:
                # decoders look for the last real token with it
                config.pad_token_id = self.tokenizer.pad_token_id
        self.names = class_names(config)

    def inputs(self, examples: Sequence[Example]) -> Batch:
        if self.limit is not None:
            return tokenise(self.tokenizer, examples, self.limit, self.model)
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
        if self.origin != OWN:
            self.model.config.architectures = [type(self.model).__name__]
            write_text(folder / "config.json", self.model.config.to_json_string())


class TimmClassifier(Classifier):
    """A folder in timm's own hub format (config.json with "architecture").

    The weights are read by gradfix and must match the model name by name, so that what is saved later is what
    timm reads back. A head may be lent by another timm folder, or be new."""

    def __init__(self, home: Home, options: HeadOptions) -> None:
        timm, folder = _timm(), home.folder
        own = _TimmFolder(timm, folder)
        wanted, self.origin, self.notes = own, OWN, []
        if options.lender is not None and options.lender.folder != folder:
            lender = _TimmFolder(timm, options.lender.folder)
            if lender.classes and lender.classes != own.classes:
                wanted, self.origin, self.notes = lender, LENT, [f"the head is that of {lender.folder}"]
        elif options.new_head is not None and not (own.classes and answers_to(options.labels, own.names)):
            wanted, self.origin = _TimmFolder(timm, folder, list(options.labels)), NEW
            self.notes = [f"the head is new, drawn from seed {options.new_head}"]
        if not wanted.classes:
            raise CorruptInput(
                f"{folder} has no classification head (num_classes is 0). Give a checkpoint that has one (head_from; "
                "for a transport --head copy), or train a new one (new_head; finetune --new-head)."
            )
        with torch.random.fork_rng():
            torch.manual_seed(options.new_head or 0)
            self.model = own.built(wanted.classes)
        self.config, self.names = own.config, wanted.names
        self._fill(home, wanted.folder)
        self.model.to(device=home.device, dtype=home.dtype).eval()
        data = timm.data.resolve_data_config({}, model=self.model)
        self.transform = timm.data.create_transform(**data, is_training=False)
        self.dtype, self.device = home.dtype, home.device

    def _fill(self, home: Home, lender: Path) -> None:
        """The folder's weights, with the head of where it comes from."""
        state = open_checkpoint(home.file or home.folder).state()
        if self.origin != OWN:
            head = self.head()
            fresh = self.model.state_dict() if self.origin == NEW else open_checkpoint(lender).state()
            shapes = {name: p.shape for name, p in self.model.named_parameters()}
            odd = [name for name in head if name not in fresh or fresh[name].shape != shapes[name]]
            if odd:
                raise HeadMisfit(f"the head of {lender} does not fit {home}: tensor {odd[0]!r} differs.")
            state = {**state, **{name: fresh[name] for name in head}}
        load_exactly(self.model, state, home.source)

    def save_config(self, folder: Path) -> None:
        if self.origin != OWN:
            config = {**self.config, "num_classes": len(self.names), "label_names": self.names}
            arguments = config.get("model_args")
            if isinstance(arguments, dict) and "num_classes" in arguments:
                config["model_args"] = {**arguments, "num_classes": len(self.names)}
            write_text(folder / "config.json", json.dumps(config, indent=2))

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


class _TimmFolder:
    """What a folder's config says about its classes, and how timm builds its model.

    `labels` stand in for the folder's own classes."""

    def __init__(self, timm: Any, folder: Path, labels: Sequence[str] | None = None) -> None:
        self.timm, self.folder = timm, folder
        self.config = read_json(folder / "config.json")
        if "architecture" not in self.config:
            raise HeadMisfit(f"{folder} is no timm model: its head cannot be lent to one.")
        try:
            self.about, self.name, arguments = timm.models._hub.load_model_config_from_path(folder)
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder}: timm cannot build this model ({first_line(error)}).") from None
        self.arguments = dict(arguments or {})
        self.classes: int | None = self.arguments.get("num_classes", self.about.get("num_classes"))
        named = self.about.get("label_names")
        if labels is not None:
            self.classes, named = len(labels), labels
        self.names = [str(name) for name in named or range(self.classes or 0)]

    def built(self, classes: int | None) -> Any:
        try:
            about = {**self.about, "num_classes": classes}
            return self.timm.create_model(self.name, **{**self.arguments, "num_classes": classes}, pretrained_cfg=about)
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{self.folder}: timm cannot build this model ({first_line(error)}).") from None


def _timm() -> Any:
    heal_torchvision()
    try:
        import timm
        import timm.data
    except ImportError:
        raise UsageError("this is a timm model; install gradfix[vision] to use it.") from None
    return timm
