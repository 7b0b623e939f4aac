"""On-disk names and module names, mapped in one place.

transformers renames (and sometimes fuses) tensors when it loads them: a ViT's
`vit.layers.0.attention.k_proj` is `vit.encoder.layer.0.attention.attention.key` on disk, and
Mixtral's experts are one tensor in memory and many on disk. Votes are taken from modules, files
speak on-disk names; everything that crosses that border goes through a `NameMap`. The map is read off
weightless stand-ins, so it costs no memory, and works for models on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradfix.errors import IncompatibleCheckpoints

Index = slice | Tensor


@dataclass(frozen=True)
class Window:
    """A disk tensor that is a strided window on one module tensor (an expert, a chunk, a transpose)."""

    source: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self._window(tensors[self.source].contiguous()).contiguous()

    def put(self, value: Tensor, outputs: Mapping[str, Tensor]) -> None:
        self._window(outputs[self.source]).copy_(value)

    def _window(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Mosaic:
    """A disk tensor put together from pieces of several module tensors, or reordered inside one.

    Each piece is (module tensor, flat places there, flat places here)."""

    shape: torch.Size
    pieces: tuple[tuple[str, Index, Index], ...]

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        first = tensors[self.pieces[0][0]]
        out = torch.empty(self.shape.numel(), dtype=first.dtype, device=first.device)
        for source, there, here in self.pieces:
            out[here] = tensors[source].reshape(-1)[there]
        return out.view(self.shape)

    def put(self, value: Tensor, outputs: Mapping[str, Tensor]) -> None:
        flat = value.reshape(-1)
        for source, there, here in self.pieces:
            outputs[source].view(-1)[there] = flat[here]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for source, _, _ in self.pieces)


@dataclass(frozen=True)
class NameMap:
    """How one model's tensors are called on disk.

    `renamed` maps one module tensor to one disk tensor; `fused` says where in the module the few disk
    tensors live that are split, stacked or reordered; `aliases` are further disk names of a tied tensor,
    present only when the file really stores the copies."""

    renamed: dict[str, str]
    fused: dict[str, Window | Mosaic]
    shapes: dict[str, torch.Size]
    aliases: dict[str, str] = field(default_factory=dict)  # disk name -> module name of the tensor it repeats

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename (and split) tensors named as in the module; tensors not in the map keep their names."""
        split = {source for place in self.fused.values() for source in place.sources}
        out = {self.renamed.get(name, name): value for name, value in tensors.items() if name not in split}
        for disk, place in self.fused.items():
            present = [source in tensors for source in place.sources]
            if all(present):
                out[disk] = place.take(tensors)
            elif any(present):
                lacking = next(source for source in place.sources if source not in tensors)
                raise IncompatibleCheckpoints(
                    f"on-disk tensor {disk!r} needs module tensor {lacking!r}, which is not there. "
                    "Frozen and trained parts of one fused tensor cannot be written apart."
                )
        return out | {disk: tensors[name] for disk, name in self.aliases.items() if name in tensors}

    def to_module(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse: tensors named as on disk, renamed (and fused) for the module."""
        back = {disk: name for name, disk in self.renamed.items()}
        out: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if name in self.aliases:
                out.setdefault(self.aliases[name], value)
            elif name not in self.fused:
                out[back.get(name, name)] = value
            else:
                self._check_complete(name, tensors)
                for source in self.fused[name].sources:
                    if source not in out:
                        out[source] = torch.zeros(self.shapes[source], dtype=value.dtype, device=value.device)
                self.fused[name].put(value, out)
        return out

    def _check_complete(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        own = set(self.fused[name].sources)
        lacking = [d for d, place in self.fused.items() if own & set(place.sources) and d not in tensors]
        if lacking:
            raise IncompatibleCheckpoints(
                f"module tensor {min(own)!r} is made of several on-disk tensors; {lacking[0]!r} is missing."
            )

    def disk_names(self) -> list[str]:
        return [*self.renamed.values(), *self.fused, *self.aliases]


def name_map(model: nn.Module, on_disk: Iterable[str] = ()) -> NameMap:
    """The map for one model; `on_disk` names settle prefixes that the model class cannot know."""
    owner: dict[int, str] = {}
    same_as: dict[str, str] = {}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same_as[name] = owner.setdefault(id(parameter), name)
        shapes[name] = parameter.shape
    renamed, fused = _transformers_map(model, shapes)
    known = set(on_disk)
    settle = _settle_prefix(model, [*renamed.values(), *fused], known)
    renamed = {name: settle(disk) for name, disk in renamed.items()}
    fused = {settle(disk): place for disk, place in fused.items()}
    tied = {name: first for name, first in same_as.items() if name != first and name in renamed}
    plain = {name: disk for name, disk in renamed.items() if name not in tied}
    aliases: dict[str, str] = {}
    for name, first in tied.items():
        disk = renamed[name]
        if disk not in known or first not in plain:
            continue
        if plain[first] in known:
            aliases[disk] = first
        else:  # the file stores the tied tensor under this name only
            plain[first] = disk
    fused = {d: p for d, p in fused.items() if all(same_as[source] == source for source in p.sources)}
    return NameMap(plain, fused, {name: shapes[name] for name in owner.values()}, aliases)


def disk_names(model: nn.Module, on_disk: Iterable[str] = ()) -> dict[str, str]:
    """Module name -> on-disk name, for tensors that map one to one."""
    return name_map(model, on_disk).renamed


class _StandIn(Tensor):
    """A weightless tensor that stays a view of itself, so that offsets and strides tell where data went."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self


_Map = tuple[dict[str, torch.Size], dict[str, str], dict[str, Window | Mosaic]]
_KNOWN_MAPS: WeakKeyDictionary[nn.Module, _Map] = WeakKeyDictionary()  # working one out takes as long as a small vote
_LAST: list[tuple[Any, _Map]] = []  # architecture asked for last: of several models of one, the first is worked out


def _transformers_map(
    model: nn.Module, shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, str], dict[str, Window | Mosaic]]:
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {name: name for name in shapes}, {}
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in shapes}, {}
    known = _KNOWN_MAPS.get(model)
    if known is None or known[0] != shapes:
        kind = (type(model), model.config.to_dict(), getattr(model, "_weight_conversions", None))
        if not _LAST or _LAST[0][0] != kind or _LAST[0][1][0] != shapes:
            _LAST[:] = [(kind, (dict(shapes), *_reverted(model, shapes, revert_weight_conversion)))]
        known = _KNOWN_MAPS[model] = _LAST[0][1]
    return known[1:]


