"""How many attention heads a model has: from the caller, its config.json, or the model object.

Names and shapes do not tell, and a wrong guess permutes across heads, so nothing is ever guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown

HeadCounts = int | Mapping[str, int]

HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head", "heads")
TOWER_KEYS = {"vision": ("vision_config", "vision_cfg"), "text": ("text_config", "text_cfg")}


def per_tower(towers: set[str], given: HeadCounts | None, found: Mapping[str, int]) -> dict[str, int]:
    """Head counts of every tower: as given by the caller, else as found in the config."""
    if isinstance(given, int):
        return dict.fromkeys(towers, given)
    if given is not None:
        if wrong := sorted(set(given) - towers):
            raise UsageError(unknown("tower", wrong[0], sorted(filter(None, towers))))
        return dict(given)
    if set(found) == {""}:
        return dict.fromkeys(towers, found[""])
    return dict(found)


def heads_in_config(config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Query heads and key/value heads per tower ("" where there is one), from a model's config."""
    config = config.get("model_cfg", config)
    heads: dict[str, int] = {}
    kv_heads: dict[str, int] = {}
    for tower, keys in {"": (), **TOWER_KEYS}.items():
        part = (
            next((config[key] for key in keys if isinstance(config.get(key), Mapping)), {})
            if tower
            else config
        )
        count = next((part[key] for key in HEAD_KEYS if part.get(key)), None)
        if not count and "width" in part and "layers" in part:
            count = part["width"] // part.get("head_width", 64)  # an open_clip vision tower
        if count:
            heads[tower] = int(count)
        if part.get("num_key_value_heads"):
            kv_heads[tower] = int(part["num_key_value_heads"])
    if len(heads) > 1:
        heads.pop("", None)
    return heads, kv_heads


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known about the model behind a checkpoint: its own config, or its folder's config.json."""
    module = getattr(checkpoint, "module", None)
    if isinstance(module, nn.Module):
        return _module_config(module)
    if checkpoint.path is None:
        return {}
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for file in ("config.json", "open_clip_config.json"):
        if (folder / file).is_file():
            config = _read_json(folder / file)
            if any(heads_in_config(config)):
                return config
    return {}


def _module_config(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    towers: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(count := getattr(part, "num_heads", None), int):
            towers["vision_config" if name.startswith("visual.") else "text_config"] = {"num_heads": count}
    return towers["text_config"] if set(towers) == {"text_config"} else towers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CorruptInput(f"{path} is not a JSON object. Restore it, or pass heads= and leave it out.")
    return config
