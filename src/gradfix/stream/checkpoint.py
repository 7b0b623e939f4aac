"""From folder to folder, in flat pieces: memory stays flat whatever the model's size.

Every input is read once, in the target's file order, and hashed on the way. The output has the target's
shards, names, dtypes, config and tokenizer files, and a manifest with the fate of every tensor. A transport, a merge
and an update that is there already are thin over the same `write_stream`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.folder import copy_side_files, layout_of, versions, write_index
from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.interrupted import journal_key
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.trio import BROUGHT, Fate, Fates, TensorFate, Trio
from gradfix.checkpoints.weights import Checkpoint, Source
from gradfix.checkpoints.write import refuse_inside, staged_folder, torch_dtype, write_manifest
from gradfix.errors import UnsafeResult, UsageError
from gradfix.registry import unknown
from gradfix.stream.ballot import Ballot, OpenVotes
from gradfix.stream.card import card, library_of
from gradfix.stream.pipeline import Content, Pipeline
from gradfix.stream.updates import Counts, Difference, Mover, Ready, TiedUpdate, Update, total
from gradfix.vectors.masks import USUAL_MASK
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.transported import add_scaled, share

LEAST_KEPT = 0.01


@dataclass(frozen=True)
class Output:
    """Where a result goes and in which form; `details` go into the manifest, `extras(staging)` may add files.

    `force` writes what looks wrong all the same; `progress` hears the bytes written."""

    out: str | os.PathLike[str]
    dtype: str | torch.dtype | None = None
    overwrite: bool = False
    force: bool = False
    details: Mapping[str, Any] | None = None
    extras: Callable[[Path], None] | None = None
    progress: Callable[[int], None] | None = None

    @classmethod
    def sorted_out(
        cls, out: str | os.PathLike[str], options: dict[str, Any], own: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Output]:
        """The options that are the caller's `own` (with their defaults), and all others as an output."""
        known = [each.name for each in fields(cls) if each.name != "out"]
        for name in options:
            if name not in own and name not in known:
                raise UsageError(unknown("option", name, [*own, *known]))
        mine = {name: options.get(name, default) for name, default in own.items()}
        return mine, cls(out, **{name: value for name, value in options.items() if name in known})


@dataclass(frozen=True)
class Stream:
    """What is written: the target, what is added to it, and who brings the heads that are copied."""

    target: Checkpoint
    fates: Fates
    update: Update
    ballot: Ballot
    alpha: float
    hashes: InputHashes
    inputs: Mapping[str, Checkpoint]  # by role, for the manifest
    heads: Mapping[str, Checkpoint] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)  # how an update that is there already came about
    kind: str = "transport"

    def source(self, name: str) -> Checkpoint:
        """A head that is brought along comes from who brings it, everything else from the target."""
        return self.heads[name] if self.fates[name].fate in BROUGHT else self.target

    def identity(self) -> list[Any]:
        heads = [(name, self.fates[name].kind) for name in self.fates.heads]
        left = [name for name, fate in self.fates.items() if fate.fate is Fate.NOT_ASKED]
        return [self.update.identity(), self.target.identity(), self.ballot.identity(), self.alpha, heads, left]


@dataclass(frozen=True)
class StreamReport:
    """The numbers behind an output folder."""

    out: Path
    transported: int
    copied: int
    skipped: int
    kept: float
    survived: float
    norm_ratio: float
    seconds: float = 0.0
    tensors: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def transport_checkpoint(
    *,
    base: Source | Checkpoint,
    tuned: Source | Checkpoint,
    target: Source | Checkpoint,
    out: str | os.PathLike[str],
    votes: SignVotes | OpenVotes | str | os.PathLike[str] | None = None,
    mask: str = USUAL_MASK,
    alpha: float = 1.0,
    **options: Any,
) -> StreamReport:
    """Write `target + alpha * mask(tuned - base)` as a folder the ecosystem's own loader reads.

    `votes` is a votes file (on-disk names) or SignVotes; masks that look at no votes need none. Further options:
    `margin` and `seed` of the mask; `head` ("error", "copy" or "skip") for tensors that only the fine-tune has, `strict`
    to refuse every tensor that not all three share, `leave` with names that are no part of the task; `dtype`, `overwrite`, `force`, `details` and `inputs` by
    role (for the manifest), `extras(staging)` (may add files) and `progress(bytes)` of the output."""
    defaults = {"margin": None, "seed": None, "head": "error", "strict": False, "inputs": None, "leave": ()}
    own, output = Output.sorted_out(out, options, defaults)
    before, goal = open_checkpoint(base), open_checkpoint(target)
    after = open_checkpoint(tuned, base=before)
    refuse_inside(Path(out), [before.path, after.path, goal.path, votes])
    trio = Trio.open(before, after, goal, head=own["head"], strict=own["strict"], leave=own["leave"])
    roles = {"base": trio.base, "tuned": trio.tuned, "target": trio.target}
    hashes = InputHashes(list(roles.values()))
    stream = Stream(
        trio.target, trio.fates, Difference(trio.base, trio.tuned, hashes),
        Ballot(votes, mask, own["margin"], own["seed"], trio.fates, trio.target), float(alpha), hashes,
        own["inputs"] or roles, heads=dict.fromkeys(trio.heads, trio.tuned), notes=trio.notes, details=trio.vocabulary,
    )  # fmt: skip
    return write_stream(stream, output)


