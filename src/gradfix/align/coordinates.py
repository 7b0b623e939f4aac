"""Coordinates: a task vector of one base, rewritten for the units of another.

Both bases see the same inputs. For every pair of linear maps the products of their inputs, and of the gradients
(`bico`) or activations (`theseus`) of their outputs, say which direction of one base is which of the other; the change
of the old weight is turned by the two maps. Widths and depths may differ, and no weight is trained.

The products are summed batch by batch, so memory does not grow with the inputs; layers are visited in groups
that fit a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.align.correspondence import Correspondence, LinearPair, Nothing, Table
from gradfix.align.pairing import SideBySide, polars
from gradfix.align.roles import Part
from gradfix.checkpoints.matched import is_output_table
from gradfix.checkpoints.slices import is_split
from gradfix.errors import DataError, UsageError
from gradfix.registry import Registry
from gradfix.system.modules import at_work
from gradfix.system.processor import crossed
from gradfix.vectors.taskvector import TaskVector

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]
MEMORY = 4 << 30  # bytes for the products of one group of layers
SHARED = {"k": "q", "v": "q", "up": "gate", "cross.v": "cross.k"}  # roles that read the same input


@dataclass(frozen=True)
class Side:
    """A base and its loss per sample; the loss is asked for gradients only, never for a step."""

    model: nn.Module
    loss: Loss


@dataclass(frozen=True)
class Moved:
    """The vector in the target's names and shapes, and how it came about.

    `kept` is, per weight, the share of the change's length that the maps carried over: below 1 where the target is
    narrower or the inputs did not reach a direction. `passes` counts samples forward and backward, both bases."""

    vector: TaskVector
    correspondence: Correspondence
    kept: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    notes: tuple[str, ...] = ()


# What is compared outside a linear map: given both sides' outputs and their gradients.
OUTSIDES: Registry[str] = Registry("coordinates")
OUTSIDES.register("bico")("gradients")
OUTSIDES.register("theseus")("activations")


def move(
    tau: Mapping[str, Tensor],
    correspondence: Correspondence,
    base: Side,
    target: Side,
    batches: Sequence[tuple[Batch, Batch]],
    *,
    method: str = "bico",
    rows: Mapping[str, Tensor] | None = None,
    memory: int = MEMORY,
) -> Moved:
    """Rewrite `tau` (names of the base's module) for the target's module.

    `batches` hold the same samples as each side reads them, with equal labels. `rows` gives, for a token table of the
    target, the base's row of every token (-1: none); without it tables of equal height move row by row. Both models
    come back untouched. Weights whose map cannot be watched stay as they are and are listed."""
    return moves(tau, correspondence, base, target, batches, methods=[method], rows=rows, memory=memory)[method]


def moves(
    tau: Mapping[str, Tensor],
    correspondence: Correspondence,
    base: Side,
    target: Side,
    batches: Sequence[tuple[Batch, Batch]],
    *,
    methods: Sequence[str],
    rows: Mapping[str, Tensor] | None = None,
    memory: int = MEMORY,
) -> dict[str, Moved]:
    """`move` by several methods, which read the inputs once and share the maps inside."""
    outsides = {method: OUTSIDES[method] for method in methods}
    if not batches:
        raise DataError("coordinates need inputs that both bases read; there are none.")
    pairs, hidden = _watchable(correspondence, base.model, target.model)
    works = {method: _Work(tau, _zeros(target.model), correspondence, rows or {}) for method in methods}
    passes = 0
    for group in _groups(pairs, memory, len(methods)):
        products = _products(group, base, target, batches, set(outsides.values()))
        passes += products.passes
        inside: dict[Any, Tensor] = {}
        for method, work in works.items():
            work.place(group, products, inside, outsides[method])
    if hidden:
        correspondence = _with(correspondence, hidden)
    return {method: work.moved(correspondence, passes) for method, work in works.items()}


def _zeros(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros(
            p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device="cpu" if is_split(p) else p.device
        )
        for name, p in model.named_parameters()
    }


def _watchable(
    correspondence: Correspondence, base: nn.Module, target: nn.Module
) -> tuple[list[LinearPair], list[Nothing]]:
    """The pairs whose two maps are modules of their own; the rest is computed out of sight."""
    ours, theirs = (dict(model.named_modules()) for model in (base, target))
    seen, hidden = [], []
    for pair in correspondence.linear:
        if pair.source.name in ours and pair.target.name in theirs:
            seen.append(pair)
        else:
            hidden.append(Nothing(pair.target.name, "target", "computed inside a fused attention, out of sight"))
    return seen, hidden


def _with(correspondence: Correspondence, hidden: list[Nothing]) -> Correspondence:
    names = {entry.name for entry in hidden}
    return Correspondence(
        correspondence.layers,
        tuple(pair for pair in correspondence.linear if pair.target.name not in names),
        correspondence.same,
        correspondence.tables,
        (*correspondence.nothing, *dict.fromkeys(hidden)),
    )


def _groups(pairs: list[LinearPair], memory: int, methods: int) -> Iterator[list[LinearPair]]:
    """Whole target layers, as many at a time as the budget holds (one at least)."""
    layers: dict[tuple[str, int], list[LinearPair]] = {}
    for pair in pairs:
        layers.setdefault((pair.target.tower, pair.target.layer), []).append(pair)
    group: list[LinearPair] = []
    size = 0
    for layer in layers.values():
        shapes = {_inside(pair): pair.source.inputs * pair.target.inputs for pair in layer}
        outside = sum(pair.source.outputs * pair.target.outputs for pair in layer)
        need = 4 * (sum(shapes.values()) + methods * outside)
        if group and size + need > memory:
            yield group
            group, size = [], 0
        group, size = group + layer, size + need
    if group:
        yield group


def _inside(pair: LinearPair) -> tuple[str, int, str]:
    """Where a map's input products are kept: maps that read the same input share them."""
    role = SHARED.get(pair.target.role, pair.target.role)
    return pair.target.tower, pair.target.layer, "in:" + ("mlp" if role in ("gate", "up") else role)


class _Products(dict[Any, Tensor]):
    """Sums of X_A^T X_B by place; `passes` counts the samples of both sides."""

    passes = 0

    def add(self, place: Any, ours: Tensor, theirs: Tensor) -> None:
        wide = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), torch.float32)
        product = crossed(ours.to(theirs.device, wide), theirs.to(wide))
        self[place] = self[place] + product if place in self else product


