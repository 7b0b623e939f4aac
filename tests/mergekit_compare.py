"""Merge the same tiny checkpoints with mergekit and with gradfix, and print how far apart they are.

    GRADFIX_SOURCE=src python tests/mergekit_compare.py WORK_FOLDER

Run by an interpreter that has mergekit; gradfix is taken from GRADFIX_SOURCE. DARE is compared under the
same random mask: mergekit's coin is replaced by gradfix's for the tensor it is asked about."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["GRADFIX_SOURCE"])

import mergekit.sparsify
import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gradfix.merging.bundles import PiecePlace
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.merging.recipes import from_mergekit
from gradfix.merging.rules import _uniform
from gradfix.vectors.taskvector import TaskVector

SEED = 7
COUNT = 3
WEIGHTS = (1.0, 0.5, 0.8)


def make_models(home: Path, dtype: torch.dtype) -> tuple[Path, list[Path]]:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(home / "base")
    base = load_file(home / "base" / "model.safetensors")
    tuned = []
    for seed in range(COUNT):
        generator = torch.Generator().manual_seed(seed + 1)
        folder = home / f"tuned{seed}"
        folder.mkdir()
        (folder / "config.json").write_bytes((home / "base" / "config.json").read_bytes())
        moved = {
            n: (t.float() + 0.01 * torch.randn(t.shape, generator=generator)).to(dtype)
            for n, t in base.items()
        }
        save_file(moved, folder / "model.safetensors", {"format": "pt"})
        tuned.append(folder)
    return home / "base", tuned


class SameCoins:
    """Stands in for mergekit's Bernoulli draw: recognises the delta and flips gradfix's coins for it."""

    def __init__(self, base: Path, tuned: list[Path]) -> None:
        self.places: dict[bytes, tuple[int, str]] = {}
        for vector, folder in enumerate(tuned):
            for name, delta in TaskVector.between(base, folder).items():
                self.places[delta.numpy().tobytes()] = (vector, name)

    def __call__(self, tensor: torch.Tensor, density: float, rescale_norm: Any = None) -> torch.Tensor:
        vector, name = self.places[tensor.contiguous().numpy().tobytes()]
        draw = _uniform(PiecePlace(name, tuple(tensor.shape), 0), vector, tensor.reshape(-1), SEED)
        mask = (draw < density).to(tensor.dtype).view_as(tensor)
        return mergekit.sparsify.rescaled_masked_tensor(tensor, mask, rescale_norm)


def recipe(method: str, base: Path, tuned: list[Path], dtype: str, **parameters: Any) -> dict[str, Any]:
    models = [
        {"model": str(folder), "parameters": {"weight": weight, "density": 0.4}}
        for folder, weight in zip(tuned, WEIGHTS, strict=True)
    ]
    if method == "task_arithmetic":
        for model in models:
            del model["parameters"]["density"]
    found = {"merge_method": method, "base_model": str(base), "models": models, "dtype": dtype}
    return {**found, "parameters": parameters} if parameters else found


def compare(home: Path, name: str, content: dict[str, Any], **changed: Any) -> dict[str, float]:
    path = home / f"{name}.yml"
    path.write_text(yaml.safe_dump(content))
    theirs = home / f"{name}-mergekit"
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(content), str(theirs), options)
    plan = from_mergekit(path).complete(target=content["base_model"])
    settings = {**plan.options, **changed}
    vectors = [Vector(v.base, v.tuned, weight=v.weight) for v in plan.vectors]
    merge_checkpoints(
        target=plan.target, vectors=vectors, out=home / f"{name}-gradfix", method=plan.method, alpha=plan.alpha,
        density=plan.densities(), seed=SEED, force=True, dtype=plan.dtype, **settings,
    )  # fmt: skip
    return distance(theirs, home / f"{name}-gradfix", Path(content["base_model"]))


def distance(theirs: Path, ours: Path, base: Path) -> dict[str, float]:
    left, right, start = (
        {n: t.double() for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
        for folder in (theirs, ours, base)
    )
    assert set(left) == set(right), set(left) ^ set(right)
    apart = torch.cat([(left[n] - right[n]).flatten() for n in left])
    moved = torch.cat([(left[n] - start[n]).flatten() for n in left])
    return {
        "entries_equal": float((apart == 0).double().mean()),
        "relative_difference": float(apart.norm() / moved.norm()),
        "largest_difference": float(apart.abs().max()),
    }


SHARED = {  # label -> method, mergekit's parameters, our option that departs from the import
    "task_arithmetic": ("task_arithmetic", {}, {}),
    "task_arithmetic normalized": ("task_arithmetic", {"normalize": True}, {}),
    "ties": ("ties", {}, {}),
    "ties lambda": ("ties", {"lambda": 0.7, "normalize": False}, {}),
}
FLOAT32_ONLY = {
    "dare_linear": ("dare_linear", {"rescale": False}, {}),
    "dare_ties": ("dare_ties", {"rescale": False}, {}),
    "dare_linear rescaled": ("dare_linear", {"rescale": True}, {}),
    "ties global trim": ("ties", {}, {"per_tensor": False}),
}


def main(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, cases in (("float32", SHARED | FLOAT32_ONLY), ("bfloat16", SHARED)):
        work = home / word
        base, tuned = make_models(work, getattr(torch, word))
        if word == "float32":
            mergekit.sparsify.bernoulli = SameCoins(base, tuned)
        for label, (method, parameters, changed) in cases.items():
            content = recipe(method, base, tuned, word, **parameters)
            found[f"{label} ({word})"] = compare(work, label.replace(" ", "_"), content, **changed)
    versions = {name: version(name) for name in ("mergekit", "torch", "transformers", "safetensors")}
    return {"results": found, "versions": versions}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1])), indent=1))
