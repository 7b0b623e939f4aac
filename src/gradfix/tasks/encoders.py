"""Encoders behind the zero-shot task: how one family turns an example and a prompt into a vector.

An encoder knows its model, its transform and which of its weights are trained; it does not know labels,
heads or losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.errors import UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Batch, Example
from gradfix.tasks.loading import (
    Home,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
    quiet_transformers,
)
from gradfix.tasks.reading import column, longest, tokenise

TEXT_SCALE = 20.0
POOLINGS = ("mean", "cls")


class Encoder(ABC):
    """A frozen-head encoder of one family."""

    model: Any  # an nn.Module with its family's own methods
    scale: float
    notes: list[str]

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

    def save_extras(self, folder: Path) -> None:  # noqa: B027
        """Write what the family's own loader needs beside the weights and the source may not have had."""


class TextEncoder(Encoder):
    """Any `AutoModel` with a tokenizer; prompts and examples go through the same weights."""

    def __init__(
        self,
        home: Home,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        pooling: str = "mean",
        max_length: int = 64,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModel

        if pooling not in POOLINGS:
            raise UsageError(unknown("pooling", pooling, list(POOLINGS)))
        self.pooling, self.scale = pooling, TEXT_SCALE
        self.tokenizer = load_tokenizer(home.folder, trust_remote_code=trust_remote_code)
        loaded = load_pretrained(
            AutoModel, home, dtype, device, optional=["pooler"], trust_remote_code=trust_remote_code
        )
        self.model, self.notes = loaded.model, loaded.notes
        self.max_length = longest(max_length, self.tokenizer, self.model.config)
        if self.model.config.is_encoder_decoder:
            raise UsageError(f"{home} is an encoder-decoder; use --task seq2seq for it.")
        names = {name for name, _ in self.model.named_parameters()}
        self._unused = {name for name in names if name.startswith("pooler.")}

    def inputs(self, examples: Sequence[Example]) -> Batch:
        return tokenise(self.tokenizer, examples, self.max_length, self.model)

    def embed(self, model: Any, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in self.tokenizer.model_input_names if name in batch}
        hidden = model(**inputs).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        # Averaged in float32 or better: a sum of 64 half-precision vectors loses bits.
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return self.embed(self.model, self.inputs([{"text": prompt} for prompt in prompts]))

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name not in self._unused]


class TwoTowers(Encoder):
    """Hugging Face CLIP and SigLIP: examples are images, prompts go through the frozen text tower."""

    def __init__(
        self,
        home: Home,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModel

        self.tokenizer = load_tokenizer(home.folder, trust_remote_code=trust_remote_code)
        self.processor = load_image_processor(home.folder, trust_remote_code=trust_remote_code)
        loaded = load_pretrained(AutoModel, home, dtype, device, trust_remote_code=trust_remote_code)
        self.model, self.notes = loaded.model, loaded.notes
        positions = int(self.model.config.text_config.max_position_embeddings)
        self.max_length = min(max_length or positions, positions)
        self.siglip = "siglip" in self.model.config.model_type
        self.scale = float(self.model.logit_scale.detach().double().exp())

    def inputs(self, examples: Sequence[Example]) -> Batch:
        with quiet_transformers():
            pixels = self.processor(images=column(examples, "image"), return_tensors="pt")["pixel_values"]
        reference = next(self.model.parameters())
        return {"pixel_values": pixels.to(device=reference.device, dtype=reference.dtype)}

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
        device = next(self.model.parameters()).device
        inputs = {"input_ids": tokens["input_ids"].to(device)}
        if not self.siglip:
            inputs["attention_mask"] = tokens["attention_mask"].to(device)
        with torch.no_grad():
            return _pooled(self.model.get_text_features(**inputs))

    def trainable(self) -> list[str]:
        towers = ("vision_model.", "visual_projection.")
        return [name for name, _ in self.model.named_parameters() if name.startswith(towers)]


def _pooled(features: Any) -> Tensor:
    """transformers returns the projected features as a tensor or inside an output, by version."""
    return features if isinstance(features, Tensor) else features.pooler_output
