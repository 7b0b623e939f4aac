"""A family's spec bound to one checkpoint: its head counts, its depth, every group and its size.

It says for each tensor name which permutation moves which axis, and refuses what the spec does not
cover: a tensor left as it is while its neighbours move would break the model in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gradfix.align.families import FAMILIES
from gradfix.align.head_counts import TOWER_KEYS, HeadCounts, heads_in_config, per_tower
from gradfix.align.spec import Family, Part, Tower
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.registry import unknown

Residual = Literal["shared", "per-junction"]
Shapes = Mapping[str, tuple[int, ...]]
Axes = tuple[tuple[Part, ...], ...]
POINTS = "abcd"


class Place(NamedTuple):
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
class Layout:
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
        place = Place(name, row.tower, layer)
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

    def _axis(self, place: Place, word: str, size: int) -> tuple[Part, ...]:
        word, _, label = self.replaced.get(word, word).partition(":")
        if word == "-":
            return (Part((1, 1, size)),)
        if word.startswith("residual@"):
            return (Part((1, 1, size), inner=self._stream(place, word.removeprefix("residual@"))),)
        if word == "qkv":
            third, rest = divmod(size, 3)
            if rest:
                raise IncompatibleCheckpoints(
                    f"{place.name!r}: {size} entries are not q, k and v packed in one."
                )
            return tuple(self._heads(place, kind, third, label) for kind in word)
        if word in ("q", "k", "v", "o", "order"):
            return (self._heads(place, word, size, label),)
        if word in ("q_norm", "k_norm"):
            return (self._norm(place, word[0], size),)
        return (Part((1, 1, size), inner=place.group(word)),)

    def _stream(self, place: Place, point: str) -> str:
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

    def _heads(self, place: Place, kind: str, size: int, label: str) -> Part:
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
        return Part(
            (groups, queries, inner),
            order=f"{order}.heads",
            queries=f"{order}.queries" if queries > 1 else "",
            inner=inside[{"k": "q", "o": "v"}.get(kind, kind)],
        )

    def _norm(self, place: Place, kind: str, size: int) -> Part:
        """A norm as wide as all heads has its own weights for each, which must move with it."""
        heads, groups = self._head_counts(place.tower)
        entries = self.attention.get(place.group(kind), 0)
        if size == entries:
            return self._heads(place, kind, size, label="")
        if size * (heads if kind == "q" else groups) == entries:
            return Part((1, 1, size))
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
    attention: dict[str, int] = {}
    for name, shape in shapes.items():
        row, layer = chosen.find(name) or (chosen.towers[0].rows[0], None)
        tower = row.tower.name
        layers[tower] = max(layers.get(tower, 0), 1 + (-1 if layer is None else layer))
        if row.axes[-1] == "order":
            tables[tower] = shape[-1]
        if row.axes[0] in ("q", "k"):
            attention[Place(name, row.tower, layer).group(row.axes[0])] = shape[0]
    given, given_kv = heads_in_config(config or {})
    towers = {tower.name for tower in chosen.towers}
    fallback = chosen.fallback
    replaced = {}
    if fallback and not any(name.endswith(fallback.unless) for name in names):
        replaced = {fallback.group: fallback.instead}
    return Layout(
        chosen,
        per_tower(towers, heads, given) or tables,
        per_tower(towers, kv_heads, given_kv),
        layers,
        residual,
        replaced,
        attention,
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