def _reverted(
    model: nn.Module, shapes: Mapping[str, torch.Size], revert: Callable[..., dict[str, Tensor]]
) -> tuple[dict[str, str], dict[str, Window | Mosaic]]:
    nothing: dict[str, Tensor] = {}
    if revert(model, nothing) is nothing:  # no conversion of this model is known
        return {name: name for name in shapes}, {}
    stand_ins = {n: torch.empty(shape, device="meta").as_subclass(_StandIn) for n, shape in shapes.items()}
    homes = {tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()}
    renamed: dict[str, str] = {}
    fused: dict[str, Window | Mosaic] = {}
    lost: list[str] = []
    for disk, tensor in revert(model, dict(stand_ins)).items():
        source = homes.get(tensor.untyped_storage()._cdata)
        if source is None:
            lost.append(disk)
        elif tensor is stand_ins[source]:
            renamed[source] = disk
        else:
            fused[disk] = Window(source, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    covered = {*renamed, *(part.source for part in fused.values() if isinstance(part, Window))}
    if lost:
        rest = {name: shapes[name] for name in shapes if name not in covered}
        fused |= _numbered(lambda tensors: revert(model, tensors), rest)
    return renamed, fused


def _numbered(
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]], shapes: Mapping[str, torch.Size]
) -> dict[str, Window | Mosaic]:
    """Push coordinate numbers instead of weights through the conversion, and read off where they land."""
    starts: dict[str, int] = {}
    numbered: dict[str, Tensor] = {}
    offset = 0
    for name, shape in shapes.items():
        starts[name] = offset
        numbered[name] = torch.arange(offset, offset + shape.numel()).view(shape)
        offset += shape.numel()
    return {
        disk: Mosaic(numbers.shape, _pieces(numbers.reshape(-1), starts, shapes))
        for disk, numbers in revert(numbered).items()
    }


def _pieces(
    numbers: Tensor, starts: Mapping[str, int], shapes: Mapping[str, torch.Size]
) -> tuple[tuple[str, Index, Index], ...]:
    pieces = []
    for name, start in starts.items():
        here = ((numbers >= start) & (numbers < start + shapes[name].numel())).nonzero().reshape(-1)
        if len(here):
            pieces.append((name, _run(numbers[here] - start), _run(here)))
    return tuple(pieces)


def _run(places: Tensor) -> Index:
    """A slice where the places are consecutive, otherwise the places themselves."""
    first = int(places[0])
    if bool((places == torch.arange(first, first + len(places))).all()):
        return slice(first, first + len(places))
    return places


def _settle_prefix(model: nn.Module, disk: list[str], known: set[str]) -> Callable[[str], str]:
    """A head-less model may sit in a file saved with a head, under a prefix (and the reverse).

    The change that finds most names wins; when two find equally many, the model class decides. A prefix that is only
    guessed must be that of most names: a head of another task may end in the name of a head of this model. Names that
    the file lacks (a new pooler) are changed as the others are where the prefix is the class's own."""
    if not known or not disk:
        return lambda name: name
    own = getattr(model, "base_model_prefix", "") or ""
    seen = {name[: -len(d)] for d in disk[:1] + disk[-1:] for name in known if name.endswith("." + d)}
    leading = {".".join(name.split(".")[:1]) + "." for name in disk if "." in name}
    changes: list[_Change] = [_Change()]
    for prefix in [p for p in (own, "model", "module") if p]:
        certain = prefix == own
        changes += [
            _Change(add=f"{prefix}.", known=known, whole=certain and not hasattr(model, prefix)),
            _Change(remove=f"{prefix}.", known=known, whole=certain),
        ]
    guesses = [_Change(add=p, known=known) for p in sorted(seen)] + [
        _Change(remove=p, known=known) for p in sorted(leading)
    ]
    changes += [change for change in guesses if sum(change(name) != name for name in disk) * 2 > len(disk)]
    found = [sum(change(name) in known for name in disk) for change in changes]
    return changes[found.index(max(found))]


@dataclass(frozen=True)
class _Change:
    """One prefix added or removed, where the file knows the name only so; `whole`: also where it knows neither."""

    add: str = ""
    remove: str = ""
    known: Collection[str] = ()
    whole: bool = False

    def __call__(self, name: str) -> str:
        changed = self.add + name.removeprefix(self.remove)
        return changed if name not in self.known and (self.whole or changed in self.known) else name
