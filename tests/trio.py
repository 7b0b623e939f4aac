"""Three small checkpoints and their votes, for tests of the move from folder to folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gradfix.vectors.signvotes import SignVotes

SHAPES = {"layers.0.weight": (300, 70), "layers.0.bias": (300,), "norm.weight": (300,), "empty": (0, 4), "scalar": ()}


def draw_state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}


def save_folder(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")
    names = list(state)
    if shards == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def draw_votes(seed: int, count: int = 5) -> SignVotes:
    g = torch.Generator().manual_seed(seed)
    return SignVotes(
        {n: (torch.randint(0, 2, (count, *s), generator=g) * 2 - 1).sum(0).to(torch.int8) for n, s in SHAPES.items()},
        count,
    )


def make_trio(home: Path) -> dict[str, Path]:
    """A base in one file, its fine-tune in two, and an unrelated target in three."""
    base = draw_state(0)
    tuned = {
        name: value + 0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
        for name, value in base.items()
    }
    return {
        "base": save_folder(home / "base", base),
        "tuned": save_folder(home / "tuned", tuned, shards=2),
        "target": save_folder(home / "target", draw_state(1), shards=3),
    }


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out
