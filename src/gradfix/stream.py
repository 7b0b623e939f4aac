"""Transport from folder to folder, in flat pieces: memory stays flat whatever the model's size.

Every input is read once, in the target's file order, and hashed on the way. The output has the target's
shards, names, dtypes, config and tokenizer files, and a manifest with the fate of every tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.card import card
from gradfix.checkpoints.folder import copy_side_files, layout_of, versions, write_index
from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.journal import Journal, journal_key
from gradfix.checkpoints.open import (
    CHUNK,
    Checkpoint,
    Source,
    open_checkpoint,
)
from gradfix.checkpoints.prefix import match_prefix
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.checkpoints.vocabulary import match_vocabulary
from gradfix.checkpoints.write import refuse_inside, staged_folder, torch_dtype, write_manifest
from gradfix.checkpoints.zeros import Zeros
from gradfix.descent import MAX_NORM_RATIO, stranger
from gradfix.errors import CorruptInput, UnsafeResult
from gradfix.fates import Fate, cosines, total
from gradfix.pieces import Buffers, all_finite, differing
from gradfix.preflight import Plan, plan_transport
from gradfix.threads import ahead, one_thread, piece_workers
from gradfix.transported import mask_piece, share
from gradfix.votes.ballot import Ballot, OpenVotes
from gradfix.votes.tally import SignVotes

LEAST_KEPT = 0.01
SPAN = 2  # pieces a worker takes at a time
WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)


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
    kind: str = "transport",
    progress: Callable[[int], None] | None = None,
) -> StreamReport:
    """Write `target + alpha * mask(tuned - base)` as a folder the ecosystem's own loader reads.

    `votes` is a votes file (on-disk names) or SignVotes; masks that look at no votes need none.
    `extras(staging)` may add files; `details` go into the manifest. A lazy `tuned` that reads other files
    hands in the `hashes` it reads them through."""
    before, goal = open_checkpoint(base), open_checkpoint(target)
    after = open_checkpoint(tuned, base=before)
    out = Path(out)
    refuse_inside(out, [c.path for c in (before, after, goal) if c.path is not None])
    before, after = match_prefix(before, goal), match_prefix(after, goal)
    before, after, vocabulary = match_vocabulary(before, after, goal)
    plan = plan_transport(before, after, goal, head=head, strict=strict)
    ballot = Ballot(votes, mask, margin, seed, plan, goal)
    job = _Job(
        before, after, goal, ballot, float(alpha), torch_dtype(dtype) if isinstance(dtype, str) else dtype,
        hashes or InputHashes([before, after, goal]),
    )  # fmt: skip
    need = sum(job.out_info(name).nbytes for name in goal.names()) + 2**20
    key = journal_key((before, after, goal), ballot.identity(), job.alpha, job.dtype, head, strict)
    with staged_folder(out, overwrite=overwrite, need_bytes=need, key=key) as staging:
        with one_thread(), piece_workers() as pool:
            written = job.write(staging, plan, pool, progress)
        copy_side_files(goal, staging)
        if extras is not None:
            extras(staging)
        report = job.report(out, plan, force)
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
    **options: Any,
) -> StreamReport:
    """Write `target + alpha * update` for an update under on-disk names; `inputs` are named in the manifest."""
    delta = open_checkpoint(dict(update))
    return transport_checkpoint(
        base=Zeros(delta),
        tuned=delta,
        target=target,
        out=out,
        mask="none",
        alpha=alpha,
        inputs=inputs,
        **options,
    )


class _Job:
    """One pass over all tensors."""

    def __init__(
        self,
        base: Checkpoint,
        tuned: Checkpoint,
        target: Checkpoint,
        ballot: Ballot,
        alpha: float,
        dtype: torch.dtype | None,
        hashes: InputHashes,
    ) -> None:
        self.base, self.tuned, self.target = base, tuned, target
        self.ballot, self.alpha, self.dtype, self.hashes = ballot, alpha, dtype, hashes
        self.fates: dict[str, Fate] = {}
        self.buffers = Buffers()
        self.abstained: list[str] = []

    def out_info(self, name: str, source: Checkpoint | None = None) -> TensorInfo:
        info = (source or self.target).info(name)
        if self.dtype is not None and info.dtype.is_floating_point:
            return TensorInfo(info.shape, self.dtype)
        return info

    def write(
        self, staging: Path, plan: Plan, pool: ThreadPoolExecutor, progress: Callable[[int], None] | None
    ) -> dict[str, str]:
        layout = layout_of(self.target, plan, self.out_info, self.tuned)
        journal = Journal(staging)
        with self.hashes:
            hashes = {
                file: self._write_file(staging / file, names, plan, pool, journal, progress or _silent)
                for file, names in layout.items()
            }
        journal.close()
        write_index(staging, layout, sum(self.out_info(n).nbytes for n in self.target.names()))
        return hashes

    def _write_file(
        self,
        path: Path,
        names: list[str],
        plan: Plan,
        pool: ThreadPoolExecutor,
        journal: Journal,
        progress: Callable[[int], None],
    ) -> str:
        """One output file, from where an interrupted run left it; returns its sha256."""
        wanted = set(plan.transported)
        infos = {
            n: self.out_info(n, self.tuned if plan.extra.get(n, "").startswith("copied") else None)
            for n in names
        }
        finished = journal.finished(path.name)
        if finished is not None:
            self._recall(journal, path.name)
            progress(sum(info.nbytes for info in infos.values()))
            return finished
        with SafetensorsWriter(path, infos, {"format": "pt"}, journal.reached(path.name)) as writer:
            if not writer.resumed:
                journal.restart(path.name)
            done = self._recall(journal, path.name)
            progress(sum(infos[name].nbytes for name in done))
            for name in names[len(done) :]:
                for piece in self._pieces(name, name in wanted, plan, pool):
                    writer.write(piece)
                    progress(piece.numel() * piece.dtype.itemsize)
                fate = self.fates.get(name)
                journal.add(
                    path.name, writer.size, writer.sha256(), tensor=name,
                    fate=None if fate is None else asdict(fate), abstained=name in self.abstained[-1:],
                )  # fmt: skip
            digest = writer.close()
        journal.add(path.name, writer.size, digest)
        return digest

    def _recall(self, journal: Journal, file: str) -> list[str]:
        """What became of the tensors an interrupted run has written; their names."""
        records = journal.tensors(file)
        self.fates |= {r["tensor"]: Fate(**r["fate"]) for r in records if r["fate"] is not None}
        self.abstained += [r["tensor"] for r in records if r["abstained"]]
        return [r["tensor"] for r in records]

    def _pieces(self, name: str, transported: bool, plan: Plan, pool: ThreadPoolExecutor) -> Iterator[Tensor]:
        if transported and self.ballot.has(name) and self.alpha != 0:
            return self._moved(name, pool)
        source = self.tuned if plan.extra.get(name, "").startswith("copied") else self.target
        if transported and self.alpha != 0:
            self.abstained.append(name)
        return self._copied(name, source)

    def _copied(self, name: str, source: Checkpoint) -> Iterator[Tensor]:
        info = self.out_info(name, source)
        for piece in self.hashes.chunks(source, name, CHUNK):
            copy = piece.to(info.dtype)
            if not _finite(copy):
                self._blame(name, (source, piece))
            yield copy

    def _moved(self, name: str, pool: ThreadPoolExecutor) -> Iterator[Tensor]:
        """Read here, in order; compute in the workers, a few pieces ahead; hand on in order."""
        fate = self.fates[name] = Fate()
        out_dtype = self.out_info(name).dtype
        streams = zip(
            self.hashes.chunks(self.base, name, SPAN * CHUNK),
            self.hashes.chunks(self.tuned, name, SPAN * CHUNK),
            self.hashes.chunks(self.target, name, SPAN * CHUNK),
            self.ballot.pieces(name, self.target.info(name).numel, SPAN * CHUNK),
            strict=True,
        )
        work = partial(self._move_span, name, out_dtype)
        for moved, counted in ahead(pool, work, streams):
            fate.add(counted)
            yield moved

    def _move_span(self, name: str, out_dtype: torch.dtype, spans: tuple[Tensor, ...]) -> tuple[Tensor, Fate]:
        """One task of a worker: pieces small enough for its cache, one after another."""
        out, fate = torch.empty(len(spans[0]), dtype=out_dtype), Fate()
        for into, *pieces in zip(out.split(CHUNK), *(span.split(CHUNK) for span in spans), strict=True):
            fate.add(self._move(name, into, *pieces))
        return out, fate

    def _move(
        self, name: str, moved: Tensor, base: Tensor, tuned: Tensor, target: Tensor, seen: Tensor
    ) -> Fate:
        before, delta, goal = self.buffers.wide(base, tuned, target)
        delta.sub_(before)
        masked = mask_piece(self.ballot.rule, delta, seen, self.ballot.options)
        counted = Fate()
        counted.count(before, delta, masked, goal.to(before.dtype))
        # Numbers whose squares add up are far from any overflow, but for fp16.
        safe = math.isfinite(counted.tau_square + counted.target_square) and abs(self.alpha) < 1e9
        finite = safe or all_finite(delta)
        # masked may be delta itself; neither is needed again
        moved.copy_(masked.to(goal.dtype).mul_(self.alpha).add_(goal))
        counted.survived = differing(moved, target)
        if not finite or not ((safe and moved.dtype in WIDE_RANGE) or all_finite(moved)):
            self._blame(name, (self.base, base), (self.tuned, tuned), (self.target, target))
        return counted

    def _blame(self, name: str, *pieces: tuple[Checkpoint, Tensor]) -> None:
        for checkpoint, piece in pieces:
            if not _finite(piece):
                raise CorruptInput(
                    f"tensor {name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it."
                )
        raise UnsafeResult(f"tensor {name!r} overflows the output's dtype; use --out-dtype fp32.")

    def report(self, out: Path, plan: Plan, force: bool) -> StreamReport:
        whole = total(self.fates.values())
        ratio = (whole.tau_square / whole.base_square) ** 0.5 if whole.base_square else 0.0
        notes = self._judge(whole, ratio, force)
        notes += [note for source in (self.base, self.tuned, self.target) for note in source.notes]
        if self.abstained:
            notes.append(
                f"{len(self.abstained)} tensors have no votes (frozen or unused) and were left as they are"
            )
        skipped = [name for name, what in plan.extra.items() if what == "skipped"]
        tensors: dict[str, Any] = {name: fate.as_json() for name, fate in self.fates.items()}
        tensors |= {name: {"fate": "copied", "reason": reason} for name, reason in plan.copied.items()}
        tensors |= {name: {"fate": "copied", "reason": "no votes"} for name in self.abstained}
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
            raise stranger(self.base, self.tuned, ratio, *cosines(whole))
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
            role: {"path": str(checkpoint), "sha256": self.hashes.of(checkpoint)}
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


def _finite(piece: Tensor) -> bool:
    """Also for the small floats, which torch can store but not sum, and for integers."""
    return not piece.dtype.is_floating_point or all_finite(piece.float() if piece.itemsize == 1 else piece)


def _silent(_: int) -> None:
    """Progress for nobody."""
