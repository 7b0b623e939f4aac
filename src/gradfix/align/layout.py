"""A family's spec bound to one checkpoint: its head counts, its depth, every group and its size.

It says for each tensor name which permutation moves which axis, and refuses what the spec does not
cover: a tensor left as it is while its neighbours move would break the model in silence. Names and shapes
do not tell how many attention heads there are, and a wrong guess permutes across heads, so the caller, the
config or the model object says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from torch import nn

from gradfix.align.families import FAMILIES
from gradfix.align.spec import AxisPart, Family, Tower
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from gradfix.registry import unknown

Residual = Literal["shared", "per-junction"]
Shapes = Mapping[str, tuple[int, ...]]
Axes = tuple[tuple[AxisPart, ...], ...]
POINTS = "abcd"
HeadCounts = int | Mapping[str, int]
HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head", "heads")
TOWER_KEYS = {"vision": ("vision_config", "vision_cfg"), "text": ("text_config", "text_cfg")}


class LayoutOptions(TypedDict, total=False):
    """What names and shapes may not tell: the family, and head counts (a number, or {"vision": 12, "text": 8})."""

    family: str | None
    heads: HeadCounts | None
    kv_heads: HeadCounts | None
    config: Mapping[str, Any] | None
    residual: Residual


class TensorPlace(NamedTuple):
    """Where a tensor stands: its tower and, inside the stack, its layer."""

    name: str
    tower: Tower
    layer: int | None

    def group(self, word: str) -> str:
        """The full name of a group written as `word` in the spec."""
        if self.layer is None:
            return word
        return f"{self.tower.label}{self.layer}" + (f".{word}" if word else "")


@dataclass(frozen=True)
class AxisMap:
    """Which permutation moves which axis of which tensor."""

    family: Family
    heads: Mapping[str, int]
    kv_heads: Mapping[str, int]
    layers: Mapping[str, int]
    residual: Residual = "shared"
    replaced: Mapping[str, str] = field(default_factory=dict)
    attention: Mapping[str, int] = field(default_factory=dict)  # entries of every q and k axis, all heads

    def axes(self, name: str, shape: tuple[int, ...]) -> Axes:
        """Per axis of the tensor, the parts it consists of (one, or three where q, k, v are packed)."""
        found = self.family.find(name)
        if found is None:
            raise IncompatibleCheckpoints(
                f"{name!r} is not part of a {self.family.name} model; it cannot be permuted with one. "
                "Leave it out, or align checkpoints that both have it."
            )
        row, layer = found
        words = ("-",) * len(shape) if row.axes == ("*",) else row.axes
        if len(words) != len(shape):
            raise IncompatibleCheckpoints(
                f"{name!r} has {len(shape)} axes, but a {self.family.name} model has {len(words)} there."
            )
        place = TensorPlace(name, row.tower, layer)
        return tuple(self._axis(place, word, size) for word, size in zip(words, shape, strict=True))

    def stacks(self, shapes: Shapes) -> dict[str, tuple[int, int]]:
        """Every group with its shape (copies, size); tensors that disagree about one are an error."""
        stacks: dict[str, tuple[int, int]] = {}
        for name, shape in shapes.items():
            for part in (part for axis in self.axes(name, shape) for part in axis):
                for group, stack in part.stacks().items():
                    if stacks.setdefault(group, stack) != stack:
                        raise IncompatibleCheckpoints(
                            f"{name!r} has {stack[1]} entries along {group!r}, other tensors have "
                            f"{stacks[group][1]}. Check the number of heads and that the checkpoint is whole."
                        )
        return stacks

    def _axis(self, place: TensorPlace, word: str, size: int) -> tuple[AxisPart, ...]:
        word, _, label = self.replaced.get(word, word).partition(":")
        if word == "-":
            return (AxisPart((1, 1, size)),)
        if word.startswith("residual@"):
            return (AxisPart((1, 1, size), inner=self._stream(place, word.removeprefix("residual@"))),)
        if word == "qkv":
            third, rest = divmod(size, 3)
            if rest:
                raise IncompatibleCheckpoints(f"{place.name!r}: {size} entries are not q, k and v packed in one.")
            return tuple(self._heads(place, kind, third, label) for kind in word)
        if word in ("q", "k", "v", "o", "order"):
            return (self._heads(place, word, size, label),)
        if word in ("q_norm", "k_norm"):
            return (self._norm(place, word[0], size),)
        return (AxisPart((1, 1, size), inner=place.group(word)),)

    def _stream(self, place: TensorPlace, point: str) -> str:
        if self.residual == "shared":
            return place.tower.stream
        other, _, point = point.rpartition(".")
        tower = next(t for t in self.family.towers if t.name == other) if other else place.tower
        if point == "end":
            number = tower.parts_per_layer * self.layers.get(tower.name, 0)
        elif point == "0":
            number = 0
        else:
            number = tower.parts_per_layer * (place.layer or 0) + POINTS.index(point)
        return f"{tower.stream}@{number}" if number == 0 else f"{tower.label}residual@{number}"

    def _heads(self, place: TensorPlace, kind: str, size: int, label: str) -> AxisPart:
        heads, groups = self._head_counts(place.tower)
        queries = 1 if kind in ("k", "v") else heads // groups
        inner, rest = divmod(size, groups * queries)
        if rest or (kind == "order" and inner != 1):
            raise IncompatibleCheckpoints(
                f"{place.name!r}: {size} entries do not divide into {groups * queries} heads. "
                "Give the right numbers with heads= and kv_heads=."
            )
        scope = place.group(label)
        order = place.tower.name if place.tower.tied_heads and not label else scope
        inside = {"q": "" if self.family.rope else f"{scope}.qk", "v": f"{scope}.vo", "order": ""}
        return AxisPart(
            (groups, queries, inner),
            order=f"{order}.heads",
            queries=f"{order}.queries" if queries > 1 else "",
            inner=inside[{"k": "q", "o": "v"}.get(kind, kind)],
        )

    def _norm(self, place: TensorPlace, kind: str, size: int) -> AxisPart:
        """A norm as wide as all heads has its own weights for each, which must move with it."""
        heads, groups = self._head_counts(place.tower)
        entries = self.attention.get(place.group(kind), 0)
        if size == entries:
            return self._heads(place, kind, size, label="")
        if size * (heads if kind == "q" else groups) == entries:
            return AxisPart((1, 1, size))
        raise IncompatibleCheckpoints(
            f"{place.name!r} has {size} entries, which is neither one head nor all heads of its "
            f"attention ({entries} entries). Check heads= and kv_heads=, or transport without alignment."
        )

    def _head_counts(self, tower: Tower) -> tuple[int, int]:
        heads = self.heads.get(tower.name, 0)
        if not heads:
            tower_key = f'{{"{tower.name}": 12}}' if tower.name in TOWER_KEYS else "12"
            raise UsageError(
                f"the number of attention heads of this {self.family.name} model is not known: "
                f"pass heads={tower_key}, or give a folder with config.json or the model object."
            )
        groups = self.kv_heads.get(tower.name, 0) or heads
        if heads % groups:
            raise UsageError(f"{heads} query heads do not divide into {groups} key/value heads.")
        return heads, groups


def build_layout(
    shapes: Shapes,
    *,
    family: str | None = None,
    heads: HeadCounts | None = None,
    kv_heads: HeadCounts | None = None,
    config: Mapping[str, Any] | None = None,
    residual: Residual = "shared",
) -> AxisMap:
    """Bind the family (found by its tensor names unless given) to the tensors of one checkpoint."""
    if residual not in ("shared", "per-junction"):
        raise UsageError(f"no residual mode called {residual!r}; there are: shared, per-junction.")
    names = list(shapes)
    chosen = detect_family(names) if family is None else _family(family)
    if odd := chosen.unknown(names):
        raise _not_covered(chosen, odd)
    layers: dict[str, int] = {}
    tables: dict[str, int] = {}
    attention: dict[str, int] = {}
    for name, shape in shapes.items():
        row, layer = chosen.find(name) or (chosen.towers[0].rows[0], None)
        tower = row.tower.name
        layers[tower] = max(layers.get(tower, 0), 1 + (-1 if layer is None else layer))
        if row.axes[-1] == "order":
            tables[tower] = shape[-1]
        if row.axes[0] in ("q", "k"):
            attention[TensorPlace(name, row.tower, layer).group(row.axes[0])] = shape[0]
    given, given_kv = heads_in_config(config or {})
    towers = {tower.name for tower in chosen.towers}
    fallback = chosen.fallback
    replaced = {}
    if fallback and not any(name.endswith(fallback.unless) for name in names):
        replaced = {fallback.group: fallback.instead}
    return AxisMap(
        chosen,
        per_tower(towers, heads, given) or tables,
        per_tower(towers, kv_heads, given_kv),
        layers,
        residual,
        replaced,
        attention,
    )


def layout_of(checkpoint: Checkpoint, **options: Unpack[LayoutOptions]) -> AxisMap:
    """The spec of a checkpoint; head counts come from its own config unless given."""
    options["config"] = options.get("config") or config_of(checkpoint)
    return build_layout({name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()}, **options)


def detect_family(names: list[str]) -> Family:
    """The family whose spec covers every name; the error names what the nearest one does not cover."""
    misses = {family.name: family.unknown(names) for family in FAMILIES.values()}
    best = min(misses, key=lambda name: len(misses[name]))
    if misses[best]:
        raise _not_covered(FAMILIES[best], misses[best])
    return FAMILIES[best]


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise UsageError(unknown("family", name, FAMILIES))
    return FAMILIES[name]


def _not_covered(family: Family, odd: list[str]) -> IncompatibleCheckpoints:
    shown = ", ".join(repr(name) for name in odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    return IncompatibleCheckpoints(
        f"no permutation spec covers these tensors (nearest family: {family.name}): {shown}. "
        f"Families: {', '.join(FAMILIES)}. Transport without alignment, or leave these tensors out."
    )


def per_tower(towers: set[str], given: HeadCounts | None, found: Mapping[str, int]) -> dict[str, int]:
    """Head counts of every tower: as given by the caller, else as found in the config."""
    if isinstance(given, int):
        return dict.fromkeys(towers, given)
    if given is not None:
        if wrong := sorted(set(given) - towers):
            raise UsageError(unknown("tower", wrong[0], sorted(filter(None, towers))))
        return dict(given)
    if set(found) == {""}:
        return dict.fromkeys(towers, found[""])
    return dict(found)


def heads_in_config(config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Query heads and key/value heads per tower ("" where there is one), from a model's config."""
    config = config.get("model_cfg", config)
    heads: dict[str, int] = {}
    kv_heads: dict[str, int] = {}
    for tower, keys in {"": (), **TOWER_KEYS}.items():
        part = next((config[key] for key in keys if isinstance(config.get(key), Mapping)), {}) if tower else config
        count = next((part[key] for key in HEAD_KEYS if part.get(key)), None)
        if not count and "width" in part and "layers" in part:
            count = part["width"] // part.get("head_width", 64)  # an open_clip vision tower
        if count:
            heads[tower] = int(count)
        if part.get("num_key_value_heads"):
            kv_heads[tower] = int(part["num_key_value_heads"])
    if len(heads) > 1:
        heads.pop("", None)
    return heads, kv_heads


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known about the model behind a checkpoint: its own config, or its folder's config.json."""
    module = getattr(checkpoint, "module", None)
    if isinstance(module, nn.Module):
        return _module_config(module)
    if checkpoint.path is None:
        return {}
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for file in ("config.json", "open_clip_config.json"):
        if (folder / file).is_file():
            config = _read_json(folder / file)
            if any(heads_in_config(config)):
                return config
    return {}


def _module_config(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    towers: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(count := getattr(part, "num_heads", None), int):
            towers["vision_config" if name.startswith("visual.") else "text_config"] = {"num_heads": count}
    return towers["text_config"] if set(towers) == {"text_config"} else towers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CorruptInput(f"{path} is not a JSON object. Restore it, or pass heads= and leave it out.")
    return config
