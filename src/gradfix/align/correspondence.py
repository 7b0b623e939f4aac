"""Which weight of a new base answers to which weight of an old one, and what answers to nothing.

Read from names, shapes, configs and vocabularies alone: no weight is loaded. Layers are paired by depth, linear
maps by their role in the block, token rows by token. Everything that finds no counterpart is listed with the reason,
on both sides, so a mismatch is never silent."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.align.roles import Anatomy, Part, Shapes, anatomy, read
from gradfix.checkpoints.matched import TOKEN_TABLE, is_output_table
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, IncompatibleCheckpoints


@dataclass(frozen=True)
class LinearPair:
    """A linear map of the target and the one of the base that feeds it; `scale` shares one source among several."""

    target: Part
    source: Part
    scale: float = 1.0


@dataclass(frozen=True)
class Same:
    """A tensor that is no linear map of a block and moves as it is."""

    target: str
    source: str
    scale: float = 1.0


@dataclass(frozen=True)
class Table:
    """A token table: rows are matched by token (`rows` of them), columns by the map of the residual stream."""

    target: str
    source: str
    rows: int
    of: int


@dataclass(frozen=True)
class Nothing:
    """A tensor without counterpart: `side` is "target" (it stays as it is) or "base" (its change is left behind)."""

    name: str
    side: str
    reason: str


@dataclass(frozen=True)
class Correspondence:
    """What feeds what. `layers` holds, per tower, (target layer, source layer) pairs."""

    layers: Mapping[str, tuple[tuple[int, int], ...]]
    linear: tuple[LinearPair, ...]
    same: tuple[Same, ...] = ()
    tables: tuple[Table, ...] = ()
    nothing: tuple[Nothing, ...] = field(default=())

    def lines(self) -> list[str]:
        """The correspondence in words."""
        said = []
        for tower, pairs in self.layers.items():
            label = f"{tower} layers" if tower else "layers"
            if all(i == j for i, j in pairs):
                said.append(f"{label}: {len(pairs)}, one to one")
            else:
                said.append(f"{label} (target <- base): " + ", ".join(f"{i} <- {j}" for i, j in pairs))
        widths = Counter(
            f"{pair.target.role} {pair.source.outputs}x{pair.source.inputs} -> {pair.target.outputs}x{pair.target.inputs}"
            for pair in self.linear
        )
        said.append("linear maps: " + ("; ".join(f"{text} ({n})" for text, n in widths.items()) or "none"))
        said += [f"token rows of {t.target}: {t.rows} of {t.of} found in the base" for t in self.tables]
        if self.same:
            said.append(f"moved as they are: {len(self.same)} tensors, first {self.same[0].target!r}")
        reasons = Counter((entry.side, entry.reason) for entry in self.nothing)
        for (side, reason), count in reasons.items():
            first = next(e.name for e in self.nothing if (e.side, e.reason) == (side, reason))
            what = "stays as it is in the target" if side == "target" else "left behind in the base"
            said.append(f"no counterpart, {what}: {count} tensors ({reason}), first {first!r}")
        return said

    def as_json(self) -> dict[str, Any]:
        return {
            "layers": {tower: [list(pair) for pair in pairs] for tower, pairs in self.layers.items()},
            **{
                name: [asdict(entry) for entry in getattr(self, name)]
                for name in ("linear", "same", "tables", "nothing")
            },
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """As a JSON file with its hash, which `load` holds it to; the bases themselves are not in it."""
        write_text(Path(path), json.dumps({"hash": self.hash, **self.as_json()}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Correspondence:
        """From a file of `save`, or from what `gradfix inspect --json` says of a correspondence."""
        try:
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            told = told.get("correspondence", told)
            found = cls(
                {tower: tuple((int(i), int(j)) for i, j in pairs) for tower, pairs in told["layers"].items()},
                tuple(LinearPair(_part(e["target"]), _part(e["source"]), e["scale"]) for e in told["linear"]),
                tuple(Same(**entry) for entry in told["same"]),
                tuple(Table(**entry) for entry in told["tables"]),
                tuple(Nothing(**entry) for entry in told["nothing"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptInput(f"{path} is no correspondence ({type(error).__name__}: {error}).") from None
        if found.hash != told.get("hash"):
            raise CorruptInput(f"{path} was changed after it was written: its hash is another one. Make it again.")
        return found

    @property
    def hash(self) -> str:
        """Equal for equal correspondences, whatever machine they were found on."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def of_changed(self, tau: Mapping[str, Tensor]) -> Correspondence:
        """Without the maps whose source weight did not change: they have nothing to hand on."""
        changed = {name for name, delta in tau.items() if bool(delta.any())}
        kept = [
            pair
            for pair in self.linear
            if changed & {pair.source.name, f"{pair.source.name}.weight", f"{pair.source.name}.bias"}
        ]
        return replace(self, linear=tuple(kept))

    @property
    def empty(self) -> bool:
        """Nothing of the base's change can be placed: only its answers can be handed on."""
        return not (self.linear or self.same or self.tables)


