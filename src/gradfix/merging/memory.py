"""Merge task vectors in memory, and masks with merges: one update out of several fine-tunes.

Vectors may come from different bases: only their names and shapes must agree. The streaming twin for
checkpoints that do not fit is `gradfix.merging.folders`; both run the same rules and give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.identity import common_target
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging.bundles import Bundle, Density, PiecePlace
from gradfix.merging.rules import MERGES
from gradfix.system.processor import one_thread
from gradfix.vectors.signvotes import SignVotes, dtype_for
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import Direction, Transported, seed_of, transport

__all__ = ["MERGES", "consensus", "mask_then_merge", "merge", "merge_then_mask"]


@one_thread()
def merge(
    vectors: Sequence[TaskVector],
    method: str = "ties",
    weights: Sequence[float] | None = None,
    density: Density = 0.2,
    *,
    generator: torch.Generator | int | None = None,
    **options: Any,
) -> TaskVector:
    """One task vector from several.

    `density` is the share the trimming methods keep, one number or one per vector; the others
    (task_arithmetic, mean, slerp, model_stock) trim nothing. `generator` (or `seed=`) is needed by the methods
    that drop at random. Further options are the method's own: see `gradfix.MERGES` and docs/merging.md."""
    chosen = MERGES[method]
    bundle = _InMemory(vectors)
    rule = chosen.prepare(bundle, weights, method_options(method, density, generator, options))
    merged: dict[str, Tensor] = {}
    for name, shape in bundle.shapes.items():
        flat = [
            rule(PiecePlace(name, shape, index), pieces)
            for index, pieces in enumerate(bundle.pieces(name, chosen.piece_size(shape)))
        ]
        merged[name] = torch.cat(flat).view(shape) if flat else torch.zeros_like(vectors[0][name])
    return TaskVector(merged)


def method_options(
    method: str, density: Density | None, generator: torch.Generator | int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Options by the names the method knows; randomness becomes a seed."""
    known = MERGES[method].options
    given = dict(options)
    if "density" in known:
        given["density"] = density
    if generator is not None:
        given["seed"] = generator
    if "seed" in known:
        given["seed"] = seed_of(given.get("seed"), f"merge {method!r} needs")
    return given


class _InMemory(Bundle):
    def __init__(self, vectors: Sequence[TaskVector]) -> None:
        if not vectors:
            raise UsageError("there is nothing to merge: give at least one task vector.")
        self.vectors = list(vectors)
        self.count, self.notes = len(self.vectors), []
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.vectors[0].items()}
        wide = any(tensor.dtype is torch.float64 for vector in self.vectors for tensor in vector.values())
        self.dtype = torch.float64 if wide else torch.float32
        for number, vector in enumerate(self.vectors[1:], 2):
            self._check(vector, number)

    def _check(self, vector: TaskVector, number: int) -> None:
        odd = sorted(set(vector) ^ set(self.shapes))
        if odd:
            raise IncompatibleCheckpoints(
                f"vectors 1 and {number} differ in {len(odd)} tensor names, first {odd[0]!r}."
            )
        for name, shape in self.shapes.items():
            if tuple(vector[name].shape) != shape:
                raise IncompatibleCheckpoints(
                    f"tensor {name!r} is {list(shape)} in vector 1 and {list(vector[name].shape)} in {number}."
                )

    def pieces(self, name: str, size: int) -> Iterator[list[Tensor]]:
        device = self.vectors[0][name].device
        flat = [vector[name].to(device, self.dtype).reshape(-1) for vector in self.vectors]
        for first in range(0, flat[0].numel(), size):
            yield [tensor[first : first + size] for tensor in flat]


def consensus(votes: Sequence[SignVotes]) -> SignVotes:
    """Per weight the sign most tasks voted for: sum over tasks of sign(votes), `count` the number of tasks.

    A task that is undecided about a weight abstains there; a draw between tasks is 0."""
    if not votes:
        raise UsageError("a consensus needs the votes of at least one task.")
    first = votes[0]
    for other in votes[1:]:
        odd = sorted(set(first) ^ set(other))
        if odd:
            raise IncompatibleCheckpoints(f"the votes differ in {len(odd)} tensor names, first {odd[0]!r}.")
        for name in first:
            if first[name].shape != other[name].shape:
                raise IncompatibleCheckpoints(
                    f"votes for {name!r} are {list(first[name].shape)} in one task "
                    f"and {list(other[name].shape)} in another."
                )
    dtype = dtype_for(len(votes))
    tensors = {
        name: torch.stack([task[name].sign().to(first[name].device, dtype) for task in votes]).sum(0, dtype=dtype)
        for name in first
    }
    return SignVotes(
        tensors,
        len(votes),
        rule="consensus",
        target_hash=common_target(task.target_hash for task in votes),
        disk_names=next((task.disk_names for task in votes if task.disk_names), None),
        notes=tuple(dict.fromkeys(note for task in votes for note in task.notes)),
    )


def mask_then_merge(
    vectors: Sequence[TaskVector],
    votes: Direction | Sequence[Direction],
    method: str = "ties",
    weights: Sequence[float] | None = None,
    density: Density = 0.2,
    *,
    mask: str = "agree",
    margin: float | None = None,
    generator: torch.Generator | int | None = None,
    **options: Any,
) -> Transported:
    """Mask every vector with its own task's votes, then merge what is left.

    Give one SignVotes per vector (several tasks), or a single one that all share (several sources, one
    task: the target's votes are computed once). `kept` is the mean over the vectors."""
    directions = list(votes) if isinstance(votes, Sequence) else [votes] * len(vectors)
    if len(directions) != len(vectors):
        raise UsageError(f"{len(directions)} votes for {len(vectors)} vectors; give one each, or one for all.")
    seed = None if generator is None else seed_of(generator)
    moved = [
        transport(tau, direction, mask, margin=margin, generator=None if seed is None else mask_seed(seed, number))
        for number, (tau, direction) in enumerate(zip(vectors, directions, strict=True))
    ]
    used = seed if "seed" in MERGES[method].options else None
    update = merge([part.update for part in moved], method, weights, density, generator=used, **options)
    kept = {name: sum(part.kept[name] for part in moved) / len(moved) for name in update}
    return Transported(update, kept, _config("mask_then_merge", method, weights, density, **moved[0].config, **options))


def merge_then_mask(
    vectors: Sequence[TaskVector],
    votes: Direction | Sequence[SignVotes],
    method: str = "ties",
    weights: Sequence[float] | None = None,
    density: Density = 0.2,
    *,
    mask: str = "agree",
    margin: float | None = None,
    generator: torch.Generator | int | None = None,
    **options: Any,
) -> Transported:
    """Merge the vectors, then mask the one result with the consensus of the tasks' votes.

    A single SignVotes masks as it is; several are first reduced to their consensus."""
    direction = consensus(votes) if isinstance(votes, Sequence) else votes
    seed = None if generator is None else seed_of(generator)
    used = seed if "seed" in MERGES[method].options else None
    merged = merge(vectors, method, weights, density, generator=used, **options)
    moved = transport(merged, direction, mask, margin=margin, generator=seed)
    config = _config("merge_then_mask", method, weights, density, **moved.config, **options)
    return Transported(moved.update, moved.kept, config)


def mask_seed(seed: int, number: int) -> int:
    """Every vector meets coins of its own when the mask is random."""
    return seed + number


def _config(order: str, method: str, weights: Sequence[float] | None, density: Density, **rest: Any) -> dict[str, Any]:
    trims = {"density": density} if "density" in MERGES[method].options else {}
    return {"order": order, "method": method, "weights": weights, **trims, **rest}
