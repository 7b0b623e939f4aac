"""Keep the old index: a map from the new model's space into the old one's, learned on texts that both embed.

Queries of the new model, sent through the map, search the vectors that the old model wrote, while the index is rebuilt.
An orthogonal map and a linear one are tried; texts held out of both decide. It is written as a tensor and as the
Dense module that sentence-transformers puts behind a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradfix.align.pairing import polar
from gradfix.checkpoints.write import save_tensors, write_text
from gradfix.errors import DataError
from gradfix.system.modules import at_work
from gradfix.tasks.base import Example
from gradfix.tasks.embedding import EmbeddingBound, texts_of
from gradfix.tasks.retrieval import DEPTH, RECALL, refuse_equal, searches

FILE, FOLDER = "keep_index.safetensors", "keep_index"
MOST = 4096  # texts a map is learned from
FEWEST = 20
RIDGES = (0.003, 0.03, 0.3)
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class OldIndex:
    """`matrix @ vector` is the vector in the old space. `agreement` is the share of the old model's ten nearest texts
    that mapped queries find, on texts held out; `recall` has the searches of the test split, where there is one."""

    matrix: Tensor
    kind: str
    texts: int
    agreement: float
    recall: dict[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> float | None:
        """Recall in the old index as a share of the new model's in its own."""
        own = self.recall.get("own")
        return self.recall["old"] / own if own else None

    def note(self) -> str:
        said = f"--keep-index: {self.kind} map from {self.texts} texts into the old space"
        if self.kept is None:
            return f"{said}; on texts held out it finds {self.agreement:.0%} of the old model's ten nearest"
        found = f"{RECALL} {self.recall['old']:.1f}% in the old index, {self.recall['own']:.1f}% in its own"
        return f"{said}; it keeps {self.kept:.3f} of the recall ({found})"

    def as_json(self) -> dict[str, Any]:
        told = {"kind": self.kind, "texts": self.texts, "agreement": self.agreement, "kept": self.kept}
        return {**told, **{f"recall_{name}": value for name, value in self.recall.items()}}

    def save(self, folder: Path) -> None:
        """Beside a model: the map by itself, and as a module that sentence-transformers appends."""
        matrix = self.matrix.detach().float().cpu().contiguous()
        about = {"format": "gradfix.keep_index", **{k: json.dumps(v) for k, v in self.as_json().items()}}
        save_tensors(folder / FILE, {"map": matrix}, about)
        (folder / FOLDER).mkdir(exist_ok=True)
        save_tensors(folder / FOLDER / "model.safetensors", {"linear.weight": matrix}, {"format": "pt"})
        shape = {"in_features": matrix.shape[1], "out_features": matrix.shape[0]}
        config = {**shape, "bias": False, "activation_function": IDENTITY}
        write_text(folder / FOLDER / "config.json", json.dumps(config, indent=1))


def keep_index(
    new: EmbeddingBound, old: EmbeddingBound, examples: Sequence[Example], test: Sequence[Example] = (), seed: int = 0
) -> OldIndex:
    """Learn the map on the examples' texts, and measure on `test` what it keeps. Both models come back as they were."""
    texts = enough(examples)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()[:MOST]
    texts = [texts[place] for place in order]
    ours, theirs = (_embedded(side, texts) for side in (new, old))
    held = torch.arange(len(texts)) < max(len(texts) // 5, 4)
    fits = {kind: fit(ours[~held], theirs[~held]) for kind, fit in MAPS.items()}
    agreements = {kind: agreement(ours @ found.T, theirs, held) for kind, found in fits.items()}
    kind = max(agreements, key=lambda name: agreements[name])  # of equals the orthogonal one
    matrix = MAPS[kind](ours, theirs)
    return OldIndex(matrix, kind.split()[0], len(texts), agreements[kind], _recall(new, old, matrix, test))


def enough(examples: Sequence[Example]) -> list[tuple[str, str]]:
    """The different texts of the examples; too few of them are refused, better before the lessons than after."""
    refuse_equal([text for example in examples for _, text in texts_of(example)], "to learn a map from")
    texts = list(dict.fromkeys(text for example in examples for text in texts_of(example)))
    if len(texts) < FEWEST:
        raise DataError(f"--keep-index learns a map from texts, and there are {len(texts)}: give {FEWEST} or more.")
    return texts


def orthogonal(ours: Tensor, theirs: Tensor) -> Tensor:
    """Lengths and angles stay; between widths as many of them as fit."""
    return polar(theirs.T @ ours)


def linear(ours: Tensor, theirs: Tensor, ridge: float) -> Tensor:
    """Least squares, drawn towards the orthogonal map where texts say nothing."""
    near = orthogonal(ours, theirs)
    gram = ours.T @ ours
    gram = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return near + torch.linalg.solve(gram, ours.T @ (theirs - ours @ near.T)).T


MAPS: dict[str, Any] = {"orthogonal": orthogonal}
MAPS |= {f"linear {ridge}": lambda ours, theirs, ridge=ridge: linear(ours, theirs, ridge) for ridge in RIDGES}


def agreement(mapped: Tensor, theirs: Tensor, held: Tensor) -> float:
    """Of the ten texts nearest to a held-out text in the old space, the share that its mapped vector finds there."""
    depth = min(DEPTH, len(theirs) - 1)
    itself = held.nonzero().flatten()
    lists = []
    for vectors in (theirs, functional.normalize(mapped, dim=-1)):
        near = vectors[itself.to(vectors.device)] @ theirs.T
        near[torch.arange(len(itself)), itself] = -2.0
        lists.append(near.topk(depth).indices)
    same = (lists[0][:, :, None] == lists[1][:, None, :]).any(2)
    return float(same.double().mean())


def _embedded(side: EmbeddingBound, texts: Sequence[tuple[str, str]]) -> Tensor:
    with torch.no_grad(), at_work(side.model):
        return side.vectors(side.model, texts).double()


def _recall(new: EmbeddingBound, old: EmbeddingBound, matrix: Tensor, test: Sequence[Example]) -> dict[str, float]:
    if not test:
        return {}
    known = searches(test)
    if known.grades:
        return {}
    ours, theirs = (_embedded(side, known.texts) for side in (new, old))
    ways = {"own": (ours, None), "old": (ours @ matrix.T, theirs), "before": (theirs, None)}
    found = {}
    for name, (vectors, index) in ways.items():
        marks = new.marks(known, vectors, index)
        found[name] = 100 * marks.further[RECALL] / marks.count
    return found
