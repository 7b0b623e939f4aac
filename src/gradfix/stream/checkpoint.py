"""Transport from folder to folder, in flat pieces: memory stays flat whatever the model's size.

Every input is read once, in the target's file order, and hashed on the way. The output has the target's
shards, names, dtypes, config and tokenizer files, and a manifest with the fate of every tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.folder import copy_side_files, layout_of, versions, write_index
from gradfix.checkpoints.input_hashes import InputHashes
from gradfix.checkpoints.journal import journal_key
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.checkpoints.prefix import match_prefix
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.trio import Plan, plan_transport
from gradfix.checkpoints.vocabulary import match_vocabulary
from gradfix.checkpoints.write import refuse_inside, staged_folder, torch_dtype, write_manifest
from gradfix.checkpoints.zeros import Zeros
from gradfix.errors import UnsafeResult
from gradfix.stream.ballot import Ballot, OpenVotes
from gradfix.stream.card import card
from gradfix.stream.counts import Fate, total
from gradfix.stream.mover import Mover
from gradfix.stream.pipeline import Content, Pipeline
from gradfix.stream.tied import TiedUpdate
from gradfix.stream.updates import Difference, Update
from gradfix.vectors.descent import MAX_NORM_RATIO, stranger
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.transported import add_scaled, share

LEAST_KEPT = 0.01


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
    mask: str = "agree",
    alpha: float = 1.0,
    margin: float | None = None,
    seed: int | None = None,
    head: str = "error",
    strict: bool = False,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    force: bool = False,
    details: Mapping[str, Any] | None = None,
    extras: Callable[[Path], None] | None = None,
    inputs: Mapping[str, Checkpoint] | None = None,
    hashes: InputHashes | None = None,
    update: Update | None = None,
    plan: Plan | None = None,
    kind: str = "transport",
    progress: Callable[[int], None] | None = None,
) -> StreamReport:
    """Write `target + alpha * mask(tuned - base)` as a folder the ecosystem's own loader reads.

    `votes` is a votes file (on-disk names) or SignVotes; masks that look at no votes need none.
    `extras(staging)` may add files; `details` go into the manifest. A merge makes its own `plan` and `update`,
    and hands in the `hashes` it reads its files through."""
    before, goal = open_checkpoint(base), open_checkpoint(target)
    after = open_checkpoint(tuned, base=before)
    out = Path(out)
    refuse_inside(out, [before.path, after.path, goal.path, votes])
    before, after = match_prefix(before, goal), match_prefix(after, goal)
    before, after, vocabulary = match_vocabulary(before, after, goal)
    plan = plan or plan_transport(before, after, goal, head=head, strict=strict)
    ballot = Ballot(votes, mask, margin, seed, plan, goal)
    hashes = hashes or InputHashes([before, after, goal])
    job = _Job(
        before, after, goal, plan, ballot, float(alpha), torch_dtype(dtype) if isinstance(dtype, str) else dtype,
        hashes, update or Difference(before, after, hashes),
    )  # fmt: skip
    need = sum(job.out_info(name).nbytes for name in goal.names()) + 2**20
    key = journal_key((before, after, goal), ballot.identity(), job.alpha, job.dtype, head, strict)
    with staged_folder(out, overwrite=overwrite, need_bytes=need, key=key) as staging:
        written = job.write(staging, progress)
        copy_side_files(goal, staging)
        if extras is not None:
            extras(staging)
        report = job.report(out, force)
        roles = inputs or {"base": before, "tuned": after, "target": goal}
        content = job.manifest(report, roles, {**(details or {}), **vocabulary})
        content = {"format": 1, "kind": kind, **content}
        (staging / "README.md").write_text(card(content), encoding="utf-8")
        write_manifest(staging, content, written)
    return report


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

    `head` holds tensors that the target lacks: they are written with what the update changes in them."""
    lent = dict(head or {})
    moved = {name: delta for name, delta in update.items() if name not in lent}
    for name in lent.keys() & update.keys():
        lent[name] = lent[name].clone()
        add_scaled(lent[name], update[name], alpha)
    return transport_checkpoint(
        base=Zeros(open_checkpoint(moved)),
        tuned=open_checkpoint({**moved, **lent}),
        target=target,
        out=out,
        mask="none",
        alpha=alpha,
        inputs=inputs,
        head="copy" if lent else "error",
        **options,
    )