def write_update(
    update: Mapping[str, Tensor],
    *,
    target: Source | Checkpoint,
    out: str | os.PathLike[str],
    alpha: float = 1.0,
    inputs: Mapping[str, Checkpoint] | None = None,
    head: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> StreamReport:
    """Write `target + alpha * update` for an update under on-disk names; `inputs` are named in the manifest.

    `head` holds tensors that the target lacks: they are written with what the update changes in them. Further options
    are `new_head` (they are not the fine-tune's), `made`, how the update came about (`mask`, `seed`, `kept` ...), `leave`, and those of the output, as in
    `transport_checkpoint`."""
    own, output = Output.sorted_out(out, options, {"leave": (), "made": {}, "new_head": False})
    goal = open_checkpoint(target)
    refuse_inside(Path(out), [goal.path])
    lent = dict(head or {})
    moved = {name: delta for name, delta in update.items() if name not in lent}
    for name in lent.keys() & update.keys():
        lent[name] = lent[name].clone()
        add_scaled(lent[name], update[name], alpha)
    policy = ("new" if own["new_head"] else "copy") if lent else "error"
    trio = Trio.open(moved, {**moved, **lent}, goal, head=policy, leave=own["leave"])  # by names and shapes
    stream = Stream(
        goal, trio.fates, Ready(trio.tuned), Ballot(None, "none", None, None, trio.fates, goal), float(alpha),
        InputHashes([goal]), dict(inputs or {"target": goal}), heads=dict.fromkeys(trio.heads, trio.tuned),
        notes=goal.notes, made=own["made"],
    )  # fmt: skip
    return write_stream(stream, output)


def write_stream(stream: Stream, output: Output) -> StreamReport:
    """Write everything, complete or not at all; an interrupted run goes on after its last whole tensor."""
    return _Pass(stream, output).run()


class _Pass:
    """One pass over all tensors."""

    def __init__(self, stream: Stream, output: Output) -> None:
        self.stream, self.output = stream, output
        self.dtype = torch_dtype(output.dtype) if isinstance(output.dtype, str) else output.dtype
        mover = Mover(stream.ballot, stream.alpha)
        self.pipeline = Pipeline(TiedUpdate(stream.update, stream.fates.tied), mover, stream.hashes)
        self.moved = set(stream.fates.moved)

    def run(self) -> StreamReport:
        stream, output = self.stream, self.output
        size = sum(self._as_written(stream.target.info(name)).nbytes for name in stream.target.names())
        key = journal_key(*stream.identity(), str(self.dtype))
        with staged_folder(Path(output.out), overwrite=output.overwrite, need_bytes=size + 2**20, key=key) as staging:
            layout = layout_of(stream.target, self._added(), self._info)
            contents = {file: {name: self._content(name) for name in layout[file]} for file in layout}
            written = self.pipeline.write(staging, contents, output.progress)
            write_index(staging, layout, size)
            copy_side_files(stream.target, staging)
            counts = self.pipeline.counts
            whole = total(part for name, part in counts.items() if stream.fates[name].fate is not Fate.TIED)
            judged = stream.update.judge(whole, stream.target, output.force) if stream.alpha else {}
            if output.extras is not None:
                output.extras(staging)
            report = self._report(whole)
            details = {**(output.details or {}), **stream.details, **judged}
            content = {"format": 1, "kind": stream.kind, **self._manifest(report, details)}
            (staging / "README.md").write_text(card(content, library=library_of(staging)), encoding="utf-8")
            write_manifest(staging, content, written)
        return report

    def _added(self) -> list[str]:
        """Heads that the target has no place for."""
        fates = self.stream.fates
        brought = [name for name in fates.heads if fates[name].fate in BROUGHT]
        return [name for name in brought if name not in self.stream.target]

    def _as_written(self, info: TensorInfo) -> TensorInfo:
        if self.dtype is not None and info.dtype.is_floating_point:
            return TensorInfo(info.shape, self.dtype)
        return info

    def _info(self, name: str) -> TensorInfo:
        return self._as_written(self.stream.source(name).info(name))

    def _content(self, name: str) -> Content:
        wanted = name in self.moved and self.stream.alpha != 0
        voted = self.stream.ballot.has(name)
        return Content(self._info(name), self.stream.source(name), wanted and voted, wanted and not voted)

    def _report(self, whole: Counts) -> StreamReport:
        abstained = self.pipeline.abstained
        notes = [*self._judge(whole), *self.stream.notes]
        if abstained:
            notes.append(f"{len(abstained)} tensors have no votes (frozen or unused) and were left as they are")
        tensors = self._tensors()
        kinds = Counter(entry["fate"] for entry in tensors.values())
        return StreamReport(
            Path(self.output.out), kinds["transported"], kinds["copied"], kinds["skipped"],
            self.stream.made.get("kept", whole.kept_share()), share(whole.survived, whole.kept), whole.norm_ratio(),
            tensors=tensors, notes=tuple(notes),
        )  # fmt: skip

    def _tensors(self) -> dict[str, dict[str, Any]]:
        """What became of every tensor, for the manifest."""
        counts, fates = self.pipeline.counts, Fates(self.stream.fates)
        for name in self.moved - counts.keys():
            abstained = name in self.pipeline.abstained
            fates[name] = TensorFate(Fate.NO_VOTES if abstained else Fate.ALPHA_ZERO)
        found = {}
        for name in [*counts, *(name for name in fates if name not in counts)]:
            entry = fates[name].as_json()
            counted = counts[name].as_json() if name in counts else {}
            found[name] = {"fate": entry.pop("fate"), **counted, **entry}
        return found

    def _judge(self, whole: Counts) -> list[str]:
        nonzero, kept, survived = whole.nonzero, whole.kept, whole.survived
        if self.stream.alpha == 0:
            return ["alpha is 0: the output is the target, nothing was transported"]
        if not self.moved:
            return []
        if kept < LEAST_KEPT * nonzero and not self.output.force:
            raise UnsafeResult(
                f"the mask keeps {kept / nonzero:.2%} of the task vector: nothing to speak of would be transported. "
                "More --shots or --mask veto may help; --force goes on all the same."
            )
        if kept and survived == 0:
            raise UnsafeResult("rounding to the output's dtype absorbs the whole update; use --out-dtype fp32.")
        if survived < 0.5 * kept:
            return [f"rounding absorbs {1 - survived / kept:.0%} of the update; --out-dtype fp32 keeps it"]
        return []

    def _manifest(self, report: StreamReport, details: dict[str, Any]) -> dict[str, Any]:
        stream, ballot = self.stream, self.stream.ballot
        inputs = {
            role: {"path": str(checkpoint), "hashes": stream.hashes.of(checkpoint)}
            for role, checkpoint in stream.inputs.items()
        }
        ballot.require(stream.target, stream.hashes)
        options = {name: value for name, value in ballot.options.items() if name != "count"}
        counts = {name: getattr(report, name) for name in ("transported", "copied", "skipped")}
        made = {name: value for name, value in stream.made.items() if name != "kept"}
        return {
            **versions(),
            "inputs": inputs,
            "config": {"mask": ballot.mask, "alpha": stream.alpha, **options, "seed": ballot.seed, **made},
            "votes": {"count": ballot.count, "target_hash": ballot.target_hash, "origin": ballot.origin},
            "counts": {**counts, "total": sum(counts.values())},
            "kept": report.kept,
            "survived_rounding": report.survived,
            "norm_ratio": report.norm_ratio,
            "notes": list(report.notes),
            "details": details,
            "tensors": report.tensors,
        }
