"""Merge fine-tunes from folder to folder, each against its own base, onto one target.

The merged update is a checkpoint that is never stored: `transport_checkpoint` reads it piece by piece,
masks it where asked to, and writes the output as it does for a single fine-tune. Statistics a method needs
(TIES's exact threshold, say) are counted in walks of their own, so memory stays flat whatever the size."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.input_hashes import InputHashes
from gradfix.checkpoints.open import Checkpoint, Part, Source, open_checkpoint
from gradfix.checkpoints.prefix import match_prefix
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from gradfix.checkpoints.trio import DROPPED_HEAD, Plan, plan_transport
from gradfix.checkpoints.vocabulary import match_vocabulary
from gradfix.checkpoints.write import refuse_inside
from gradfix.checkpoints.zeros import Zeros
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.merging.bundles import Density
from gradfix.merging.combined import Combined
from gradfix.merging.differences import Differences, Side, Votes
from gradfix.merging.memory import mask_seed, method_options
from gradfix.merging.rules import MERGES
from gradfix.registry import unknown
from gradfix.stream.ballot import Ballot, OpenVotes, consensus_of, open_votes
from gradfix.stream.checkpoint import LEAST_KEPT, StreamReport, transport_checkpoint
from gradfix.stream.updates import Piece
from gradfix.system.threads import ahead, one_thread
from gradfix.vectors.descent import MAX_NORM_RATIO, stranger
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import share, transport

MIXED_UP = "Check the base and tuned of this vector; force goes on all the same."
ORDERS = ("plain", "mask_then_merge", "merge_then_mask")


@dataclass(frozen=True)
class Vector:
    """One fine-tune to merge: its own base, its task's votes on the target, its weight."""

    base: Source | Checkpoint
    tuned: Source | Checkpoint
    votes: Votes | None = None
    weight: float = 1.0


@one_thread()
def merge_checkpoints(
    *,
    target: Source | Checkpoint,
    vectors: Sequence[Vector],
    out: str | os.PathLike[str],
    method: str = "ties",
    order: str = "plain",
    mask: str = "agree",
    alpha: float = 1.0,
    density: Density | None = None,
    margin: float | None = None,
    seed: int | None = None,
    head: str = "error",
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    force: bool = False,
    details: Mapping[str, Any] | None = None,
    extras: Callable[[Path], None] | None = None,
    progress: Callable[[int], None] | None = None,
    counting: Callable[[int], None] | None = None,
    **options: Any,
) -> StreamReport:
    """Write `target + alpha * merge(tuned_t - base_t)`: one model out of several fine-tunes.

    `order` says where the votes come in: "plain" (nowhere), "mask_then_merge" (each vector by its own) or
    "merge_then_mask" (the merged one by the tasks' consensus). Sources that share one task share its votes:
    give every vector the same. `options` are the method's own. Equals `gradfix.merging.memory` bit for bit.
    `progress` hears the bytes written, `counting` before that the bytes read for the method's statistics. An
    interrupted merge goes on after its last whole tensor."""
    plan = _plan(
        target, vectors, method, order, mask, density, margin, seed, head, options, counting, still=alpha == 0
    )
    job, merged = plan.job, plan.merged
    read = [*(checkpoint.path for checkpoint in job.inputs.values()), *(vector.votes for vector in vectors)]
    refuse_inside(Path(out), read)
    after = order == "merge_then_mask"
    about: dict[str, Any] = {
        **(details or {}),
        "merge": {"method": method, "order": order, "weights": [v.weight for v in vectors], **plan.options},
    }

    def judged(staging: Path) -> None:
        if alpha:
            about["vectors"] = job.judge(merged.update, force)
        if extras is not None:
            extras(staging)

    return transport_checkpoint(
        base=Zeros(Part(merged, list(job.bundle.shapes))),
        tuned=merged,
        target=job.target,
        out=out,
        votes=job.consensus() if after else None,
        mask=mask if after else "none",
        alpha=alpha,
        margin=margin if after else None,
        seed=seed,
        head=head,
        dtype=dtype,
        overwrite=overwrite,
        force=force,
        details=about,
        extras=judged,
        inputs=job.inputs,
        hashes=job.hashes,
        update=merged.update,
        plan=job.plan,
        kind="merge",
        progress=progress,
    )


@one_thread()
def merged_update(
    *,
    target: Source | Checkpoint,
    vectors: Sequence[Vector],
    method: str = "ties",
    order: str = "plain",
    mask: str = "agree",
    density: Density | None = None,
    margin: float | None = None,
    seed: int | None = None,
    head: str = "error",
    counting: Callable[[int], None] | None = None,
    **options: Any,
) -> TaskVector:
    """The update `merge_checkpoints` would add at alpha 1, in memory: one vector's worth, however many go in."""
    plan = _plan(target, vectors, method, order, mask, density, margin, seed, head, options, counting)
    update = TaskVector({name: plan.merged.read(name) for name in plan.job.bundle.shapes})
    if order != "merge_then_mask":
        return update
    opened = plan.job.consensus()
    votes = None if opened is None else SignVotes(opened.source.state(), opened.about.count)
    return transport(update, votes, mask, margin=margin, generator=seed).update


