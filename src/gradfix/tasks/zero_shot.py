"""Zero-shot: an encoder, one prompt (or several) per label, and a head that never moves.

Logits are `scale * cosine` to the label embeddings of the frozen pre-trained encoder of that side. The head
is saved beside the weights, because a fine-tuned encoder would embed the prompts differently: without the
file or `head_from`, a tuned checkpoint is scored against its own drifted prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.checkpoints.open import open_checkpoint, resolve
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from gradfix.tasks.base import TASKS, Batch, ClosedSet, Example, Prompts, Task, label_indices, settings_of
from gradfix.tasks.encoders import Encoder, OpenClip, TextEncoder, TwoTowers, is_open_clip, open_clip_source
from gradfix.tasks.loading import freeze_all_but, locate, read_json

HEAD_FILE = "zero_shot_head.safetensors"


class ZeroShotBound(ClosedSet):
    """An encoder with its side's head."""

    def __init__(self, encoder: Encoder, head: Tensor, prompts: Mapping[str, Sequence[str]], scale: float) -> None:
        self.encoder, self.model, self.notes = encoder, encoder.model, encoder.notes
        self.labels, self.prompts = list(prompts), prompts
        self.head, self.scale = head, scale
        self._index = {label: index for index, label in enumerate(self.labels)}
        freeze_all_but(self.model, encoder.trainable())

    def collate(self, examples: Sequence[Example]) -> Batch:
        answers = label_indices(examples, self._index)
        return {**self.encoder.inputs(examples), "labels": answers.to(self.head.device)}

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.encoder.embed(model, batch)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        vectors = self.encoder.embed(model, batch)
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return self.scale * functional.normalize(vectors, dim=-1) @ self.head.to(vectors.dtype).T

    def trainable(self) -> list[str]:
        return self.encoder.trainable()

    def unmoved(self) -> frozenset[str]:
        return self.encoder.unmoved()

    def cuts(self) -> tuple[str, ...]:
        return tuple(note for limit in self.encoder.limits for note in limit.notes())

    def asked(self) -> str:
        return settings_of(self, self.encoder)

    def save_extras(self, folder: Path) -> None:
        metadata = {
            "format": "gradfix.zero_shot_head",
            "labels": json.dumps(self.labels),
            "prompts": json.dumps(self.prompts),
            "scale": repr(self.scale),
        }
        save_tensors(folder / HEAD_FILE, {"head": self.head.detach().cpu().contiguous()}, metadata)
        self.encoder.save_extras(folder)


@TASKS.register("zero-shot")
class ZeroShot(Task):
    """Text encoders, Hugging Face CLIP and SigLIP, open_clip.

    `templates` wrap every prompt ("a photo of a {}."); `scale` replaces the family's own. `pooling` and
    `max_length` are for text encoders and by default the model's own: what its folder says, else the mean over the
    tokens, and as many tokens as it takes. `architecture` names the model of a bare open_clip weights file."""

    def __init__(
        self,
        labels: Mapping[str, Prompts],
        *,
        templates: Sequence[str] = (),
        scale: float | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        architecture: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if len(labels) < 2:
            raise UsageError("a zero-shot task needs at least two labels with their prompts.")
        self.labels = dict(labels)
        self.prompts = {label: _expanded(given, templates) for label, given in labels.items()}
        self.bare = not templates and all(given == label for label, given in labels.items())
        self.scale, self.pooling, self.max_length = scale, pooling, max_length
        self.architecture, self.trust_remote_code = architecture, trust_remote_code

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> ZeroShotBound:
        encoder = self._encoder(source, dtype, device, head_from if base is None else base)
        saved = _head_file(source)
        if saved is not None:
            head, scale, prompts = self._read_head(saved)
            bound = ZeroShotBound(encoder, head.to(device), prompts, scale)
        else:
            other = encoder
            if head_from is not None and resolve(head_from) != resolve(source):
                other = self._encoder(head_from, dtype, device, base)
            bound = ZeroShotBound(encoder, self._head(other), self.prompts, self.scale or other.scale)
        bound.source = resolve(source)
        return bound

    def _encoder(
        self,
        source: str | os.PathLike[str],
        dtype: torch.dtype,
        device: str | torch.device,
        base: str | os.PathLike[str] | None = None,
    ) -> Encoder:
        path = resolve(source)
        beside = base is not None and (resolve(base) / "config.json").is_file()
        if is_open_clip(path) or (path.is_file() and not beside):
            architecture, tag = open_clip_source(os.fspath(source), self.architecture)
            return OpenClip(path, dtype, device, architecture=architecture, tag=tag)
        home = locate(source, base, dtype=dtype, device=device, trust_remote_code=self.trust_remote_code)
        config = read_json(home.folder / "config.json")
        if "text_config" in config and "vision_config" in config:
            return TwoTowers(home)
        before = resolve(base) if base is not None else None
        return TextEncoder(home, pooling=self.pooling, max_length=self.max_length, base=before)

    def _head(self, encoder: Encoder) -> Tensor:
        """Each prompt normalised, averaged per label, normalised again."""
        rows = []
        for prompts in self.prompts.values():
            vectors = encoder.embed_prompts(prompts)
            vectors = functional.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
            rows.append(functional.normalize(vectors.mean(0), dim=0))
        return torch.stack(rows)

    def _read_head(self, path: Path) -> tuple[Tensor, float, dict[str, list[str]]]:
        """The saved head in this task's label order; other labels or prompts than asked for are refused."""
        labels, prompts, scale = read_head_metadata(path)
        tensor = open_checkpoint(path).read("head")
        if set(labels) != set(self.labels):
            odd = sorted(set(labels) ^ set(self.labels))[0]
            raise IncompatibleCheckpoints(
                f"{path} was saved for other labels than the data's: they differ in {odd!r}. "
                "Remove that file to build a new head from this checkpoint."
            )
        if not self.bare and any(prompts[label] != self.prompts[label] for label in labels):
            raise IncompatibleCheckpoints(
                f"{path} was saved with other prompts. Remove that file to build a new head from this checkpoint."
            )
        order = [labels.index(label) for label in self.labels]
        return tensor[order], self.scale or scale, {label: prompts[label] for label in self.labels}


def read_head_metadata(path: Path) -> tuple[list[str], dict[str, list[str]], float]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            shape = file.get_slice("head").get_shape()
        labels, prompts = json.loads(metadata["labels"]), json.loads(metadata["prompts"])
        scale = float(metadata["scale"])
    except (SafetensorError, KeyError, ValueError, OSError, TypeError) as error:
        raise CorruptInput(f"{path} is no zero-shot head ({type(error).__name__}). Remove or restore it.") from None
    if len(shape) != 2 or shape[0] != len(labels) or set(prompts) != set(labels) or not scale > 0:
        raise CorruptInput(f"{path} contradicts itself: {len(labels)} labels, head of shape {shape}, scale {scale}.")
    return labels, prompts, scale


def _expanded(prompts: Prompts, templates: Sequence[str]) -> list[str]:
    for template in templates:
        if "{}" not in template:
            raise UsageError(f"the template {template!r} has no {{}} to put the label's prompt in.")
    listed = [prompts] if isinstance(prompts, str) else list(prompts)
    return [template.replace("{}", prompt) for template in templates or ["{}"] for prompt in listed]


def _head_file(source: str | os.PathLike[str]) -> Path | None:
    local = resolve(source)
    path = (local if local.is_dir() else local.parent) / HEAD_FILE
    return path if path.is_file() else None