def _products(
    group: list[LinearPair], base: Side, target: Side, batches: Sequence[tuple[Batch, Batch]], outsides: set[str]
) -> _Products:
    """One pass of both bases over the inputs."""
    sums = _Products()
    for both in batches:
        ours, theirs = (
            _watch(side, batch, parts, outsides)
            for side, batch, parts in (
                (base, both[0], [pair.source for pair in group]),
                (target, both[1], [pair.target for pair in group]),
            )
        )
        sums.passes += sum(len(next(iter(batch.values()))) for batch in both)
        paired, seen = SideBySide(both), set[tuple[str, int, str]]()
        for pair in group:
            before, after = ours[pair.source.name], theirs[pair.target.name]
            if _inside(pair) not in seen:
                seen.add(_inside(pair))
                sums.add(_inside(pair), *paired(before.inputs, after.inputs))
            for kind in outsides:
                outputs = _cut(before.outputs[kind], pair.source), _cut(after.outputs[kind], pair.target)
                sums.add((kind, pair.target.place), *paired(*outputs))
    return sums


@dataclass
class _Seen:
    """What went into a linear map and what is compared outside it by kind, over all calls of one forward pass."""

    inputs: Tensor
    outputs: dict[str, Tensor]


def _cut(outputs: Tensor, part: Part) -> Tensor:
    return outputs if part.span is None else outputs[..., part.span[0] : part.span[1]]


def _watch(side: Side, batch: Batch, parts: Sequence[Part], outsides: set[str]) -> dict[str, _Seen]:
    """Inputs of the named maps, and their outputs or the gradients of the summed loss with respect to these, or both."""
    names = list(dict.fromkeys(part.name for part in parts))
    sloped = "gradients" in outsides
    with at_work(side.model), torch.set_grad_enabled(sloped), _listening(side.model, names) as heard:
        loss = side.loss(side.model, batch).sum()
        if not torch.isfinite(loss):
            raise DataError("the loss of the inputs that compare both bases is not finite.")
        deaf = [name for name in names if not heard[name]]
        if deaf:
            raise UsageError(f"{deaf[0]!r} took no part in the forward pass; it cannot be compared.")
        outputs = {"activations": [call[1] for name in names for call in heard[name]]}
        if sloped:
            slopes = torch.autograd.grad(loss, outputs["activations"], allow_unused=True)
            outputs["gradients"] = [
                torch.zeros_like(output) if gradient is None else gradient
                for output, gradient in zip(outputs["activations"], slopes, strict=True)
            ]
    rest = {kind: iter(outputs[kind]) for kind in outsides}
    return {
        name: _Seen(
            _joined([call[0] for call in heard[name]]),
            {kind: _joined([next(calls) for _ in heard[name]]) for kind, calls in rest.items()},
        )
        for name in names
    }


