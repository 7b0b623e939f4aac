"""The same through Python: votes by every engine, transports from folder to folder and in memory, merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import gradfix
from tests.golden.command import do
from tests.golden.folders import folder_figures, tensors_sha
from tests.golden.worlds import build, ids_of, rows

ENGINES = ("loop", "batched", "auto")
STREAMED: dict[str, dict[str, Any]] = {
    "agree": {"mask": "agree", "alpha": 0.5},
    "veto": {"mask": "veto", "margin": 0.5, "alpha": 0.5},
    "none": {"mask": "none"},
    "random": {"mask": "random", "seed": 5, "alpha": 2.0},
    "fp16 out": {"mask": "force", "alpha": 0.25, "dtype": "fp16"},
}
IN_MEMORY: dict[str, dict[str, Any]] = {
    "agree": {},
    "veto": {"margin": 0.25},
    "force": {},
    "none": {},
    "random": {"generator": 5},
    "random_force": {"generator": 6},
}


def sure(votes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without key biases: softmax does not see them, so their gradient is rounding and nothing else."""
    return {name: tensor for name, tensor in votes.items() if not name.endswith("key.bias")}


def drawn_votes(target: Path, count: int = 8) -> gradfix.SignVotes:
    """An even count: there are ties, and votes that lie exactly on a veto's margin."""
    draw = np.random.default_rng(33)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(target / "model.safetensors").items()}
    signs = {name: draw.integers(0, 2, (count, *shape)) * 2 - 1 for name, shape in shapes.items()}
    return gradfix.SignVotes(
        {name: torch.from_numpy(np.asarray(some.sum(0), dtype=np.int8)) for name, some in signs.items()}, count
    )


def open_double(folder: Path) -> nn.Module:
    model = build().double()
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()}, strict=False)
    return model.eval()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def votes(home: Path, place: Path) -> dict[str, Any]:
    """Integer votes of `collect_votes` and of the files of `gradfix vote`."""
    ids, labels = ids_of(rows(15, 5))
    batches = [{"input_ids": ids[i : i + 6], "labels": labels[i : i + 6]} for i in range(0, 15, 6)]
    found: dict[str, Any] = {}
    for engine in ENGINES:
        model = open_double(home / "target")
        cast = gradfix.collect_votes(model, loss, batches, engine=engine)
        found[f"library, {engine}"] = {"votes": tensors_sha(sure(dict(cast))), "count": cast.count}
    mean = gradfix.collect_votes(open_double(home / "target"), loss, batches, vote="mean")
    found["library, mean"] = {"votes": tensors_sha(sure(dict(mean))), "count": mean.count}
    gradient = gradfix.collect_gradient(open_double(home / "target"), loss, batches)
    found["gradient"] = {"norm": sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5}
    for engine in ENGINES:
        for task, target in (("classification", "target"), ("zero-shot", "bare-target")):
            out = place / f"{engine}-{task}.safetensors"
            do("vote", "--target", home / target, "--data", home / "data", "--task", task, "--shots", 4,
               "--seed", 2, "--dtype", "fp64", "--engine", engine, "--out", out)  # fmt: skip
            with safe_open(out, "pt") as file:
                metadata = file.metadata()
            kept = {key: metadata[key] for key in ("format", "count", "rule")}
            found[f"command, {engine}, {task}"] = {"votes": tensors_sha(sure(load_file(out))), **kept}
    return found


def streamed(home: Path, place: Path) -> dict[str, Any]:
    """`gradfix.transport_checkpoint` with drawn votes: elementwise work only."""
    given = drawn_votes(home / "target")
    found = {}
    for name, options in STREAMED.items():
        use = None if options["mask"] in ("none", "random") else given
        report = gradfix.transport_checkpoint(
            base=home / "base", tuned=home / "tuned", target=home / "sharded", out=place / name, votes=use, **options
        )  # fmt: skip
        shown = {"transported": report.transported, "copied": report.copied, "kept": report.kept}
        found[name] = {**folder_figures(place / name), "report": shown}
    return found


def in_memory(home: Path, place: Path) -> dict[str, Any]:
    """`gradfix.transport` and `gradfix.merge` on task vectors."""
    tau = gradfix.TaskVector.between(home / "base", home / "tuned")
    other = gradfix.TaskVector.between(home / "older", home / "older-tuned")
    given = drawn_votes(home / "target")
    found: dict[str, Any] = {"task vector": tensors_sha(dict(tau))}
    for mask, options in IN_MEMORY.items():
        moved = gradfix.transport(tau, given, mask, **options)
        found[mask] = {"update": tensors_sha(dict(moved.update)), "config": moved.config}
    for method in ("task_arithmetic", "mean", "ties"):
        found[f"merge, {method}"] = tensors_sha(dict(gradfix.merge([tau, other], method)))
    return found
