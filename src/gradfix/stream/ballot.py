"""Votes as a stream shows them to a mask: piece by piece, under on-disk names, checked against the target."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.identity import check_probe, common_target, comparable, is_target, target_fingerprint
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from gradfix.checkpoints.trio import Fates
from gradfix.checkpoints.weights import Checkpoint, SafetensorsCheckpoint
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.stream.pieces import recut
from gradfix.vectors.masks import MASKS, Mask
from gradfix.vectors.signvotes import SignVotes, dtype_for, votes_files
from gradfix.vectors.transported import mask_options, random_directions


@dataclass(frozen=True)
class OpenVotes:
    """Votes that are read when asked for, under on-disk names; `about` holds their count and identity."""

    source: Checkpoint
    about: SignVotes


def open_votes(votes: SignVotes | OpenVotes | str | os.PathLike[str], target: Checkpoint) -> OpenVotes:
    if isinstance(votes, OpenVotes):
        return votes
    known = set(target.names())
    if isinstance(votes, SignVotes):
        named = {votes.disk_names.get(n, n) if n not in known else n: t for n, t in votes.items()}
        return OpenVotes(open_checkpoint(named), votes)
    files, found = votes_files(Path(votes))
    about = SignVotes({}, **found)
    return OpenVotes(_renamed_files(Path(votes), files, about.disk_names, known), about)


class Ballot:
    """What the mask is shown, piece by piece, under on-disk names.

    Votes hold for all copies of a tied tensor, whichever of their names they were taken under."""

    def __init__(
        self,
        votes: SignVotes | OpenVotes | str | os.PathLike[str] | None,
        mask: str,
        margin: float | None,
        seed: int | None,
        fates: Fates,
        target: Checkpoint,
    ) -> None:
        self.mask, self.seed = mask, seed
        self.rule: Mask = MASKS[mask]
        self.source: Checkpoint | None = None
        self.count, self.target_hash = 0, None
        self.origin: dict[str, Any] = {}
        self.copies: dict[str, list[str]] = {}  # of a tied tensor, under the name of its first
        for copy, first in fates.tied.items():
            self.copies[copy] = self.copies.setdefault(first, [first])
            self.copies[first].append(copy)
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
        opened = open_votes(votes, target)
        self.source, about = opened.source, opened.about
        self.count, self.target_hash, self.origin = about.count, about.target_hash, about.origin
        check_probe(about.probe, target)
        self.options = mask_options(mask, SignVotes({}, self.count), margin)
        self._check_names(fates, target)

    def _check_names(self, fates: Fates, target: Checkpoint) -> None:
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
        if not set(self.source.names()) & set(fates.moved):
            raise IncompatibleCheckpoints(f"the votes cover none of the tensors of {target}.")

    def identity(self) -> list[Any]:
        """What the mask depends on, for recognising an interrupted run."""
        content: Any = None
        if self.source is not None:
            content = self.source.identity() or self.source.fingerprint()
        return [self.mask, self.options, self.seed, self.count, content]

    def has(self, name: str) -> bool:
        return self.source is None or self._voted(name) in self.source

    def _voted(self, name: str) -> str:
        """The name a tensor was voted on under; random masks draw by the first of tied ones."""
        names = self.copies.get(name, [name])
        return next((n for n in names if self.source is None or n in self.source), names[0])

    def require(self, target: Checkpoint, hashes: InputHashes) -> None:
        """Refuse votes that were taken on other weights; cheap once the target has been read."""
        if self.target_hash is not None:
            _require(self.target_hash, target, hashes.of(target))

    def pieces(self, name: str, count: int, elements: int) -> Iterator[Tensor]:
        """What the rule sees of one tensor of `count` entries, in flat pieces."""
        if self.rule.sees == "nothing":
            sizes = (min(elements, count - first) for first in range(0, count, elements))
            return (torch.zeros(size, dtype=torch.int8) for size in sizes)
        if self.source is None:
            return recut(random_directions(self.seed or 0, self._voted(name), count), elements)
        return self.source.chunks(self._voted(name), elements)


def _require(fingerprint: str, target: Checkpoint, files: Mapping[str, str] | None = None) -> None:
    if not is_target(fingerprint, target, files):
        raise IncompatibleCheckpoints(
            f"the votes were taken on other weights than {target}. Vote again on this target."
        )


def _renamed_files(
    path: Path, files: list[SafetensorsFile], disk_names: Mapping[str, str], known: set[str]
) -> Checkpoint:
    """Votes saved straight from a module carry module names; show them under on-disk names."""
    checkpoint = SafetensorsCheckpoint(path, files)
    if set(checkpoint.names()) <= known:
        return checkpoint
    return open_checkpoint(
        {disk_names.get(n, n) if n not in known else n: checkpoint.read(n) for n in checkpoint.names()}
    )


def consensus_of(tasks: Sequence[OpenVotes], target: Checkpoint) -> OpenVotes:
    """The streaming twin of `gradfix.consensus`: nothing is read before a mask asks for it."""
    named = {task.about.target_hash for task in tasks} - {None}
    if not comparable(str(name) for name in named):  # older votes among newer ones: ask the target itself
        for name in named:
            _require(str(name), target)
        named = {target_fingerprint(target)}
    common = _Consensus(tasks, common_target(named))
    about = SignVotes({}, len(tasks), target_hash=common.target_hash, probe=tasks[0].about.probe)
    return OpenVotes(common, about)


class _Consensus(Checkpoint):
    """Per weight the sum of the tasks' signs, read from their votes when asked for."""

    def __init__(self, tasks: Sequence[OpenVotes], target_hash: str | None) -> None:
        self.tasks, self.target_hash = list(tasks), target_hash
        self.dtype = dtype_for(len(self.tasks))
        first = self.tasks[0].source
        for task in self.tasks[1:]:
            odd = sorted(set(first.names()) ^ set(task.source.names()))
            if odd:
                raise IncompatibleCheckpoints(
                    f"the votes differ in {len(odd)} tensor names, first {odd[0]!r}."
                )
            for name in first.names():
                if first.info(name).shape != task.source.info(name).shape:
                    raise IncompatibleCheckpoints(f"votes for {name!r} differ in shape between the tasks.")

    def names(self) -> list[str]:
        return self.tasks[0].source.names()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.tasks[0].source.info(name).shape, self.dtype)

    def identity(self) -> Any:
        parts = [task.source.identity() for task in self.tasks]
        return None if None in parts else parts

    def span(self, name: str, first: int, count: int) -> Tensor:
        signs = [task.source.span(name, first, count).sign().to(self.dtype) for task in self.tasks]
        return torch.stack(signs).sum(0, dtype=self.dtype)