class _Job:
    """One pass over all tensors."""

    def __init__(
        self,
        base: Checkpoint,
        tuned: Checkpoint,
        target: Checkpoint,
        plan: Plan,
        ballot: Ballot,
        alpha: float,
        dtype: torch.dtype | None,
        hashes: InputHashes,
        update: Update,
    ) -> None:
        self.base, self.tuned, self.target, self.plan = base, tuned, target, plan
        self.ballot, self.alpha, self.dtype, self.hashes = ballot, alpha, dtype, hashes
        self.pipeline = Pipeline(TiedUpdate(update, plan.tied), Mover(ballot, alpha), hashes)
        self.wanted = set(plan.transported)

    def out_info(self, name: str, source: Checkpoint | None = None) -> TensorInfo:
        info = (source or self.target).info(name)
        if self.dtype is not None and info.dtype.is_floating_point:
            return TensorInfo(info.shape, self.dtype)
        return info

    def write(self, staging: Path, progress: Callable[[int], None] | None) -> dict[str, str]:
        layout = layout_of(self.target, self.plan, self.out_info, self.tuned)
        contents = {file: {name: self._content(name) for name in names} for file, names in layout.items()}
        hashes = self.pipeline.write(staging, contents, progress)
        write_index(staging, layout, sum(self.out_info(n).nbytes for n in self.target.names()))
        return hashes

    def _content(self, name: str) -> Content:
        """A head that is copied comes from the fine-tune, everything else from the target."""
        source = self.tuned if self.plan.extra.get(name, "").startswith("copied") else self.target
        wanted = name in self.wanted and self.alpha != 0
        voted = self.ballot.has(name)
        return Content(self.out_info(name, source), source, wanted and voted, wanted and not voted)

    def report(self, out: Path, force: bool) -> StreamReport:
        plan, fates, abstained = self.plan, self.pipeline.fates, self.pipeline.abstained
        whole = total(fate for name, fate in fates.items() if name not in plan.tied)
        ratio = whole.norm_ratio()
        notes = self._judge(whole, ratio, force)
        notes += [note for source in (self.base, self.tuned, self.target) for note in source.notes]
        if abstained:
            notes.append(
                f"{len(abstained)} tensors have no votes (frozen or unused) and were left as they are"
            )
        skipped = [*plan.needless, *(name for name, what in plan.extra.items() if what == "skipped")]
        tensors: dict[str, Any] = {name: fate.as_json() for name, fate in fates.items()}
        for name in plan.tied.keys() & fates.keys():
            tensors[name]["reason"] = f"tied to {plan.tied[name]}"
        tensors |= {name: {"fate": "copied", "reason": reason} for name, reason in plan.copied.items()}
        tensors |= {name: {"fate": "copied", "reason": "no votes"} for name in abstained}
        tensors |= {
            name: {"fate": "copied", "reason": "alpha is 0"}
            for name in plan.transported
            if name not in tensors
        }
        tensors |= {
            name: {
                "fate": "skipped" if name in skipped else "copied",
                "reason": f"head of the fine-tune, {what}",
            }
            for name, what in plan.extra.items()
        }
        tensors |= {name: {"fate": "skipped", "reason": reason} for name, reason in plan.needless.items()}
        transported = sum(entry["fate"] == "transported" for entry in tensors.values())
        copied = sum(entry["fate"] == "copied" for entry in tensors.values())
        everything = set(self.target.names()) | set(self.tuned.names())
        if transported + copied + len(skipped) != len(everything) or set(tensors) != everything:
            raise UnsafeResult("not every tensor is accounted for; this is a bug, please report it.")
        return StreamReport(
            out, transported, copied, len(skipped), share(whole.kept, whole.nonzero),
            share(whole.survived, whole.kept), ratio,
            tensors=tensors, notes=tuple(notes),
        )  # fmt: skip

    def _judge(self, whole: Fate, ratio: float, force: bool) -> list[str]:
        nonzero, kept, survived = whole.nonzero, whole.kept, whole.survived
        if self.alpha == 0:
            return ["alpha is 0: the output is the target, nothing was transported"]
        if nonzero == 0:
            raise UnsafeResult(f"{self.tuned} equals {self.base} in every weight: the task vector is zero.")
        if ratio > MAX_NORM_RATIO and not force:
            raise stranger(self.base, self.tuned, ratio, self.target)
        if kept < LEAST_KEPT * nonzero and not force:
            raise UnsafeResult(
                f"the mask keeps {kept / nonzero:.2%} of the task vector: nothing to speak of would be transported. "
                "More --shots or --mask veto may help; --force goes on all the same."
            )
        if survived == 0:
            raise UnsafeResult(
                "rounding to the output's dtype absorbs the whole update; use --out-dtype fp32."
            )
        if survived < 0.5 * kept:
            return [f"rounding absorbs {1 - survived / kept:.0%} of the update; --out-dtype fp32 keeps it"]
        return []

    def manifest(
        self, report: StreamReport, roles: Mapping[str, Checkpoint], details: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        inputs = {
            role: {"path": str(checkpoint), "hashes": self.hashes.of(checkpoint)}
            for role, checkpoint in roles.items()
        }
        ballot = self.ballot
        votes = {"count": ballot.count, "target_hash": ballot.target_hash, "origin": ballot.origin}
        self.ballot.require(self.target, self.hashes)
        config = {
            "mask": self.ballot.mask,
            "alpha": self.alpha,
            **{k: v for k, v in self.ballot.options.items() if k != "count"},
            "seed": self.ballot.seed,
        }
        return {
            **versions(),
            "inputs": inputs,
            "config": config,
            "votes": votes,
            "counts": {
                "transported": report.transported,
                "copied": report.copied,
                "skipped": report.skipped,
                "total": report.transported + report.copied + report.skipped,
            },
            "kept": report.kept,
            "survived_rounding": report.survived,
            "norm_ratio": report.norm_ratio,
            "notes": list(report.notes),
            "details": dict(details or {}),
            "tensors": report.tensors,
        }
