"""Merge fine-tunes from folder to folder, each against its own base, onto one target.

The merged update is never stored: `write_stream` computes it piece by piece, masks it where asked to, and
writes the output as it does for a single fine-tune. Statistics a method needs (TIES's exact threshold, say)
are counted in walks of their own, so memory stays flat whatever the size."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.matched import match_prefix
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Fate, Fates, TensorFate, Trio
from gradfix.checkpoints.weights import Checkpoint, Source
from gradfix.checkpoints.write import refuse_inside
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging.bundles import Density
from gradfix.merging.differences import Combined, Differences, OpenVector, Votes
from gradfix.merging.memory import mask_seed, method_options
from gradfix.merging.rules import MERGES
from gradfix.registry import unknown
from gradfix.stream.ballot import Ballot, OpenVotes, consensus_of, open_votes
from gradfix.stream.checkpoint import Output, Stream, StreamReport, write_stream
from gradfix.system.processor import one_thread
from gradfix.vectors.masks import USUAL_MASK
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import transport

HEADS = {Fate.DROPPED_HEAD, Fate.HEAD_COPIED, Fate.HEAD_SKIPPED}
ORDERS = ("plain", "mask_then_merge", "merge_then_mask")


@dataclass(frozen=True)
class Vector:
    """One fine-tune to merge: its own base, its task's votes on the target, its weight."""

    base: Source | Checkpoint
    tuned: Source | Checkpoint
    votes: Votes | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class _How:
    """The method and where the votes come in; `options` are the method's own."""

    method: str
    order: str
    mask: str
    density: Density | None = None
    margin: float | None = None
    seed: int | None = None
    head: str = "error"
    leave: Collection[str] = ()
    notes: Sequence[str] = ()
    counting: Callable[[int], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def sorted_out(
        cls, method: str, order: str, mask: str, density: Density | None, options: Mapping[str, Any]
    ) -> _How:
        """Some options are the merge's, the rest the method's, who knows their names."""
        own = {
            name: options[name] for name in ("margin", "seed", "head", "leave", "notes", "counting") if name in options
        }
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(method, order, mask, density, **own, options=rest)


@one_thread()
def merge_checkpoints(
    *,
    target: Source | Checkpoint,
    vectors: Sequence[Vector],
    out: str | os.PathLike[str],
    method: str = "ties",
    order: str = "plain",
    mask: str = USUAL_MASK,
    alpha: float = 1.0,
    density: Density | None = None,
    **options: Any,
) -> StreamReport:
    """Write `target + alpha * merge(tuned_t - base_t)`: one model out of several fine-tunes.

    `order` says where the votes come in: "plain" (nowhere), "mask_then_merge" (each vector by its own) or
    "merge_then_mask" (the merged one by the tasks' consensus). Sources that share one task share its votes:
    give every vector the same. Further options: `margin`, `seed`, `head` ("error", "copy" or "skip"), `leave` and `notes` for
    the manifest; `dtype`,
    `overwrite`, `force`, `details`, `extras` and `progress` of the output, as in `transport_checkpoint`; `counting`
    hears the bytes read for the method's statistics before anything is written; all others are the method's own.
    Equals `gradfix.merging.memory` bit for bit. An interrupted merge goes on after its last whole tensor."""
    known = {each.name for each in fields(Output)}
    output = Output(out, **{name: value for name, value in options.items() if name in known})
    rest = {name: value for name, value in options.items() if name not in known}
    how = _How.sorted_out(method, order, mask, density, rest)
    job = _MergeJob(target, vectors, how, still=alpha == 0)
    read = [*(checkpoint.path for checkpoint in job.inputs.values()), *(vector.votes for vector in vectors)]
    refuse_inside(Path(out), read)
    weights = [vector.weight for vector in vectors]
    stream = Stream(
        job.target, job.fates, job.update, job.final_ballot(), float(alpha), job.hashes, job.inputs,
        heads=job.heads, notes=job.notes, kind="merge",
        details={"merge": {"method": method, "order": order, "weights": weights, **job.options}},
    )  # fmt: skip
    return write_stream(stream, output)


@one_thread()
def merged_update(
    *,
    target: Source | Checkpoint,
    vectors: Sequence[Vector],
    method: str = "ties",
    order: str = "plain",
    mask: str = USUAL_MASK,
    density: Density | None = None,
    **options: Any,
) -> TaskVector:
    """The update `merge_checkpoints` would add at alpha 1, in memory: one vector's worth, however many go in."""
    how = _How.sorted_out(method, order, mask, density, options)
    job = _MergeJob(target, vectors, how)
    update = TaskVector({name: job.update.read(name) for name in job.bundle.shapes})
    if order != "merge_then_mask":
        return update
    opened = job.consensus()
    votes = None if opened is None else SignVotes(opened.source.state(), opened.about.count)
    return transport(update, votes, mask, margin=how.margin, generator=how.seed).update


class _MergeJob:
    """The opened and checked inputs of one merge: every checkpoint once, however often it is named.

    The method's statistics are taken; none are needed to stay `still`."""

    def __init__(self, target: Source | Checkpoint, vectors: Sequence[Vector], how: _How, still: bool = False) -> None:
        _check_order(how.order, vectors)
        chosen, self.how = MERGES[how.method], how
        opened: dict[Any, Checkpoint] = {}
        self.target = _open_once(target, opened)
        self.vectors = [OpenVector(self._trio(vector, opened), vector.votes) for vector in vectors]
        self.inputs = {"target": self.target}
        for number, vector in enumerate(self.vectors, 1):
            self.inputs |= {f"base {number}": vector.base, f"tuned {number}": vector.tuned}
        self._check_names()
        self.heads = self._heads()
        self.fates = self._common_fates()
        self.hashes = InputHashes(list(self.inputs.values()))
        names = [name for name in self.fates.moved if name not in self.fates.tied]
        self.bundle = Differences(self.vectors, names, how.counting)
        if how.order == "mask_then_merge":
            for number, vector in enumerate(self.vectors):
                own = None if how.seed is None else mask_seed(how.seed, number)
                vector.ballot = Ballot(vector.votes, how.mask, how.margin, own, self.fates, self.target)
        weights = None if all(vector.weight == 1 for vector in vectors) else [v.weight for v in vectors]
        seed = how.seed if "seed" in chosen.options else None
        self.options = method_options(how.method, how.density, seed, dict(how.options))
        rule = (lambda place, pieces: pieces[0]) if still else chosen.prepare(self.bundle, weights, self.options)
        settings = [how.method, how.order, weights, self.options]
        self.update = Combined(self.bundle, chosen, rule, self.hashes, settings)

    def _trio(self, vector: Vector, opened: dict[Any, Checkpoint]) -> Trio:
        base = _open_once(vector.base, opened)
        tuned = _open_once(vector.tuned, opened, base)
        base, tuned = (_prefixed_once(side, opened, self.target) for side in (base, tuned))
        return Trio.open(base, tuned, self.target, head=self.how.head, leave=self.how.leave)

    @property
    def trios(self) -> list[Trio]:
        return [vector.trio for vector in self.vectors]

    @property
    def notes(self) -> tuple[str, ...]:
        others = [checkpoint for checkpoint in self.inputs.values() if checkpoint is not self.target]
        notes = dict.fromkeys(note for checkpoint in others for note in checkpoint.notes)
        return tuple(dict.fromkeys([*self.how.notes, *self.bundle.notes, *notes, *self.target.notes]))

    def _check_names(self) -> None:
        """What one vector moves the others move as well, or have as a head of their own or dropped with their base's."""
        first = self.trios[0]
        for number, trio in enumerate(self.trios, 1):
            odd = [
                name
                for name in sorted(set(first.moved) ^ set(trio.moved))
                if not HEADS & {first.fates[name].fate, trio.fates[name].fate}
            ]
            if odd:
                raise IncompatibleCheckpoints(
                    f"vectors 1 and {number} differ in {len(odd)} tensor names, first {odd[0]!r}: "
                    f"{first.base} and {trio.base} are not the same architecture."
                )

    def _common_fates(self) -> Fates:
        """What every vector moves; the rest of the target is copied, and heads are taken from whoever has them."""
        everywhere = set.intersection(*(set(trio.moved) for trio in self.trios))
        moved = [name for name in self.target.names() if name in everywhere]
        heads = {name: trio.fates[name] for trio in self.trios for name in trio.heads}
        fates = Fates()
        for name in self.target.names():
            if name not in everywhere:
                why = [trio.fates[name] for trio in self.trios if trio.fates[name].kind != "transported"]
                dropped = next((fate for fate in why if fate.fate is Fate.DROPPED_HEAD), why[-1])
                fates[name] = heads.get(name, dropped)
        ties = self._common_ties(moved)
        for name in moved:
            fates[name] = TensorFate(Fate.TIED if name in ties else Fate.TRANSPORTED, ties.get(name))
        return Fates(fates | heads)

    def _common_ties(self, moved: list[str]) -> dict[str, str]:
        """Copies that every vector leaves tied, by a name under which all of them store the tensor."""
        stored = set.intersection(*(set(c.names()) for trio in self.trios for c in (trio.base, trio.tuned)))
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in moved:
            groups.setdefault(tuple(trio.tied.get(name, name) for trio in self.trios), []).append(name)
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

    def _heads(self) -> dict[str, Checkpoint]:
        """Tensors only the fine-tunes have, with the fine-tune each comes from."""
        owners: dict[str, Checkpoint] = {}
        for trio in self.trios:
            for name in trio.heads:
                if self.how.head == "copy" and name in owners:
                    raise UsageError(
                        f"{owners[name]} and {trio.tuned} both bring a head {name!r}; one model takes one. "
                        "Choose head skip, or leave the head out of all but one."
                    )
                owners.setdefault(name, trio.tuned)
        return owners

    def final_ballot(self) -> Ballot:
        """What masks the merged update: the tasks' consensus, or nothing."""
        how = self.how
        if how.order != "merge_then_mask":
            return Ballot(None, "none", None, how.seed, self.fates, self.target)
        return Ballot(self.consensus(), how.mask, how.margin, how.seed, self.fates, self.target)

    def consensus(self) -> OpenVotes | None:
        """The tasks' votes as one; a votes object shared by several vectors is one task's."""
        given = [vector.votes for vector in self.vectors if vector.votes is not None]
        distinct = {_identity(votes): votes for votes in given}
        if not distinct:
            return None
        tasks = [open_votes(votes, self.target) for votes in distinct.values()]
        return tasks[0] if len(tasks) == 1 else consensus_of(tasks, self.target)


def _check_order(order: str, vectors: Sequence[Vector]) -> None:
    if order not in ORDERS:
        raise UsageError(unknown("order", order, list(ORDERS)))
    if not vectors:
        raise UsageError("there is nothing to merge: give at least one vector.")
    if order == "plain" and any(vector.votes is not None for vector in vectors):
        raise UsageError("order 'plain' uses no votes; choose mask_then_merge or merge_then_mask, or drop them.")


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
    """A file that several vectors share is one view, so that it is read once."""
    key = ("prefixed", id(checkpoint))
    if key not in opened:
        opened[key] = match_prefix(checkpoint, target)
    return opened[key]


def _identity(votes: Votes) -> object:
    return os.path.realpath(votes) if isinstance(votes, str | os.PathLike) else id(votes)