@dataclass(frozen=True)
class _Plan:
    job: _MergeJob
    merged: _Merged
    options: dict[str, Any]


def _plan(
    target: Source | Checkpoint,
    vectors: Sequence[Vector],
    method: str,
    order: str,
    mask: str,
    density: Density | None,
    margin: float | None,
    seed: int | None,
    head: str,
    options: dict[str, Any],
    counting: Callable[[int], None] | None,
    still: bool = False,
) -> _Plan:
    """Open and check everything and take the method's statistics (none are needed to stay `still`)."""
    _check_order(order, vectors)
    chosen = MERGES[method]
    job = _MergeJob(target, vectors, head, counting)
    if order == "mask_then_merge":
        job.mask_each(mask, margin, seed)
    weights = None if all(vector.weight == 1 for vector in vectors) else [v.weight for v in vectors]
    given = method_options(method, density, seed if "seed" in chosen.options else None, options)
    rule = (lambda place, pieces: pieces[0]) if still else chosen.prepare(job.bundle, weights, given)
    update = Combined(job.bundle, chosen, rule, job.hashes)
    settings = [method, order, weights, given]
    return _Plan(job, _Merged(job, update, settings), given)


def _check_order(order: str, vectors: Sequence[Vector]) -> None:
    if order not in ORDERS:
        raise UsageError(unknown("order", order, list(ORDERS)))
    if not vectors:
        raise UsageError("there is nothing to merge: give at least one vector.")
    if order == "plain" and any(vector.votes is not None for vector in vectors):
        raise UsageError(
            "order 'plain' uses no votes; choose mask_then_merge or merge_then_mask, or drop them."
        )


class _MergeJob:
    """The opened inputs of one merge: every checkpoint once, however often it is named."""

    def __init__(
        self,
        target: Source | Checkpoint,
        vectors: Sequence[Vector],
        head: str,
        counting: Callable[[int], None] | None,
    ) -> None:
        opened: dict[Any, Checkpoint] = {}
        self.target = _open_once(target, opened)
        self.sides: list[Side] = []
        for vector in vectors:
            base = _open_once(vector.base, opened)
            tuned = _open_once(vector.tuned, opened, base)
            base, tuned = (_prefixed_once(side, opened, self.target) for side in (base, tuned))
            base, tuned, rows = match_vocabulary(base, tuned, self.target)
            self.sides.append(Side(base, tuned, vector.votes, rows))
        self.inputs = {"target": self.target}
        for number, side in enumerate(self.sides, 1):
            self.inputs |= {f"base {number}": side.base, f"tuned {number}": side.tuned}
        self.plans = [plan_transport(side.base, side.tuned, self.target, head=head) for side in self.sides]
        self._check_names()
        self.heads = self._heads(head)
        self.plan = self._common_plan()
        self.hashes = InputHashes(list(self.inputs.values()))
        self.bundle = Differences(self.sides, self.plan, counting)

    def _check_names(self) -> None:
        """What one vector moves the others move as well, or had as a head of their base and dropped."""
        first = self.plans[0]
        for number, (side, plan) in enumerate(zip(self.sides, self.plans, strict=True), 1):
            odd = [
                name
                for name in sorted(set(first.transported) ^ set(plan.transported))
                if DROPPED_HEAD not in (first.copied.get(name), plan.copied.get(name))
            ]
            if odd:
                raise IncompatibleCheckpoints(
                    f"vectors 1 and {number} differ in {len(odd)} tensor names, first {odd[0]!r}: "
                    f"{self.sides[0].base} and {side.base} are not the same architecture."
                )

    def _common_plan(self) -> Plan:
        """What every vector moves; the rest of the target is copied, and heads are taken from whoever has them."""
        everywhere = set.intersection(*(set(plan.transported) for plan in self.plans))
        transported = [name for name in self.target.names() if name in everywhere]
        reasons = {name: why for plan in self.plans for name, why in plan.copied.items()}
        reasons |= {
            name: why for plan in self.plans for name, why in plan.copied.items() if why == DROPPED_HEAD
        }
        copied = {name: why for name, why in reasons.items() if name not in everywhere}
        extra = {name: what for plan in self.plans for name, what in plan.extra.items()}
        return Plan(transported, copied, extra, self._common_ties(transported))

    def _common_ties(self, transported: list[str]) -> dict[str, str]:
        """Copies that every vector leaves tied, by a name under which all of them store the tensor."""
        stored = set.intersection(*(set(c.names()) for side in self.sides for c in (side.base, side.tuned)))
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in transported:
            groups.setdefault(tuple(plan.tied.get(name, name) for plan in self.plans), []).append(name)
        ties: dict[str, str] = {}
        for names in groups.values():
            first = next((name for name in names if name in stored), None)
            if first is None:
                raise IncompatibleCheckpoints(
                    f"tensor {names[0]!r} is tied to another in some of the vectors and not in all. "
                    "Save all fine-tunes and bases tied, or all with both tensors."
                )
            ties |= {name: first for name in names if name != first}
        return ties

    def _heads(self, head: str) -> dict[str, Checkpoint]:
        """Tensors only the fine-tunes have, with the fine-tune each comes from."""
        owners: dict[str, Checkpoint] = {}
        for side, plan in zip(self.sides, self.plans, strict=True):
            for name in plan.extra:
                if head == "copy" and name in owners:
                    raise UsageError(
                        f"{owners[name]} and {side.tuned} both bring a head {name!r}; one model takes one. "
                        "Choose head skip, or leave the head out of all but one."
                    )
                owners.setdefault(name, side.tuned)
        return owners

    def mask_each(self, mask: str, margin: float | None, seed: int | None) -> None:
        for number, side in enumerate(self.sides):
            own = None if seed is None else mask_seed(seed, number)
            side.ballot = Ballot(side.votes, mask, margin, own, self.plan, self.target)

    def consensus(self) -> OpenVotes | None:
        """The tasks' votes as one; a votes object shared by several vectors is one task's."""
        distinct = {_identity(side.votes): side.votes for side in self.sides if side.votes is not None}
        if not distinct:
            return None
        tasks = [open_votes(votes, self.target) for votes in distinct.values()]
        return tasks[0] if len(tasks) == 1 else consensus_of(tasks, self.target)

    def judge(self, update: Combined, force: bool) -> list[dict[str, Any]]:
        """Refuse what is no fine-tune of its base or what a mask emptied; say what became of each vector."""
        facts = []
        for number, side in enumerate(self.sides):
            count = update.count(number)
            ratio = count.norm_ratio()
            if count.nonzero == 0:
                raise UnsafeResult(
                    f"{side.tuned} equals {side.base} in every weight: its task vector is zero."
                )
            if ratio > MAX_NORM_RATIO and not force:
                raise stranger(side.base, side.tuned, ratio, self.target, advice=MIXED_UP)
            if side.ballot is not None:
                side.ballot.require(self.target, self.hashes)
            if count.kept < LEAST_KEPT * count.nonzero and not force:
                raise UnsafeResult(
                    f"the mask keeps {count.kept / count.nonzero:.2%} of {side.tuned}: nothing to speak of is left. "
                    "More examples or the veto mask may help; force goes on all the same."
                )
            kept = share(count.kept, count.nonzero)
            facts.append({"tuned": str(side.tuned), "kept": kept, "norm_ratio": ratio, **side.vocabulary})
        return facts


