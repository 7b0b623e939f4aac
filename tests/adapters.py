"""Adapters saved by peft itself, over tiny models: what LoRA tests start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def load(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    name = f"AutoModelFor{kind}" if kind else "AutoModel"
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype)


def train_adapter(model: nn.Module, out: Path, seed: int = 1, **options: Any) -> nn.Module:
    """An adapter with every trainable weight moved, saved by peft; returns the merged model."""
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw).to(parameter.dtype))
    tuned.save_pretrained(out)
    return tuned.merge_and_unload()
