"""Transport from folder to folder, in flat pieces: memory stays flat whatever the model's size.

Every input is read once, in the target's file order, and hashed on the way. The output has the target's
shards, names, dtypes, config and tokenizer files, and a manifest with the fate of every tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.folder import copy_side_files, layout_of, target_fingerprint, versions, write_index
from gradfix.checkpoints.open import (
    CHUNK,
    Checkpoint,
    SafetensorsCheckpoint,
    Source,
    open_checkpoint,
    raw_bytes,
)
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, sha256_file
from gradfix.checkpoints.write import (
    SafetensorsWriter,
    refuse_inside,
    staged_folder,
    torch_dtype,
    write_manifest,
)
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.masks import MASKS, Mask
from gradfix.preflight import Plan, plan_transport
from gradfix.transported import mask_options, mask_piece, random_directions, share
from gradfix.votes.identity import check_probe
from gradfix.votes.tally import SignVotes, votes_metadata

MAX_NORM_RATIO = 0.5
LEAST_KEPT = 0.01


@dataclass
class Fate:
    """What happened to one tensor, counted while it streamed by."""

    nonzero: int = 0
    kept: int = 0
    survived: int = 0  # kept entries whose weight really changed after rounding to the output's dtype
    tau_square: float = 0.0
    base_square: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "fate": "transported",
            "kept": round(share(self.kept, self.nonzero), 6),
            "survived_rounding": round(share(self.survived, self.kept), 6),
        }


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
    votes: SignVotes | str | os.PathLike[str] | None = None,
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
    progress: Callable[[int], None] | None = None,
) -> StreamReport:
    """Write `target + alpha * mask(tuned - base)` as a folder the ecosystem's own loader reads.

    `votes` is a votes file (on-disk names) or SignVotes; masks that look at no votes need none.
    `extras(staging)` may add files; `details` go into the manifest."""
    before, goal = open_checkpoint(base), open_checkpoint(target)
    after = open_checkpoint(tuned, base=before)
    out = Path(out)
    refuse_inside(out, [c.path for c in (before, after, goal) if c.path is not None])
    plan = plan_transport(before, after, goal, head=head, strict=strict)
    ballot = _Ballot(votes, mask, margin, seed, plan, goal)
    job = _Job(
        before, after, goal, ballot, float(alpha), torch_dtype(dtype) if isinstance(dtype, str) else dtype
    )
    need = sum(job.out_info(name).nbytes for name in goal.names()) + 2**20
    with staged_folder(out, overwrite=overwrite, need_bytes=need) as staging:
        hashes = job.write(staging, plan, progress)
        copy_side_files(goal, staging)
        if extras is not None:
            extras(staging)
        report = job.report(out, plan, force)
        roles = inputs or {"base": before, "tuned": after, "target": goal}
        write_manifest(staging, job.manifest(report, roles, details), hashes)
    return report


class _Zeros(Checkpoint):
    """The base of an update that is already a difference."""

    def __init__(self, like: Checkpoint) -> None:
        self.like = like

    def names(self) -> list[str]:
        return self.like.names()

    def info(self, name: str) -> TensorInfo:
        return self.like.info(name)

    def read(self, name: str) -> Tensor:
        return torch.zeros(self.info(name).shape, dtype=self.info(name).dtype)


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
        base=_Zeros(delta),
        tuned=delta,
        target=target,
        out=out,
        mask="none",
        alpha=alpha,
        inputs=inputs,
        **options,
    )


class _Ballot:
    """What the mask is shown, piece by piece, under on-disk names."""

    def __init__(
        self,
        votes: SignVotes | str | os.PathLike[str] | None,
        mask: str,
        margin: float | None,
        seed: int | None,
        plan: Plan,
        target: Checkpoint,
    ) -> None:
        self.mask, self.seed = mask, seed
        self.rule: Mask = MASKS[mask]
        self.source: Checkpoint | None = None
        self.count, self.target_hash = 0, None
        if self.rule.sees == "reference":
            raise UsageError(
                "mask 'magnitude' needs gradients, which are not kept in votes files; use transport()."
            )
        if self.rule.sees in ("chance", "nothing"):
            if self.rule.sees == "chance" and seed is None:
                raise UsageError("the random masks need a seed.")
            self.options = mask_options(mask, None, margin)
            return
        if votes is None:
            raise UsageError(f"mask {mask!r} needs votes: make them with `gradfix vote` and pass the file.")
        if isinstance(votes, SignVotes):
            known = set(target.names())
            named = {votes.disk_names.get(n, n) if n not in known else n: t for n, t in votes.items()}
            self.source, about = open_checkpoint(named), votes
        else:
            file = SafetensorsFile(Path(votes))
            about = SignVotes({}, **votes_metadata(file.path, file.metadata))
            self.source = _renamed_file(file, about.disk_names, set(target.names()))
        self.count, self.target_hash = about.count, about.target_hash
        check_probe(about.probe, target)
        self.options = mask_options(mask, SignVotes({}, self.count), margin)
        self._check_names(plan, target)

    def _check_names(self, plan: Plan, target: Checkpoint) -> None:
        assert self.source is not None
        strangers = sorted(set(self.source.names()) - set(target.names()))
        if strangers:
            raise IncompatibleCheckpoints(
                f"the votes hold {len(strangers)} tensors that {target} lacks, first {strangers[0]!r}. "
                "Vote on this target with `gradfix vote`."
            )
        for name in self.source.names():
            if self.source.info(name).shape != target.info(name).shape:
                raise IncompatibleCheckpoints(
                    f"votes for {name!r} are {list(self.source.info(name).shape)}, the target's tensor is "
                    f"{list(target.info(name).shape)}."
                )
        if not set(self.source.names()) & set(plan.transported):
            raise IncompatibleCheckpoints(f"the votes cover none of the tensors of {target}.")

    def has(self, name: str) -> bool:
        return self.source is None or name in self.source

    def pieces(self, name: str, count: int) -> Iterator[Tensor]:
        if self.rule.sees == "nothing":
            return (
                torch.zeros(min(CHUNK, count - first), dtype=torch.int8) for first in range(0, count, CHUNK)
            )
        if self.source is None:
            return random_directions(self.seed or 0, name, count)
        return self.source.chunks(name, CHUNK)


def _renamed_file(file: SafetensorsFile, disk_names: Mapping[str, str], known: set[str]) -> Checkpoint:
    """A votes file saved straight from a module carries module names; show it under on-disk names."""
    checkpoint = SafetensorsCheckpoint(file.path, [file])
    if set(checkpoint.names()) <= known:
        return checkpoint
    return open_checkpoint(
        {disk_names.get(n, n) if n not in known else n: file.read(n) for n in file.entries}
    )


class _Job:
    """One pass over all tensors."""

    def __init__(
        self,
        base: Checkpoint,
        tuned: Checkpoint,
        target: Checkpoint,
        ballot: _Ballot,
        alpha: float,
        dtype: torch.dtype | None,
    ) -> None:
        self.base, self.tuned, self.target = base, tuned, target
        self.ballot, self.alpha, self.dtype = ballot, alpha, dtype
        self.fates: dict[str, Fate] = {}
        self.abstained: list[str] = []
        self.hashes = _InputHashes([base, tuned, target])

    def out_info(self, name: str, source: Checkpoint | None = None) -> TensorInfo:
        info = (source or self.target).info(name)
        if self.dtype is not None and info.dtype.is_floating_point:
            return TensorInfo(info.shape, self.dtype)
        return info

    def write(self, staging: Path, plan: Plan, progress: Callable[[int], None] | None) -> dict[str, str]:
        layout = layout_of(self.target, plan, self.out_info, self.tuned)
        hashes: dict[str, str] = {}
        wanted = set(plan.transported)
        with self.hashes:
            for file, names in layout.items():
                infos = {
                    n: self.out_info(n, self.tuned if plan.extra.get(n, "").startswith("copied") else None)
                    for n in names
                }
                with SafetensorsWriter(staging / file, infos, {"format": "pt"}) as writer:
                    for name in names:
                        for piece in self._pieces(name, name in wanted, plan):
                            writer.write(piece)
                            if progress is not None:
                                progress(piece.numel() * piece.dtype.itemsize)
                    hashes[file] = writer.close()
        write_index(staging, layout, sum(self.out_info(n).nbytes for n in self.target.names()))
        return hashes

    def _pieces(self, name: str, transported: bool, plan: Plan) -> Iterator[Tensor]:
        if transported and self.ballot.has(name) and self.alpha != 0:
            return self._moved(name)
        source = self.tuned if plan.extra.get(name, "").startswith("copied") else self.target
        if transported and self.alpha != 0:
            self.abstained.append(name)
        return self._copied(name, source)

    def _copied(self, name: str, source: Checkpoint) -> Iterator[Tensor]:
        info = self.out_info(name, source)
        for piece in self.hashes.chunks(source, name):
            yield piece.to(info.dtype)

    def _moved(self, name: str) -> Iterator[Tensor]:
        fate = self.fates[name] = Fate()
        out_dtype = self.out_info(name).dtype
        streams = zip(
            self.hashes.chunks(self.base, name),
            self.hashes.chunks(self.tuned, name),
            self.hashes.chunks(self.target, name),
            self.ballot.pieces(name, self.target.info(name).numel),
            strict=True,
        )
        for base, tuned, target, seen in streams:
            before, after = _wide(base), _wide(tuned)
            delta = after - before
            masked = mask_piece(self.ballot.rule, delta, seen, self.ballot.options)
            wide = torch.promote_types(target.dtype, torch.float32)
            moved = (target.to(wide) + self.alpha * masked.to(wide)).to(out_dtype)
            self._count(fate, before, delta, masked, moved, target)
            if not bool(torch.isfinite(moved).all()) or not bool(torch.isfinite(delta).all()):
                self._blame(name, base, tuned, target)
            yield moved

    def _count(
        self, fate: Fate, before: Tensor, delta: Tensor, masked: Tensor, moved: Tensor, target: Tensor
    ) -> None:
        fate.nonzero += int(delta.count_nonzero())
        fate.kept += int(masked.count_nonzero())
        fate.survived += int((moved != target).count_nonzero())
        fate.tau_square += float(torch.dot(delta, delta))
        fate.base_square += float(torch.dot(before, before))

    def _blame(self, name: str, base: Tensor, tuned: Tensor, target: Tensor) -> None:
        for checkpoint, piece in ((self.base, base), (self.tuned, tuned), (self.target, target)):
            if not bool(torch.isfinite(piece).all()):
                raise CorruptInput(
                    f"tensor {name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it."
                )
        raise UnsafeResult(
            f"tensor {name!r} overflows {self.out_info(name).dtype} after the move; use --dtype fp32."
        )

    def report(self, out: Path, plan: Plan, force: bool) -> StreamReport:
        nonzero = sum(f.nonzero for f in self.fates.values())
        kept = sum(f.kept for f in self.fates.values())
        survived = sum(f.survived for f in self.fates.values())
        base_square = sum(f.base_square for f in self.fates.values())
        ratio = (sum(f.tau_square for f in self.fates.values()) / base_square) ** 0.5 if base_square else 0.0
        notes = self._judge(nonzero, kept, survived, ratio, force)
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
            out, transported, copied, len(skipped), share(kept, nonzero), share(survived, kept), ratio,
            tensors=tensors, notes=tuple(notes),
        )  # fmt: skip

    def _judge(self, nonzero: int, kept: int, survived: int, ratio: float, force: bool) -> list[str]:
        if self.alpha == 0:
            return ["alpha is 0: the output is the target, nothing was transported"]
        if nonzero == 0:
            raise UnsafeResult(f"{self.tuned} equals {self.base} in every weight: the task vector is zero.")
        if ratio > MAX_NORM_RATIO and not force:
            raise IncompatibleCheckpoints(
                f"{self.tuned} differs from {self.base} by {ratio:.0%} of its norm: not a fine-tune of that base? "
                "Check the order of --base and --tuned; --force goes on all the same."
            )
        if kept < LEAST_KEPT * nonzero and not force:
            raise UnsafeResult(
                f"the mask keeps {kept / nonzero:.2%} of the task vector: nothing to speak of would be transported. "
                "More --shots or --mask veto may help; --force goes on all the same."
            )
        if survived == 0:
            raise UnsafeResult("rounding to the output's dtype absorbs the whole update; use --dtype fp32.")
        if survived < 0.5 * kept:
            return [f"rounding absorbs {1 - survived / kept:.0%} of the update; --dtype fp32 keeps it"]
        return []

    def manifest(
        self, report: StreamReport, roles: Mapping[str, Checkpoint], details: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        inputs = {
            role: {"path": str(checkpoint), "sha256": self.hashes.of(checkpoint)}
            for role, checkpoint in roles.items()
        }
        votes = {"count": self.ballot.count, "target_hash": self.ballot.target_hash}
        target_hash = self.ballot.target_hash
        found = target_fingerprint(self.target, self.hashes.of(self.target))
        if target_hash is not None and target_hash != found:
            raise IncompatibleCheckpoints(
                f"the votes were taken on other weights than {self.target}. Vote again on this target."
            )
        config = {
            "mask": self.ballot.mask,
            "alpha": self.alpha,
            **{k: v for k, v in self.ballot.options.items() if k != "count"},
            "seed": self.ballot.seed,
        }
        return {
            "format": 1,
            "kind": "transport",
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


class _InputHashes:
    """Hash the inputs while they stream by, in a thread of its own (hashlib releases the GIL)."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        from gradfix.checkpoints.safetensors_file import FileHash

        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []

    def __enter__(self) -> _InputHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def chunks(self, checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            yield from checkpoint.chunks(name, CHUNK)
            return
        shard = checkpoint.shard_of(name)
        entry = shard.entries[name]
        digest = self._hashes[shard.path]
        if entry.start == shard.header_bytes:
            with open(shard.path, "rb") as file:
                digest.update(0, file.read(shard.header_bytes))
        offset = entry.start
        for piece in shard.chunks(name, CHUNK):
            self._submit(digest.update, offset, raw_bytes(piece))
            offset += piece.numel() * piece.dtype.itemsize
            yield piece

    def _submit(self, update: Callable[..., None], offset: int, data: memoryview) -> None:
        if len(self._pending) >= 16:
            self._pending.pop(0).result()
        self._pending.append(self._pool.submit(update, offset, data))

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {
            path.name: self._hashes[path].hexdigest() if path in self._hashes else sha256_file(path)
            for path in checkpoint.files
        }


def _wide(piece: Tensor) -> Tensor:
    return piece if piece.dtype is torch.float64 else piece.float()
