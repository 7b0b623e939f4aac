"""A family's spec bound to one checkpoint: its head counts, its depth, every group and its size.

The layout knows for each tensor name which permutation moves which axis. It is built from names
and shapes alone; the number of attention heads is in neither, so it comes from the caller, from
config.json, or from the model object, and is never guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from gradfix.align.families import FAMILIES
from gradfix.align.spec import Family, Part, Row, Tower
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from gradfix.registry import unknown

Residual = Literal["shared", "per-junction"]
Shapes = Mapping[str, tuple[int, ...]]
Axes = tuple[tuple[Part, ...], ...]
HeadCounts = int | Mapping[str, int]

POINTS = "abcd"
HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head")
TOWER_KEYS = {"vision": ("vision_config", "vision_cfg"), "text": ("text_config", "text_cfg")}


@dataclass(frozen=True)
class Layout:
    """Which permutation moves which axis of which tensor."""

    family: Family
    heads: Mapping[str, int]
    kv_heads: Mapping[str, int]
    layers: Mapping[str, int]
    residual: Residual = "shared"
    replaced: Mapping[str, str] = field(default_factory=dict)

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
        return tuple(self._axis(name, word, size, row, layer) for word, size in zip(words, shape, strict=True))

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

    def _axis(self, name: str, word: str, size: int, row: Row, layer: int | None) -> tuple[Part, ...]:
        word = self.replaced.get(word, word)
        word, _, label = word.partition(":")
        if word == "-":
            return (Part((1, 1, size)),)
        if word.startswith("residual@"):
            return (Part((1, 1, size), inner=self._stream(word.removeprefix("residual@"), row.tower, layer)),)
        if word == "qkv":
            if size % 3:
                raise IncompatibleCheckpoints(f"{name!r}: {size} rows are not q, k and v packed in one.")
            return tuple(self._heads(name, kind, size // 3, label, row.tower, layer) for kind in word)
        if word in ("q", "k", "v", "o", "order"):
            return (self._heads(name, word, size, label, row.tower, layer),)
        return (Part((1, 1, size), inner=word if layer is None else f"{row.tower.label}{layer}.{word}"),)

    def _stream(self, point: str, tower: Tower, layer: int | None) -> str:
        if self.residual == "shared":
            return tower.stream
        at, _, point = point.rpartition(".")
        if at:
            tower = next(other for other in self.family.towers if other.name == at)
        if point == "end":
            number = tower.parts_per_layer * self.layers.get(tower.name, 0)
        elif point == "0":
            number = 0
        else:
            number = tower.parts_per_layer * (layer or 0) + POINTS.index(point)
        return f"{tower.stream}@{number}" if number == 0 else f"{tower.label}residual@{number}"

    def _heads(self, name: str, kind: str, size: int, label: str, tower: Tower, layer: int | None) -> Part:
        heads, groups = self._head_counts(tower)
        queries = 1 if kind in ("k", "v") else heads // groups
        inner, rest = divmod(size, groups * queries)
        if rest or (kind == "order" and inner != 1):
            raise IncompatibleCheckpoints(
                f"{name!r}: {size} entries do not divide into {groups * queries} heads. "
                "Give the right numbers with heads= and kv_heads=."
            )
        scope = f"{tower.label}{'' if layer is None else layer}{'.' if label and layer is not None else ''}{label}"
        order = tower.name if tower.tied_heads and not label else scope
        inside = {"q": "" if self.family.rope else f"{scope}.qk", "v": f"{scope}.vo", "order": ""}
        return Part(
            (groups, queries, inner),
            order=f"{order}.heads",
            queries=f"{order}.queries" if heads > groups and queries > 1 else "",
            inner=inside[{"k": "q", "o": "v"}.get(kind, kind)],
        )

    def _head_counts(self, tower: Tower) -> tuple[int, int]:
        heads = self.heads.get(tower.name, 0)
        if not heads:
            tower_key = f'{{"{tower.name}": 12}}' if tower.name in TOWER_KEYS else "12"
            raise UsageError(
                f"the number of attention heads of this {self.family.name} model is not known: pass heads={tower_key}"
                " (--heads on the command line), or give a folder with config.json or the model object."
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
) -> Layout:
    """Bind the family (found by its tensor names unless given) to the tensors of one checkpoint."""
    if residual not in ("shared", "per-junction"):
        raise UsageError(f"no residual mode called {residual!r}; there are: shared, per-junction.")
    names = list(shapes)
    chosen = detect_family(names) if family is None else _family(family)
    if odd := chosen.unknown(names):
        raise _not_covered(chosen, odd)
    layers: dict[str, int] = {}
    tables: dict[str, int] = {}
    for name, shape in shapes.items():
        row, layer = chosen.find(name) or (chosen.towers[0].rows[0], None)
        tower = row.tower.name
        layers[tower] = max(layers.get(tower, 0), 1 + (-1 if layer is None else layer))
        if row.axes[-1] == "order":
            tables[tower] = shape[-1]
    given, given_kv = heads_in_config(config or {})
    towers = {tower.name for tower in chosen.towers}
    fallback = chosen.fallback
    replaced = {}
    if fallback and not any(name.endswith(fallback.unless) for name in names):
        replaced = {fallback.group: fallback.instead}
    return Layout(
        chosen,
        _per_tower(towers, heads, given) or tables,
        _per_tower(towers, kv_heads, given_kv),
        layers,
        residual,
        replaced,
    )


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


def _per_tower(towers: set[str], given: HeadCounts | None, found: Mapping[str, int]) -> dict[str, int]:
    if isinstance(given, int):
        return dict.fromkeys(towers, given)
    if given is not None:
        if wrong := sorted(set(given) - towers):
            raise UsageError(f"no tower called {wrong[0]!r}; there are: {', '.join(sorted(filter(None, towers)))}.")
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
        part = config if not tower else next((config[key] for key in keys if isinstance(config.get(key), Mapping)), {})
        count = next((part[key] for key in HEAD_KEYS if part.get(key)), None) or part.get("heads")
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
    folder = checkpoint.path if checkpoint.path is None or checkpoint.path.is_dir() else checkpoint.path.parent
    for file in ("config.json", "open_clip_config.json"):
        if folder is not None and (folder / file).is_file():
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
        raise CorruptInput(f"{path} is not readable JSON. Restore it, or remove it and pass heads=.") from None
    if not isinstance(config, dict):
        raise CorruptInput(f"{path} is not a JSON object. Restore it, or remove it and pass heads=.")
    return config
