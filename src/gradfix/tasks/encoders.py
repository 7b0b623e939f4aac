"""Encoders behind the zero-shot task: how one family turns an example and a prompt into a vector.

An encoder knows its model, its transform and which of its weights are trained; it does not know labels,
heads or losses."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.open import OPEN_CLIP, WEIGHT_FILES, import_open_clip, open_checkpoint, split_tag, tag_settings
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Batch, Example
from gradfix.tasks.loading import (
    LOADER_ERRORS,
    Home,
    first_line,
    load_exactly,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
    quiet_transformers,
    read_json,
)
from gradfix.tasks.reading import TokenLimit, column, longest, processed, tokenise
from gradfix.tasks.sentences import pool, read_sentences, sent_through

TEXT_SCALE = 20.0
OPEN_CLIP_CONFIG = "open_clip_config.json"


class Encoder(ABC):
    """A frozen-head encoder of one family."""

    model: Any  # an nn.Module with its family's own methods
    scale: float
    notes: list[str]
    limits: Sequence[TokenLimit] = ()

    @abstractmethod
    def inputs(self, examples: Sequence[Example]) -> Batch:
        """The examples as tensors, samples first."""

    @abstractmethod
    def embed(self, model: Any, batch: Batch) -> Tensor:
        """One vector per example, not normalised."""

    @abstractmethod
    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        """One vector per prompt, not normalised, without gradients."""

    @abstractmethod
    def trainable(self) -> list[str]:
        """Names of the parameters that the examples' vectors depend on."""

    def unmoved(self) -> frozenset[str]:
        """Names of the parameters that only the frozen head was made with."""
        return frozenset()

    def save_extras(self, folder: Path) -> None:  # noqa: B027
        """Write what the family's own loader needs beside the weights and the source may not have had."""


class TextEncoder(Encoder):
    """Any `AutoModel` with a tokenizer; prompts and examples go through the same weights.

    In a sentence-transformers folder pooling, length and default prompt are the folder's own unless given."""

    def __init__(
        self, home: Home, *, pooling: str | None = None, max_length: int | None = None, base: Path | None = None
    ) -> None:
        from transformers import AutoModel

        self.own = own = read_sentences(home.folder, pooling, base)
        self.pooling, self.prompt, self.lower, self.scale = own.pooling, own.prompt, own.lower, TEXT_SCALE
        self.behind, self.asked_pooling = own.behind, pooling
        self.tokenizer = load_tokenizer(home)
        loaded = load_pretrained(AutoModel, home, optional=["pooler"])
        self.model, self.notes = loaded.model, loaded.notes
        self.max_length = longest(own.max_length if max_length is None else max_length, self.tokenizer, self.model)
        self.limits = [TokenLimit(self.max_length), TokenLimit(self.max_length, "label prompts")]
        if self.model.config.is_encoder_decoder:
            raise UsageError(f"{home} is an encoder-decoder; use --task seq2seq for it.")
        self._hidden = self._prompt_tokens(self.prompt)
        names = {name for name, _ in self.model.named_parameters()}
        self._unused = {name for name in names if name.startswith("pooler.")}

    def _prompt_tokens(self, prompt: str) -> int:
        """How many tokens at the beginning of a text are a prompt that does not count."""
        tokens = self.tokenizer(prompt)["input_ids"] if prompt and not self.own.include_prompt else []
        closed = bool(tokens) and tokens[-1] in self.tokenizer.all_special_ids
        return len(tokens) - closed

    def inputs(self, examples: Sequence[Example]) -> Batch:
        return self._tokens(examples, self.limits[0])

    def _tokens(self, examples: Sequence[Example], limit: TokenLimit) -> Batch:
        if self.prompt or self.lower:
            texts = [f"{self.prompt}{text}" for text in column(examples, "text")]
            texts = [text.lower() if self.lower else text for text in texts]
            examples = [{**example, "text": text} for example, text in zip(examples, texts, strict=True)]
        return tokenise(self.tokenizer, examples, limit, self.model)

    def read(self, texts: Sequence[tuple[str, str]]) -> Batch:
        """Texts of any role, each behind its role's prompt."""
        prompts = {role: self.own.prompt_for(role) for role, _ in texts}
        words = [f"{prompts[role]}{text}" for role, text in texts]
        words = [text.lower() if self.lower else text for text in words]
        batch = tokenise(self.tokenizer, [{"text": text} for text in words], self.limits[0], self.model)
        hidden = {role: self._prompt_tokens(prompt) for role, prompt in prompts.items()}
        if any(hidden.values()):
            batch["hidden"] = torch.tensor([hidden[role] for role, _ in texts], device=batch["input_ids"].device)
        return batch

    def embed(self, model: Any, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in self.tokenizer.model_input_names if name in batch}
        mask = batch["attention_mask"]
        if "hidden" in batch:
            mask = mask * (torch.arange(mask.shape[1], device=mask.device) >= batch["hidden"][:, None])
        elif self._hidden:
            mask = mask.clone()
            mask[:, : self._hidden] = 0
        return sent_through(pool(model(**inputs).last_hidden_state, mask, self.pooling), self.behind)

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return self.embed(self.model, self._tokens([{"text": prompt} for prompt in prompts], self.limits[1]))

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name not in self._unused]