def _open_once(
    source: Source | Checkpoint, opened: dict[Any, Checkpoint], base: Checkpoint | None = None
) -> Checkpoint:
    is_path = isinstance(source, str | os.PathLike)
    key: Any = os.path.realpath(source) if is_path else id(source)  # type: ignore[arg-type]
    if is_path and (Path(source) / "adapter_config.json").is_file():  # type: ignore[arg-type]
        key = (key, id(base))  # an adapter is another checkpoint on another base
    if key not in opened:
        opened[key] = open_checkpoint(source, base=base)
    return opened[key]


def _prefixed_once(checkpoint: Checkpoint, opened: dict[Any, Checkpoint], target: Checkpoint) -> Checkpoint:
    key = ("prefixed", id(checkpoint))
    if key not in opened:
        opened[key] = match_prefix(checkpoint, target)
    return opened[key]


def _identity(votes: Votes | None) -> object:
    return os.path.realpath(votes) if isinstance(votes, str | os.PathLike) else id(votes)


class _Merged(Checkpoint):
    """The merged update as a checkpoint: computed when a tensor is asked for. Heads are read where they are."""

    def __init__(self, job: _MergeJob, update: Combined, settings: list[Any]) -> None:
        self.job, self.update, self.settings = job, update, settings
        self.notes = tuple(
            dict.fromkeys(note for c in job.inputs.values() for note in c.notes if c is not job.target)
        )

    def names(self) -> list[str]:
        return [*self.job.bundle.shapes, *self.job.heads]

    def info(self, name: str) -> TensorInfo:
        if name in self.job.heads:
            return self.job.heads[name].info(name)
        return TensorInfo(self.job.bundle.shapes[name], self.job.bundle.dtype)

    def read(self, name: str) -> Tensor:
        if name in self.job.heads:
            return self.job.heads[name].read(name)
        info = self.info(name)
        pieces = ahead(self.job.bundle.pool, _computed, self.update.pieces(name))
        return torch.cat([torch.empty(0, dtype=info.dtype), *pieces]).view(info.shape)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return self.job.heads[name].stored(name) if name in self.job.heads else None

    def identity(self) -> Any:
        parts = [side.identity() for side in self.job.sides]
        return None if None in parts else [self.settings, parts]

    def __str__(self) -> str:
        return f"the merge of {len(self.job.sides)} vectors"


def _computed(piece: Piece) -> Tensor:
    return torch.cat(list(piece.blocks()))
