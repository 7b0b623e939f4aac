"""open_clip encoders: a folder with open_clip_config.json, a bare weights file with its architecture, or a tag.

The text tower is frozen and only embeds prompts. The weights are read by gradfix and must match the model name
by name, so that what is saved later is what `open_clip.load_checkpoint` reads back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.open import (
    OPEN_CLIP,
    WEIGHT_FILES,
    import_open_clip,
    open_checkpoint,
    split_tag,
    tag_settings,
)
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Batch, Example
from gradfix.tasks.encoders import Encoder
from gradfix.tasks.loading import LOADER_ERRORS, first_line, load_exactly, quiet_transformers, read_json
from gradfix.tasks.reading import column

CONFIG = "open_clip_config.json"


def is_open_clip(path: Path) -> bool:
    """Whether a folder's weights are open_clip's; some published folders hold a transformers twin as well."""
    if not (path / CONFIG).is_file():
        return False
    first = next((name for name in WEIGHT_FILES if (path / name).exists()), "")
    return first.startswith("open_clip") or not (path / "config.json").is_file()


class OpenClip(Encoder):
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
        name = f"local-dir:{path}" if path.is_dir() else _known(library, architecture, path)
        try:
            with quiet_transformers(), _quiet_logging():
                model = library.create_model(name, load_weights=False, pretrained_text=False)
                self.tokenizer = library.get_tokenizer(name)
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{path}: open_clip cannot build this model ({first_line(error)}).") from None
        load_exactly(model, open_checkpoint(path), path)
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
            return {"model_cfg": read_json(path / CONFIG)["model_cfg"], "preprocess_cfg": known}
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

    def save_extras(self, folder: Path) -> None:
        write_text(folder / CONFIG, json.dumps(self.config, indent=1))
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


def _known(library: Any, architecture: str | None, path: Path) -> str:
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