def _part(told: Mapping[str, Any]) -> Part:
    return Part(**{**told, "span": None if told["span"] is None else tuple(told["span"])})


def depth_rule(source: int, target: int) -> list[tuple[int, int, float]]:
    """(target layer, source layer, scale): target layer i takes source layer floor(i * source / target).

    Where several target layers share one source layer, each takes its part of the change."""
    scale = source / target if target > source else 1.0
    return [(i, i * source // target, scale) for i in range(target)]


def token_rows(
    found: Correspondence, target: Shapes, before: Mapping[str, int] | None, after: Mapping[str, int] | None
) -> dict[str, Tensor]:
    """For every token table of the target the base's row of each token, or -1; nothing where all rows agree."""
    if before is None or after is None or before == after:
        return {}
    rows: dict[str, Tensor] = {}
    for table in found.tables:
        rows[table.target] = torch.full((target[table.target][0],), -1)
        for token, place in after.items():
            if place < len(rows[table.target]):
                rows[table.target][place] = before.get(token, -1)
    return rows


def correspond(
    base: Shapes,
    target: Shapes,
    *,
    base_config: Mapping[str, Any] | None = None,
    target_config: Mapping[str, Any] | None = None,
    base_tokens: Mapping[str, int] | None = None,
    target_tokens: Mapping[str, int] | None = None,
) -> Correspondence:
    """Pair two models by the names and shapes of their weights.

    Tokens are needed where the tables differ in height or order; without them equal tables move row by row, and
    others not at all."""
    if not target:
        raise IncompatibleCheckpoints("the target has no weights to pair.")
    ours, theirs = anatomy(base, base_config), anatomy(target, target_config)
    towers = _towers(ours, theirs)
    found = _Pairing(ours, theirs, base, target)
    for tower, source in towers.items():
        found.pair_tower(tower, source)
    if not (ours.depths or theirs.depths):
        found.pair_by_name()
    found.pair_tables(base_tokens, target_tokens, tied=bool((base_config or {}).get("tie_word_embeddings")))
    found.pair_rest()
    return found.result()


def _towers(base: Anatomy, target: Anatomy) -> dict[str, str]:
    """The target's towers and the base's tower for each: by name, or the only one left on both sides."""
    found = {tower: tower for tower in target.depths if tower in base.depths}
    rest = [[tower for tower in side.depths if tower not in found] for side in (target, base)]
    if len(rest[0]) == len(rest[1]) == 1:
        found[rest[0][0]] = rest[1][0]
    return found


class _Pairing:
    def __init__(self, ours: Anatomy, theirs: Anatomy, base: Shapes, target: Shapes) -> None:
        self.ours, self.theirs, self.base, self.target = ours, theirs, base, target
        self.layers: dict[str, tuple[tuple[int, int], ...]] = {}
        self.sources: dict[tuple[str, int], tuple[str, int, float]] = {}
        self.linear: list[LinearPair] = []
        self.same: list[Same] = []
        self.tables: list[Table] = []
        self.nothing: list[Nothing] = []
        self.done: set[str] = set()
        self.used: set[str] = set()

    def pair_tower(self, tower: str, source: str) -> None:
        rule = depth_rule(self.ours.depths[source], self.theirs.depths[tower])
        self.layers[tower] = tuple((i, j) for i, j, _ in rule)
        swap = _renamed(self.ours.roles(source), self.theirs.roles(tower))
        for i, j, scale in rule:
            self.sources[tower, i] = source, j, scale
            for (where, layer, role), part in self.theirs.parts.items():
                other = self.ours.parts.get((source, j, swap.get(role, role)))
                if (where, layer) == (tower, i) and other is not None:
                    self.linear.append(LinearPair(part, other, scale))
                    self.mark(_tensors(part, self.target), _tensors(other, self.base))

    def pair_by_name(self) -> None:
        """Matrices of models without blocks that say what they are: one another's where they share a name."""
        for name, shape in self.target.items():
            other = self.base.get(name, ())
            if name.endswith(".weight") and len(shape) == len(other) == 2 and not TOKEN_TABLE.search(name):
                stem = name.removesuffix(".weight")
                part, source = (Part(stem, stem, "", 0, *widths) for widths in (shape, other))
                self.linear.append(LinearPair(part, source))
                self.mark(_tensors(part, self.target), _tensors(source, self.base))

    def mark(self, targets: list[str], sources: list[str]) -> None:
        self.done.update(targets)
        self.used.update(sources)

    def pair_tables(self, before: Mapping[str, int] | None, after: Mapping[str, int] | None, tied: bool) -> None:
        """Tables by name, else by the end of the model they stand at; every one of them has one row per token.

        One that the base ties to its embedding is that embedding."""
        ours = [n for n in self.base if TOKEN_TABLE.search(n) and len(self.base[n]) == 2]
        theirs = [n for n in self.target if TOKEN_TABLE.search(n) and len(self.target[n]) == 2]
        for name in theirs:
            alike = [n for n in ours if is_output_table(n) == is_output_table(name)] or (ours if tied else [])
            if not alike:
                continue
            twin = name if name in ours else alike[0]
            rows = self.target[name][0]
            if before is not None and after is not None:
                known = sum(1 for token, row in after.items() if row < rows and token in before)
            elif self.base[twin][0] == rows:
                known = rows
            else:
                self.nothing.append(Nothing(name, "target", "token tables of different heights, no tokenizers"))
                self.nothing.append(Nothing(twin, "base", "token tables of different heights, no tokenizers"))
                self.mark([name], [twin])
                continue
            self.tables.append(Table(name, twin, known, rows))
            self.mark([name], [twin])

    def pair_rest(self) -> None:
        """Norms, positions and whatever is left: as they are where name and shape agree."""
        for name, shape in self.target.items():
            if name in self.done:
                continue
            place = read(name)
            twin, scale = name, 1.0
            if place is not None:
                tower, layer, _ = place
                source = self.sources.get((tower, layer))
                if source is None:
                    self.nothing.append(Nothing(name, "target", "the base has no such tower"))
                    continue
                twin, scale = name.replace(f".{layer}.", f".{source[1]}.", 1), source[2]
            if twin not in self.base:
                self.nothing.append(Nothing(name, "target", "no weight of this role in the base"))
            elif tuple(self.base[twin]) != tuple(shape) or self._weightless(name, twin):
                self.nothing.append(Nothing(name, "target", "another shape, and no linear map of a block"))
                self.used.add(twin)
                self.nothing.append(Nothing(twin, "base", "another shape, and no linear map of a block"))
            else:
                self.same.append(Same(name, twin, scale))
                self.used.add(twin)

    def _weightless(self, name: str, twin: str) -> bool:
        """A bias whose weight stays behind, such as that of a head of another width: it means nothing alone."""
        weights = [
            side.get(bias.removesuffix("bias") + "weight") for side, bias in ((self.target, name), (self.base, twin))
        ]
        return name.endswith(".bias") and tuple(weights[0] or ()) != tuple(weights[1] or ())

    def result(self) -> Correspondence:
        feeding = {(tower, layer) for tower, layer, _ in self.sources.values()}
        for name in self.base:
            if name not in self.used:
                place = read(name)
                skipped = place is not None and place[:2] not in feeding
                reason = "its layer feeds no target layer" if skipped else "no weight of this role in the target"
                self.nothing.append(Nothing(name, "base", reason))
        unique = tuple(dict.fromkeys(self.nothing))
        return Correspondence(self.layers, tuple(self.linear), tuple(self.same), tuple(self.tables), unique)


def _renamed(base: set[str], target: set[str]) -> dict[str, str]:
    """Target role -> base role where one side has a gated MLP: the branch with the nonlinearity is the plain one's."""
    if "gate" in target and "gate" not in base:
        return {"gate": "up", "up": "none"}
    if "gate" in base and "gate" not in target:
        return {"up": "gate"}
    return {}


def _tensors(part: Part, shapes: Shapes) -> list[str]:
    """A part's weight and bias under the names they are stored by."""
    stem = part.name
    names = [stem, f"{stem}.weight", f"{stem}.bias", stem.replace("_weight", "_bias")]
    return [name for name in dict.fromkeys(names) if name in shapes]