class TwoTowers(Encoder):
    """Hugging Face CLIP and SigLIP: examples are images, prompts go through the frozen text tower."""

    def __init__(self, home: Home) -> None:
        from transformers import AutoModel

        self.tokenizer, self.processor = load_tokenizer(home), load_image_processor(home)
        loaded = load_pretrained(AutoModel, home)
        self.model, self.notes = loaded.model, loaded.notes
        self.max_length = int(self.model.config.text_config.max_position_embeddings)
        self.limits = [TokenLimit(self.max_length, "label prompts")]
        self.siglip = "siglip" in self.model.config.model_type
        self.scale = float(self.model.logit_scale.detach().double().exp())

    def inputs(self, examples: Sequence[Example]) -> Batch:
        return processed(self.processor, examples, self.model)

    def embed(self, model: Any, batch: Batch) -> Tensor:
        return _pooled(model.get_image_features(pixel_values=batch["pixel_values"]))

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        # SigLIP was trained on texts padded to the full length and attends to the padding.
        tokens = self.tokenizer(
            list(prompts),
            padding="max_length" if self.siglip else True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        self.limits[0].count(self.tokenizer, list(prompts), None, tokens["input_ids"].shape[1])
        device = next(self.model.parameters()).device
        inputs = {"input_ids": tokens["input_ids"].to(device)}
        if not self.siglip:
            inputs["attention_mask"] = tokens["attention_mask"].to(device)
        with torch.no_grad():
            return _pooled(self.model.get_text_features(**inputs))

    def trainable(self) -> list[str]:
        towers = ("vision_model.", "visual_projection.")
        return [name for name, _ in self.model.named_parameters() if name.startswith(towers)]

    def unmoved(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_parameters()) - set(self.trainable())


def _pooled(features: Any) -> Tensor:
    """transformers returns the projected features as a tensor or inside an output, by version."""
    return features if isinstance(features, Tensor) else features.pooler_output


def is_open_clip(path: Path) -> bool:
    """Whether a folder's weights are open_clip's; some published folders hold a transformers twin as well."""
    if not (path / OPEN_CLIP_CONFIG).is_file():
        return False
    first = next((name for name in WEIGHT_FILES if (path / name).exists()), "")
    return first.startswith("open_clip") or not (path / "config.json").is_file()


class OpenClip(Encoder):
    """A folder with open_clip_config.json, a bare weights file with its architecture, or a tag.

    The text tower is frozen and only embeds prompts. The weights are read by gradfix and must match the model name
    by name, so that what is saved later is what `open_clip.load_checkpoint` reads back."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        architecture: str | None = None,
        tag: str | None = None,
    ) -> None:
        library = import_open_clip()
        name = f"local-dir:{path}" if path.is_dir() else _known_architecture(library, architecture, path)
        try:
            with quiet_transformers(), _quiet_logging():
                model = library.create_model(name, load_weights=False, pretrained_text=False)
                self.tokenizer = library.get_tokenizer(name)
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{path}: open_clip cannot build this model ({first_line(error)}).") from None
        load_exactly(model, open_checkpoint(path).state(), path)
        self.model = model.to(device=device, dtype=dtype).eval()
        self.notes, self.scale = [], float(model.logit_scale.detach().double().exp())
        self.dtype, self.device = dtype, device
        self.config = self._config(library, path, architecture, tag)
        preprocess = library.transform.PreprocessCfg(**self.config["preprocess_cfg"])
        self.transform = library.transform.image_transform_v2(preprocess, is_train=False)

    def _config(self, library: Any, path: Path, architecture: str | None, tag: str | None) -> dict[str, Any]:
        """What open_clip needs to build the model again from a folder."""
        known = dict(self.model.visual.preprocess_cfg)
        if path.is_dir():
            return {"model_cfg": read_json(path / OPEN_CLIP_CONFIG)["model_cfg"], "preprocess_cfg": known}
        if tag is not None:
            known |= {key: value for key, value in tag_settings(tag).items() if key in known}
        return {"model_cfg": library.get_model_config(architecture), "preprocess_cfg": known}

    def inputs(self, examples: Sequence[Example]) -> Batch:
        pixels = torch.stack([self.transform(image) for image in column(examples, "image")])
        return {"pixel_values": pixels.to(device=self.device, dtype=self.dtype)}

    def embed(self, model: Any, batch: Batch) -> Tensor:
        return model.encode_image(batch["pixel_values"])

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return self.model.encode_text(self.tokenizer(list(prompts)).to(self.device))

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name.startswith("visual.")]

    def unmoved(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_parameters()) - set(self.trainable())

    def save_extras(self, folder: Path) -> None:
        write_text(folder / OPEN_CLIP_CONFIG, json.dumps(self.config, indent=1))
        # A folder's model takes its tokenizer from the folder; the built-in one needs no files.
        if hasattr(self.tokenizer, "save_pretrained") and not (folder / "tokenizer.json").exists():
            self.tokenizer.save_pretrained(folder)


def open_clip_source(source: str, architecture: str | None) -> tuple[str | None, str | None]:
    """Architecture and tag of a source; a tag names both."""
    if not source.startswith(OPEN_CLIP):
        return architecture, None
    named = split_tag(source)[0]
    if architecture not in (None, named):
        raise UsageError(f"{source} is a {named}, not a {architecture}.")
    return named, source


def _known_architecture(library: Any, architecture: str | None, path: Path) -> str:
    if architecture is None:
        raise UsageError(
            f"{path} is a single file. Give the model's folder; a bare weights file of open_clip needs its "
            "--architecture (e.g. ViT-B-16)."
        )
    if architecture not in library.list_models():
        raise UsageError(unknown("open_clip architecture", architecture, library.list_models()))
    return architecture


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """open_clip warns that the model is random; it is filled right after."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
