"""On-disk names and module names, mapped in one place.

transformers renames (and sometimes fuses) tensors when it loads them: a ViT's
`vit.layers.0.attention.k_proj` is `vit.encoder.layer.0.attention.attention.key` on disk, and
Mixtral's experts are one tensor in memory and many on disk. Votes are taken from modules, files
speak on-disk names; everything that crosses that border goes through `to_disk` and `to_module`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfix.errors import IncompatibleCheckpoints


@dataclass(frozen=True)
class NameMap:
    """How one model's tensors are called on disk.

    `renamed` maps one module tensor to one disk tensor. `fused` maps a disk tensor to the flat
    coordinates of the module tensor that holds it, for the few that are split or stacked."""

    renamed: dict[str, str]
    fused: dict[str, tuple[str, Tensor]]
    shapes: dict[str, torch.Size]

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename (and split) tensors named as in the module; tensors not in the map keep their names."""
        split_sources = {source for source, _ in self.fused.values()}
        out = {self.renamed.get(name, name): value for name, value in tensors.items() if name not in split_sources}
        for disk, (source, coordinates) in self.fused.items():
            if source in tensors:
                out[disk] = tensors[source].reshape(-1)[coordinates.reshape(-1)].reshape(coordinates.shape)
        return out

    def to_module(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse: tensors named as on disk, renamed (and fused) for the module."""
        back = {disk: name for name, disk in self.renamed.items()}
        out: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if name not in self.fused:
                out[back.get(name, name)] = value
                continue
            source, coordinates = self.fused[name]
            if source not in out:
                out[source] = torch.zeros(self.shapes[source], dtype=value.dtype)
            out[source].view(-1)[coordinates.reshape(-1)] = value.reshape(-1)
        return out

    def disk_names(self) -> list[str]:
        return [*self.renamed.values(), *self.fused]


def name_map(model: nn.Module, on_disk: Iterable[str] = ()) -> NameMap:
    """The map for one model; `on_disk` names settle prefixes that the model class cannot know."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    renamed, fused = _transformers_map(model, tensors)
    known = set(on_disk)
    if known:
        renamed, fused = _settle_prefix(model, renamed, fused, known)
    return NameMap(renamed, fused, shapes)


def disk_names(model: nn.Module, on_disk: Iterable[str] = ()) -> dict[str, str]:
    """Module name -> on-disk name, for tensors that map one to one."""
    return name_map(model, on_disk).renamed


def _transformers_map(
    model: nn.Module, tensors: dict[str, Tensor]
) -> tuple[dict[str, str], dict[str, tuple[str, Tensor]]]:
    identity = {name: name for name in tensors}
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return identity, {}
    if not isinstance(model, PreTrainedModel):
        return identity, {}
    # Each tensor is replaced by a one-element stand-in whose value is its number: what comes back
    # under one name with the same number was only renamed.
    reverted = _revert(revert_weight_conversion, model, {n: t for n, t in tensors.items()})
    by_storage = {(t.data_ptr(), tuple(t.shape)): n for n, t in tensors.items() if t.numel()}
    renamed: dict[str, str] = {}
    leftovers: list[str] = []
    for disk, tensor in reverted.items():
        source = by_storage.get((tensor.data_ptr(), tuple(tensor.shape)))
        if source is not None and source not in renamed:
            renamed[source] = disk
        else:
            leftovers.append(disk)
    remaining = [name for name in tensors if name not in renamed]
    if not remaining:
        return renamed, {}
    return renamed, _fused_coordinates(revert_weight_conversion, model, tensors, remaining)


def _fused_coordinates(
    revert: object, model: nn.Module, tensors: dict[str, Tensor], remaining: list[str]
) -> dict[str, tuple[str, Tensor]]:
    """Push coordinate numbers instead of weights through the conversion, and read off where they land."""
    numbered: dict[str, Tensor] = {}
    starts: list[tuple[int, str]] = []
    offset = 0
    for name in remaining:
        size = tensors[name].numel()
        numbered[name] = torch.arange(offset, offset + size).view(tensors[name].shape)
        starts.append((offset, name))
        offset += size
    fused: dict[str, tuple[str, Tensor]] = {}
    for disk, numbers in _revert(revert, model, numbered).items():
        first = int(numbers.reshape(-1)[0])
        start, source = max(entry for entry in starts if entry[0] <= first)
        local = numbers - start
        if int(local.min()) < 0 or int(local.max()) >= tensors[source].numel():
            raise IncompatibleCheckpoints(
                f"on-disk tensor {disk!r} mixes several module tensors; gradfix cannot map it."
            )
        fused[disk] = (source, local)
    return fused


def _revert(revert: object, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(revert(model, tensors))  # type: ignore[operator]


def _settle_prefix(
    model: nn.Module,
    renamed: dict[str, str],
    fused: dict[str, tuple[str, Tensor]],
    known: set[str],
) -> tuple[dict[str, str], dict[str, tuple[str, Tensor]]]:
    """A head-less model may sit in a file saved with a head, under a prefix (and the reverse)."""
    disk = [*renamed.values(), *fused]
    missing = [name for name in disk if name not in known]
    if not missing:
        return renamed, fused
    prefixes = [getattr(model, "base_model_prefix", "") or "", "model", "module"]
    for prefix in (p + "." for p in prefixes if p):
        if all(prefix + name in known or name in known for name in disk):
            add = lambda name: name if name in known else prefix + name  # noqa: E731, B023
        elif all(name.removeprefix(prefix) in known or name in known for name in disk):
            add = lambda name: name if name in known else name.removeprefix(prefix)  # noqa: E731, B023
        else:
            continue
        return {m: add(d) for m, d in renamed.items()}, {add(d): v for d, v in fused.items()}
    return renamed, fused
