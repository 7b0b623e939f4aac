"""Votes of a model that no device holds: every process asks one sample per step and keeps its slices of the votes.

FSDP has several ways to deliver a gradient in pieces, late or not at all, and all of them would give wrong votes in
silence: so every fold is counted, and anything but exactly one per weight and step is an error. The votes are written
without being held anywhere: every tensor is put together on the one process that writes it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradfix.checkpoints.folder import write_index
from gradfix.checkpoints.names import NameMap
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.checkpoints.slices import whole_tensors
from gradfix.checkpoints.write import seal, staged_folder
from gradfix.errors import OutputError, UnsafeResult
from gradfix.system.processes import Group, together
from gradfix.vectors.signvotes import dtype_for
from gradfix.votes.distributed.build import Sharded, SignReduceScatter, refuse_untied
from gradfix.votes.distributed.parallel import gathered
from gradfix.votes.engines.loop import Batches, folding
from gradfix.votes.engines.passes import Loss, losses_of, one_sample, take
from gradfix.votes.resume import Bad, VoteStep, local, vote_key
from gradfix.votes.runs import VoteRun, refuse_bad, refuse_nothing, voting_parameters
from gradfix.votes.tally import Tally

IN_PIECES = "its gradient came in pieces: a layer that is used more than once, or reentrant checkpointing."


@dataclass
class ShardedVotes:
    """This process's slices of the votes, under module names."""

    tally: Tally
    count: int
    notes: list[str] = field(default_factory=list)


class InShards(VoteRun[ShardedVotes]):
    """One sample per process and step; every process keeps its slice of every tensor's votes."""

    batches: Batches

    def __init__(self, group: Group, model: nn.Module, signs: SignReduceScatter, loss: Loss, batches: Batches) -> None:
        self.parameters = voting_parameters(model)
        slices = {name: local(parameter) for name, parameter in self.parameters.items()}
        super().__init__(model, loss, batches, Tally(slices))  # type: ignore[arg-type]
        self.group, self.signs, self.count = group, signs, len(batches.rows)
        self.folds: Counter[str] = Counter()
        refuse_untied(model)

    def key(self, identity: str) -> str:
        return vote_key(self.model, "sharded", identity, self.group.rank, self.group.size)

    def steps(self) -> Iterator[VoteStep]:
        """This process's sample of each step; beyond the last one, that again, with the padding of its batch."""
        for number in range(self.group.rank, self.count + self.group.rank, self.group.size):
            index, row = divmod(min(number, self.count - 1), self.batches.size)
            yield VoteStep(number, take(self.batches[index], slice(row, row + 1)))

    def hooks(self) -> AbstractContextManager[None]:
        return folding(self.parameters, self._fold_slice)

    def _fold_slice(self, name: str, gradient: Tensor) -> None:
        buffer = self.tally[name]
        buffer.sub_(local(gradient).to(buffer.dtype))
        self.folds[name] += 1

    def fold(self, step: VoteStep) -> list[Bad]:
        """All processes fold one sample each; those beyond the last sample take part without voting."""
        number, _ = step
        with one_sample(self.model):
            with torch.enable_grad():
                value = losses_of(self.model, self.loss, step.batch).sum()
            finite, voting = bool(torch.isfinite(value)), number < self.count
            self.signs.voice = int(finite and voting)
            self.tally.reserve(min(self.group.size, self.count - number + self.group.rank))
            self.folds.clear()
            value.backward()
        check_folds(self.folds, self.tally)
        check_finished(self.model)
        return [(number, self.told(number, value))] if voting and not finite else []

    def refuse_bad(self, bad: Sequence[Bad], step: VoteStep) -> None:
        """What one process leaves out says nothing yet."""

    def result(self, bad: list[Bad]) -> ShardedVotes:
        found = gathered(self.group, bad)
        silent = self.group.gather(not any(bool(buffer.any()) for _, buffer in self.tally.items()))
        with together(self.group):
            refuse_nothing(self.tally)
            refuse_bad(found, self.count)
            if all(silent):
                raise UnsafeResult("every weight abstained: no gradient reached any parameter.")
        return ShardedVotes(self.tally, self.count - len(found), [text for _, text in found])


def check_folds(folds: Counter[str], tally: Tally) -> None:
    """Exactly one finished gradient per weight and step; each wrong number has its usual cause."""
    for name in tally.parameters:
        if folds[name] == 1:
            continue
        if not folds:
            cause = "no gradient arrived at all: is gradient synchronisation switched off?"
        elif folds[name] == 0:
            cause = "its gradient never arrived: the layer took no part in the loss, or its sync is switched off."
        else:
            cause = IN_PIECES
        raise UnsafeResult(f"weight {name!r} was folded {folds[name]} times in one step; {cause}")


