"""timm classifiers, from a folder in timm's own hub format (config.json with "architecture").

The weights are read by gradfix and must match the model name by name, so that what is saved later is what
timm reads back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, UsageError
from gradfix.tasks.base import Batch, Example
from gradfix.tasks.classification import Classifier
from gradfix.tasks.loading import LOADER_ERRORS, first_line, load_exactly
from gradfix.tasks.reading import column


class TimmClassifier(Classifier):
    def __init__(self, folder: Path, dtype: torch.dtype, device: str | torch.device) -> None:
        timm = _timm()
        try:
            about, name, arguments = timm.models._hub.load_model_config_from_path(folder)
            classes = about.get("num_classes")
            model = timm.create_model(
                name, **{"num_classes": classes, **(arguments or {})}, pretrained_cfg=about
            )
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder}: timm cannot build this model ({first_line(error)}).") from None
        if not model.num_classes:
            raise CorruptInput(f"{folder} has no classification head (num_classes is 0).")
        load_exactly(model, open_checkpoint(folder), folder)
        self.model = model.to(device=device, dtype=dtype).eval()
        data = timm.data.resolve_data_config({}, model=model)
        self.transform = timm.data.create_transform(**data, is_training=False)
        given = about.get("label_names")
        self.names = [str(name) for name in given or range(model.num_classes)]
        self.notes = []
        self.dtype, self.device = dtype, device

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
