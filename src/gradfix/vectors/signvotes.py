"""Finished vote counts: immutable integers per weight, in memory and as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import common_target, same_probe
from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.checkpoints.weights import Checkpoint, SafetensorsCheckpoint
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.vectors.diagnostics import notebook_table

LIMITS = ((127, torch.int8), (32767, torch.int16), (2**31 - 1, torch.int32))


def dtype_for(count: int) -> torch.dtype:
    """The narrowest integer that holds `count` votes of either sign."""
    return next(dtype for limit, dtype in LIMITS if count <= limit)


class SignVotes(Mapping[str, Tensor]):
    """Per weight: samples that want it to grow minus samples that want it to shrink.

    `count` is the number of samples. `target_hash` names the weights the votes were taken at;
    votes for other weights are refused where a checkpoint is written."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        count: int,
        *,
        rule: str = "majority",
        target_hash: str | None = None,
        disk_names: Mapping[str, str] | None = None,
        probe: Mapping[str, list[float]] | None = None,
        notes: tuple[str, ...] = (),
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self.count = int(count)
        self.rule = rule
        self.target_hash = target_hash
        self.disk_names = dict(disk_names or {})
        self.probe = dict(probe or {})
        self.notes = notes
        self.origin = dict(origin or {})  # settings and machine the votes were taken with

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def direction(self) -> dict[str, Tensor]:
        """-1, 0 or 1 per weight; a tie is 0."""
        return {name: tensor.sign().to(torch.int8) for name, tensor in self.items()}

    def tie_rate(self) -> float:
        """Share of weights on which the samples cancel out."""
        total = sum(tensor.numel() for tensor in self.values())
        return sum(int((tensor == 0).sum()) for tensor in self.values()) / max(total, 1)

    def __add__(self, other: SignVotes) -> SignVotes:
        if not isinstance(other, SignVotes):
            return NotImplemented
        if set(self) != set(other):
            odd = sorted(set(self) ^ set(other))
            raise IncompatibleCheckpoints(f"the votes differ in {len(odd)} tensor names, first {odd[0]!r}.")
        _refuse_other_votes(self, other)
        target = common_target([self.target_hash, other.target_hash])
        count = self.count + other.count
        dtype = dtype_for(count)
        return self.changed(
            {name: self[name].to(dtype) + other[name].to(dtype) for name in self},
            count=count,
            target_hash=target,
            disk_names=self.disk_names or other.disk_names,
            probe=self.probe or other.probe,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            origin=None,
        )

    def changed(self, tensors: Mapping[str, Tensor], **about: Any) -> SignVotes:
        """Other tensors of the same votes; `about` is what else is different."""
        same = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return SignVotes(tensors, **{**same, **about})

    def save(self, path: str | os.PathLike[str]) -> None:
        metadata = {"format": "gradfix.votes", "count": str(self.count), "rule": self.rule}
        if self.disk_names:
            metadata["disk_names"] = json.dumps(self.disk_names)
        if self.probe:
            metadata["probe"] = json.dumps(self.probe)
        if self.origin:
            metadata["origin"] = json.dumps(self.origin)
        if self.target_hash:
            metadata["target_hash"] = self.target_hash
        save_tensors(Path(path), {name: t.cpu().contiguous() for name, t in self.items()}, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SignVotes:
        files, about = votes_files(Path(path))
        return cls({name: f.read(name) for f in files for name in f.names_in_file_order()}, **about)

    def __repr__(self) -> str:
        return f"SignVotes({len(self)} tensors, {self.count} samples, {self.tie_rate():.1%} ties, rule {self.rule})"

    def _repr_html_(self) -> str:

        shown = [(name, t) for name, t in list(self.items())[:12] if t.numel()]
        ties = {name: f"{float((t == 0).float().mean()):.1%}" for name, t in shown}
        rows = [(n, "x".join(map(str, t.shape)), ties[n], f"{int(t.abs().max())}") for n, t in shown]
        return notebook_table(repr(self), ("tensor", "shape", "ties", "largest"), rows)


def votes_to_disk(votes: SignVotes, model: nn.Module | NameMap, checkpoint: Checkpoint) -> SignVotes:
    """The votes under the names (and in the pieces) of the checkpoint they were taken at.

    A model that has been taken apart stands by the names it had before. Votes for weights that the file does not hold,
    such as a pooler the file was saved without, are left out and named in the notes."""
    known = set(checkpoint.names())
    names = model if isinstance(model, NameMap) else name_map(model, known)
    named = names.to_disk({name: tensor.cpu() for name, tensor in votes.items()})
    strangers = sorted(set(named) - known)
    if len(strangers) == len(named):
        raise IncompatibleCheckpoints(
            f"the votes and {checkpoint} share no tensor name (first {strangers[0]!r} and {min(known)!r}). "
            "Was the model loaded from this checkpoint?"
        )
    notes = (*votes.notes, *(f"votes for {name!r} left out: it is not in the file" for name in strangers))
    kept = {name: tensor for name, tensor in named.items() if name in known}
    for name, tensor in kept.items():
        if tuple(tensor.shape) != checkpoint.info(name).shape:
            raise IncompatibleCheckpoints(
                f"votes for {name!r} are {list(tensor.shape)}, the tensor in {checkpoint} is "
                f"{list(checkpoint.info(name).shape)}."
            )
    return votes.changed(kept, disk_names=None, notes=notes)


def _refuse_other_votes(ours: SignVotes, theirs: SignVotes) -> None:
    if ours.rule != theirs.rule:
        raise IncompatibleCheckpoints(f"votes by {ours.rule} and votes by {theirs.rule} do not add up.")
    odd = [name for name in ours if ours[name].shape != theirs[name].shape]
    odd += [name for name in ours.probe if not same_probe(ours.probe[name], theirs.probe.get(name))]
    if odd:
        raise IncompatibleCheckpoints(f"the votes were taken on different weights, first {odd[0]!r}.")


def check_integers(file: SafetensorsFile) -> None:
    """A vote is an integer; anything else was not written by gradfix."""
    for name, entry in file.entries.items():
        if entry.info.dtype not in {dtype for _, dtype in LIMITS}:
            raise CorruptInput(f"{file.path}: votes for {name!r} are {entry.info.dtype}, not integers.")


def votes_files(path: Path) -> tuple[list[SafetensorsFile], dict[str, Any]]:
    """The files of some votes (one, or a folder of shards) and what they say about themselves."""
    files = [SafetensorsFile(path)] if not path.is_dir() else []
    if path.is_dir():
        folder = open_checkpoint(path)
        files = folder.shards if isinstance(folder, SafetensorsCheckpoint) else []
    abouts = [votes_metadata(file.path, file.metadata) for file in files]
    if not abouts or any(about != abouts[0] for about in abouts):
        raise CorruptInput(f"{path} holds no votes, or shards of different votes; make them again.")
    for file in files:
        check_integers(file)
    return files, abouts[0]


def votes_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What a votes file says about itself, as keyword arguments of SignVotes."""
    if metadata.get("format") != "gradfix.votes":
        raise CorruptInput(f"{path} is not a votes file; make one with `gradfix vote`.")
    try:
        return {
            "count": _positive(metadata["count"]),
            "rule": metadata.get("rule", "majority"),
            "target_hash": metadata.get("target_hash"),
            "disk_names": dict(json.loads(metadata.get("disk_names", "{}"))),
            "probe": _floats(json.loads(metadata.get("probe", "{}"))),
            "origin": dict(json.loads(metadata.get("origin", "{}"))),
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise CorruptInput(f"{path} has a damaged header; make it again with `gradfix vote`.") from None


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError("no votes")
    return int(text)


def _floats(probe: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: [float(value) for value in values] for name, values in probe.items()}