def check_finished(model: nn.Module) -> None:
    """After a step nothing may be left over: a part of a gradient that came after its fold is in no vote."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "to_local") or parameter.grad is not None:
            raise UnsafeResult(
                f"weight {name!r} got a part of its gradient after it was folded; {IN_PIECES} "
                "Recompute without reentrant checkpointing."
            )
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for group in getattr(state, "_fsdp_param_groups", None) or []:
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)
                late = whole is not None and whole.grad is not None
                if late or held.unsharded_accumulated_grad is not None:
                    raise UnsafeResult(f"a gradient was left behind unfolded in a step; {IN_PIECES}")


def save_sharded(
    group: Group,
    votes: ShardedVotes,
    sharded: Sharded,
    checkpoint: Checkpoint,
    out: Path,
    *,
    target_hash: str,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """All processes call it; the votes come out whole or not at all. `out` must be on a disk all can reach.

    A path ending in .safetensors becomes one file, written by rank 0; any other path a folder with one file per
    process and an index, written side by side. Both are read like any votes file."""
    about = {"format": "gradfix.votes", "count": str(votes.count), "rule": "majority"}
    about |= {"target_hash": target_hash, **({"origin": json.dumps(dict(origin))} if origin else {})}
    shapes = _disk_shapes(votes, sharded, checkpoint)
    if out.suffix == ".safetensors":
        staging = out.with_name(f".{out.name}.staged")
        _write(group, votes, sharded, shapes, dict.fromkeys(shapes, (0, staging)), about)
        with together(group):
            if group.leads:
                seal(staging)
                os.replace(staging, out)
        return
    owners = _owners(shapes, sharded.names, group.size)
    with ExitStack() as held:
        with together(group):
            folder = str(held.enter_context(staged_folder(out, overwrite=True))) if group.leads else ""
        home = Path(group.gather(folder)[0])
        files = [home / f"votes-{rank + 1:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)]
        _write(group, votes, sharded, shapes, {disk: (r, files[r]) for disk, r in owners.items()}, about)
        with together(group):
            if group.leads:
                used = sorted(set(owners.values()))
                layout = {files[r].name: [disk for disk in owners if owners[disk] == r] for r in used}
                write_index(home, layout, 0, always=True)
        with together(group):
            held.close()


def _disk_shapes(votes: ShardedVotes, sharded: Sharded, checkpoint: Checkpoint) -> dict[str, torch.Size]:
    """Every votes tensor the file will hold, in the order they are put together."""
    names, voted = sharded.names, votes.tally.parameters
    parameters = dict(sharded.model.named_parameters())
    split = {source for place in names.fused.values() for source in place.sources}
    shapes = {names.renamed.get(n, n): parameters[n].shape for n in voted if n not in split}
    whole = {disk: place for disk, place in names.fused.items() if all(s in voted for s in place.sources)}
    shapes |= {disk: place.shape for disk, place in whole.items()}
    return {disk: shape for disk, shape in shapes.items() if disk in checkpoint}


def _owners(shapes: Mapping[str, torch.Size], names: NameMap, size: int) -> dict[str, int]:
    """Who writes which tensor: the largest first to whoever has least, parts of one module tensor together."""
    clusters: dict[str, list[str]] = {}
    for disk in shapes:
        key = min(names.fused[disk].sources) if disk in names.fused else disk
        clusters.setdefault(key, []).append(disk)
    sizes = {key: sum(shapes[disk].numel() for disk in members) for key, members in clusters.items()}
    loads = [0] * size
    owners: dict[str, int] = {}
    for key in sorted(clusters, key=lambda key: -sizes[key]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[key]
        owners |= dict.fromkeys(clusters[key], rank)
    return {disk: owners[disk] for disk in shapes}


def _write(
    group: Group,
    votes: ShardedVotes,
    sharded: Sharded,
    shapes: Mapping[str, torch.Size],
    places: Mapping[str, tuple[int, Path]],
    about: Mapping[str, str],
) -> None:
    """`places` has who writes each tensor, and the file; every process walks through all of them, in step."""
    kind = dtype_for(votes.count)
    own = {disk: TensorInfo(tuple(shapes[disk]), kind) for disk in shapes if places[disk][0] == group.rank}
    parameters, nobody = dict(sharded.model.named_parameters()), (0, Path())
    slices = dict(votes.tally.items())
    walk = whole_tensors(group, slices, parameters, sharded.names, lambda disk: places.get(disk, nobody)[0])
    if not own:
        for _ in walk:
            pass
    else:
        with SafetensorsWriter(places[next(iter(own))][1], own, about) as writer:
            order = iter(own)
            for disk, whole in walk:
                if disk not in own:
                    continue
                if disk != next(order):
                    raise OutputError("the votes arrived out of order; this is a bug, please report it.")
                writer.write(whole.to(kind))
            writer.close()
    group.gather(None)
