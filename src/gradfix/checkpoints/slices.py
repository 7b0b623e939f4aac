"""Read and write the slices of a sharded model: no process ever holds more than one whole tensor.

A process owns consecutive rows of every parameter. Where a parameter is one tensor on disk its rows are one
range of the file; where it is put together from several (experts), only the parts that overlap are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradfix.checkpoints.names import NameMap, Window
from gradfix.checkpoints.weights import Checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.system.processes import Group


@dataclass(frozen=True)
class Rows:
    """Entries first .. first + count of the flattened parameter, and where they belong."""

    first: int
    count: int


def rows_of(parameter: Any) -> Rows:
    """The part of a parameter this process owns; FSDP cuts along the first dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not hasattr(parameter, "placements"):
        return Rows(0, parameter.numel())
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    width = parameter.shape[1:].numel()
    count = torch.Size(shape).numel()
    return Rows(offset[0] * width if count else 0, count)


def is_split(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own_slice(tensor: Any, like: Any) -> Tensor:
    """What this process owns of a tensor that belongs to the parameter `like`: all of it where that is not split."""
    found: Tensor = tensor.to_local() if is_split(tensor) else tensor
    if is_split(tensor) or not is_split(like):
        return found
    rows = rows_of(like)
    return found.reshape(-1)[rows.first : rows.first + rows.count].view(like.to_local().shape)


def whole(tensor: Any) -> Tensor:
    """A tensor put together on every process; all must ask for it, in step."""
    found: Tensor = tensor.full_tensor() if is_split(tensor) else tensor
    return found


class Wholes(Mapping[str, Tensor]):
    """Tensors of which some are split, put together when they are asked for; all processes must, in step."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return whole(self.tensors[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def split_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, split as the parameter `like` is."""
    from torch.distributed.tensor import DTensor

    if not is_split(like) or not tensor.ndim:
        return tensor
    own = own_slice(tensor, like).to(like.device).clone()
    split: Tensor = DTensor.from_local(own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())  # type: ignore[attr-defined]
    return split


def on_the_leader(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in the memory of the process that writes, one after the other; the others keep none."""
    found = {}
    for name, tensor in tensors.items():
        put_together = whole(tensor.detach())
        if group.leads:
            found[name] = put_together.cpu()
    return found


@torch.no_grad()
def load_slices(model: nn.Module, names: NameMap, checkpoint: Checkpoint) -> None:
    """Fill every parameter's local slice; every parameter must find its weights."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found = read_rows(name, parameter, rows_of(parameter), names, checkpoint)
        local.copy_(found.view(local.shape))


def read_rows(name: str, like: Tensor, rows: Rows, names: NameMap, checkpoint: Checkpoint) -> Tensor:
    """Entries of module tensor `name`, flat, in the file's own dtype or (where fused) in that of `like`."""
    if name in names.renamed:
        disk = names.renamed[name]
        check_stored(disk, like.shape, checkpoint)
        return checkpoint.span(disk, rows.first, rows.count)
    flat = torch.full((rows.count,), float("nan"), dtype=like.dtype)
    for disk, place in names.fused.items():
        if name in place.sources:
            if disk not in checkpoint:
                raise CorruptInput(f"{checkpoint} lacks {disk!r}. The file is incomplete.")
            _fill(flat, rows, name, place, checkpoint, disk)
    if bool(flat.isnan().any()):
        raise CorruptInput(f"{checkpoint} does not hold all of {name!r}, or holds NaN in it.")
    return flat


def check_stored(disk: str, shape: torch.Size, checkpoint: Checkpoint) -> None:
    """The file must hold this tensor in this shape."""
    if disk not in checkpoint:
        raise CorruptInput(f"{checkpoint} lacks {disk!r}. The file is incomplete or of another model.")
    if checkpoint.info(disk).shape != tuple(shape):
        raise IncompatibleCheckpoints(
            f"{checkpoint}: tensor {disk!r} is {list(checkpoint.info(disk).shape)}, but the config says {list(shape)}."
        )


def _fill(flat: Tensor, rows: Rows, name: str, place: Any, checkpoint: Checkpoint, disk: str) -> None:
    """Copy what one disk tensor holds of entries `rows` of module tensor `name`."""
    last = rows.first + rows.count
    if isinstance(place, Window) and place.stride == torch.empty(place.shape, device="meta").stride():
        first, stop = max(rows.first, place.offset), min(last, place.offset + place.shape.numel())
        if first < stop:
            piece = checkpoint.span(disk, first - place.offset, stop - first)
            flat[first - rows.first : stop - rows.first] = piece.to(flat.dtype)
        return
    for there, values in _scattered(name, place, checkpoint, disk):
        inside = (there >= rows.first) & (there < last)
        flat[there[inside] - rows.first] = values[inside].to(flat.dtype)


def _scattered(name: str, place: Any, checkpoint: Checkpoint, disk: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Flat places in the module tensor and the values that belong there."""
    values = checkpoint.read(disk).reshape(-1)
    if isinstance(place, Window):
        where = torch.full(place.shape, place.offset, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(place.shape, place.stride, strict=True)):
            step = torch.arange(size) * stride
            where += step.view([-1 if i == dim else 1 for i in range(len(place.shape))])
        yield where.reshape(-1), values
        return
    for source, there, here in place.pieces:
        if source == name:
            numbers = torch.arange(there.start, there.stop) if isinstance(there, slice) else there
            yield numbers, values[here]


def whole_tensors(
    group: Group, slices: Mapping[str, Tensor], parameters: Mapping[str, Any], names: NameMap, owner: Any
) -> Iterator[tuple[str, Tensor]]:
    """Put disk tensors together one after another, each on the process `owner(disk name)` only.

    All processes must walk through it, in step."""
    split = {source for place in names.fused.values() for source in place.sources}
    for name in slices:
        if name not in split:
            disk = names.renamed.get(name, name)
            whole = gathered(group, slices[name], parameters[name], owner(disk))
            if whole is not None:
                yield disk, whole
    done: set[str] = set()
    for disk, place in names.fused.items():
        if disk in done or not all(source in slices for source in place.sources):
            continue
        # All disk tensors of the same module tensors at once, so that each is gathered once.
        same = [other for other, p in names.fused.items() if set(p.sources) & set(place.sources)]
        done.update(same)
        sources = dict.fromkeys(source for other in same for source in names.fused[other].sources)
        held = {s: gathered(group, slices[s], parameters[s], owner(disk)) for s in sources}
        for other in same:
            if group.rank == owner(disk):
                yield other, names.fused[other].take(held)  # type: ignore[arg-type]


def gathered(group: Group, local: Tensor, parameter: Any, owner: int) -> Tensor | None:
    """The whole tensor on one process, from the slices of those that hold the first replica."""
    rows = rows_of(parameter)
    where = group.gather((rows.first, rows.count))
    whole = torch.zeros(parameter.numel(), dtype=torch.int32) if group.rank == owner else None
    sent: set[tuple[int, int]] = set()
    for rank, (first, count) in enumerate(where):
        if count == 0 or (first, count) in sent:
            continue
        sent.add((first, count))
        if rank == owner == group.rank and whole is not None:
            whole[first : first + count] = local.reshape(-1).to("cpu", torch.int32)
        elif group.rank == rank:
            dist.send(local.reshape(-1).to("cpu", torch.int32), owner)
        elif whole is not None:
            piece = torch.empty(count, dtype=torch.int32)
            dist.recv(piece, rank)
            whole[first : first + count] = piece
    return None if whole is None else whole.view(parameter.shape)