def _joined(calls: Sequence[Tensor]) -> Tensor:
    """All calls of one map; those of another length than the first (a decoder asked label by label) are left out."""
    alike = [call.detach() for call in calls if call.shape[1:] == calls[0].shape[1:]]
    return torch.cat(alike) if len(alike) > 1 else alike[0]


@contextmanager
def _listening(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    heard: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: heard[name].append((inputs[0], output))
        )
        for name in names
    ]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


class _Work:
    """The vector as it grows: maps come in by groups, tensors are placed and the maps forgotten."""

    def __init__(
        self,
        tau: Mapping[str, Tensor],
        found: dict[str, Tensor],
        correspondence: Correspondence,
        rows: Mapping[str, Tensor],
    ) -> None:
        self.tau, self.found, self.what, self.rows = tau, found, correspondence, rows
        self.kept: dict[str, float] = {}
        self.left: dict[str, str] = {}
        self.first: Tensor | None = None  # the map of the residual stream where the tokens enter it
        self.last: Tensor | None = None  # and where it ends

    def place(self, group: list[LinearPair], products: _Products, inside: dict[Any, Tensor], outside: str) -> None:
        missing = dict.fromkeys(_inside(pair) for pair in group if _inside(pair) not in inside)
        inside |= polars({place: products.pop(place) for place in missing})
        wanted = [(outside, pair.target.place) for pair in group]
        maps = polars({place: products.pop(place) for place in wanted})
        for pair, place in zip(group, wanted, strict=True):
            self._turn(pair, inside[_inside(pair)], maps[place])

    def moved(self, correspondence: Correspondence, passes: int) -> Moved:
        """The vector with what needs no maps of its own."""
        self._place_rest()
        notes = tuple(f"{name}: {reason}" for name, reason in self.left.items())
        return Moved(TaskVector(self.found), correspondence, self.kept, passes, notes)

    def _turn(self, pair: LinearPair, inside: Tensor, outside: Tensor) -> None:
        source, target = pair.source, pair.target
        if target.tower != "vision" and self.first is None and target.role in ("q", "mixed"):
            self.first = inside
        if target.tower != "vision" and target.role == "down":
            self.last = outside
        for ending in ("weight", "bias"):
            old, new = f"{source.name}.{ending}", f"{target.name}.{ending}"
            if old not in self.tau or new not in self.found:
                continue
            change = self.tau[old].to(outside)
            change = _rows_of(change, source, ending)
            turned = outside.T @ change @ inside if ending == "weight" else outside.T @ change
            self.kept[new] = float(turned.norm() / change.norm()) if bool(change.any()) else 1.0
            _rows_of(self.found[new], target, ending).add_(turned.to(self.found[new]), alpha=pair.scale)

    def _place_rest(self) -> None:
        for entry in self.what.same:
            if entry.source in self.tau and entry.target in self.found:
                self.found[entry.target].add_(self.tau[entry.source].to(self.found[entry.target]), alpha=entry.scale)
        for table in self.what.tables:
            if table.source in self.tau and table.target in self.found:
                self._place_table(table)

    def _place_table(self, table: Table) -> None:
        turn = self.last if is_output_table(table.target) else self.first
        into = self.found[table.target]
        change = self.tau[table.source]
        places = self.rows.get(table.target)
        if places is None and len(change) != len(into):
            self.left[table.target] = "tables of different heights and no rows given; left as it is"
            return
        if turn is None:
            self.left[table.target] = "no map of the residual stream; left as it is"
            return
        if turn.shape != (change.shape[1], into.shape[1]):
            self.left[table.target] = "its columns are not those of the residual stream; left as it is"
            return
        if places is None:
            places = torch.arange(len(into))
        known = (places >= 0).nonzero().flatten()
        moved = change[places[known].to(change.device)].to(turn) @ turn
        into[known.to(into.device)] = moved.to(into)


def _rows_of(tensor: Tensor, part: Part, ending: str) -> Tensor:
    """The part's rows, outputs first, as a view."""
    if ending == "weight" and part.transposed:
        tensor = tensor.T
    return tensor if part.span is None else tensor[part.span[0] : part.span[1]]
