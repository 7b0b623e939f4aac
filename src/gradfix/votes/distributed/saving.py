"""Write votes that no process holds: every tensor is put together on the one process that writes it.

A path ending in .safetensors becomes one file, written by rank 0; any other path a folder with one file per
process and an index, written side by side. Both are read like any votes file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradfix.checkpoints.folder import write_index
from gradfix.checkpoints.names import NameMap
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.checkpoints.slices import whole_tensors
from gradfix.checkpoints.write import seal, staged_folder
from gradfix.errors import OutputError
from gradfix.system.processes import Group, together
from gradfix.vectors.signvotes import dtype_for
from gradfix.votes.distributed.sharded import ShardedVotes


def save_sharded(
    group: Group,
    votes: ShardedVotes,
    model: nn.Module,
    names: NameMap,
    checkpoint: Checkpoint,
    out: Path,
    *,
    target_hash: str,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """All processes call it; the votes come out whole or not at all. `out` must be on a disk all can reach."""
    metadata = {"format": "gradfix.votes", "count": str(votes.count), "rule": "majority",
                "target_hash": target_hash}  # fmt: skip
    if origin:
        metadata["origin"] = json.dumps(dict(origin))
    shapes = disk_shapes(votes, model, names, checkpoint)
    lone = out.suffix == ".safetensors"
    owners = dict.fromkeys(shapes, 0) if lone else dealt(shapes, names, group.size)
    if lone:
        staging = out.with_name(f".{out.name}.staged")
        _write(group, votes, model, names, shapes, owners, {0: staging}, metadata)
        with together(group):
            if group.leads:
                seal(staging)
                os.replace(staging, out)
        return
    files = {rank: f"votes-{rank + 1:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)}
    used = sorted(set(owners.values()))
    held = staged_folder(out, overwrite=True) if group.leads else None
    with together(group):
        folder = str(held.__enter__()) if held is not None else ""
    folder = group.gather(folder)[0]
    try:
        _write(
            group, votes, model, names, shapes, owners, {r: Path(folder) / files[r] for r in used}, metadata
        )
        with together(group):
            if held is not None:
                layout = {files[r]: [disk for disk, owner in owners.items() if owner == r] for r in used}
                write_index(Path(folder), layout, 0, always=True)
    except BaseException as error:
        if held is not None:
            held.__exit__(type(error), error, error.__traceback__)
        raise
    with together(group):
        if held is not None:
            held.__exit__(None, None, None)


def disk_shapes(
    votes: ShardedVotes, model: nn.Module, names: NameMap, checkpoint: Checkpoint
) -> dict[str, torch.Size]:
    """Every votes tensor the file will hold, in the order they are put together."""
    parameters = dict(model.named_parameters())
    split = {source for place in names.fused.values() for source in place.sources}
    voted = votes.tally.parameters
    shapes = {names.renamed.get(n, n): parameters[n].shape for n in voted if n not in split}
    shapes |= {
        disk: place.shape for disk, place in names.fused.items() if all(s in voted for s in place.sources)
    }
    return {disk: shape for disk, shape in shapes.items() if disk in checkpoint}


def dealt(shapes: Mapping[str, torch.Size], names: NameMap, size: int) -> dict[str, int]:
    """Tensors over processes, the largest first to whoever has least; parts of one module tensor together."""
    clusters: dict[Any, list[str]] = {}
    for disk in shapes:
        key = min(names.fused[disk].sources) if disk in names.fused else disk
        clusters.setdefault(key, []).append(disk)
    loads = [0] * size
    owners: dict[str, int] = {}
    for members in sorted(clusters.values(), key=lambda some: -sum(shapes[d].numel() for d in some)):
        rank = loads.index(min(loads))
        loads[rank] += sum(shapes[disk].numel() for disk in members)
        owners |= dict.fromkeys(members, rank)
    return {disk: owners[disk] for disk in shapes}


def _write(
    group: Group,
    votes: ShardedVotes,
    model: nn.Module,
    names: NameMap,
    shapes: Mapping[str, torch.Size],
    owners: Mapping[str, int],
    files: Mapping[int, Path],
    metadata: Mapping[str, str],
) -> None:
    kind = dtype_for(votes.count)
    own = {disk: TensorInfo(tuple(shapes[disk]), kind) for disk in shapes if owners[disk] == group.rank}
    slices = dict(votes.tally.items())
    walk = whole_tensors(group, slices, dict(model.named_parameters()), names, lambda d: owners.get(d, 0))
    if group.rank not in files:
        for _ in walk:
            pass
    else:
        with SafetensorsWriter(files[group.rank], own, metadata) as writer:
            order = iter(own)
            for disk, whole in walk:
                if disk not in own:
                    continue
                if disk != next(order):
                    raise OutputError("the votes arrived out of order; this is a bug, please report it.")
                writer.write(whole.to(kind))
            writer.close()
    group.gather(None)
