"""The plug point of merging: several task vectors walked side by side, and what a merge is.

A merge is planned over a `Bundle` of vectors (walking it as often as its statistics need) and returns a
rule for flat pieces at the same coordinates. Nothing holds a whole vector, so every merge works in memory
and in a stream, and gives the same bits in both."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradfix.checkpoints.weights import CHUNK
from gradfix.errors import UsageError
from gradfix.registry import Registry, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class PiecePlace:
    """Which piece of which tensor."""

    name: str
    shape: tuple[int, ...]
    index: int


class Bundle(ABC):
    """Task vectors over the same tensors, side by side, in flat pieces of one dtype."""

    count: int
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    notes: list[str]  # what a planner found that a reader of the result should know

    @abstractmethod
    def pieces(self, name: str, size: int) -> Iterator[list[Tensor]]:
        """One tensor of every vector in pieces of at most `size` entries; nothing for an empty tensor."""

    def walk(self) -> Iterator[list[Tensor]]:
        """All pieces, in an order of names that does not depend on where the vectors live."""
        for name in sorted(self.shapes):
            yield from self.pieces(name, CHUNK)

    def measured(self, measure: Callable[[list[Tensor]], T], name: str | None = None) -> Iterator[T]:
        """`measure` of all pieces (of one tensor, where named), in the order of the walk.

        A bundle with workers lets them do it, so `measure` must not keep the pieces."""
        return map(measure, self.walk() if name is None else self.pieces(name, CHUNK))

    def numel(self, name: str | None = None) -> int:
        names = self.shapes if name is None else [name]
        return sum(math.prod(self.shapes[n]) for n in names)


Rule = Callable[[PiecePlace, list[Tensor]], Tensor]
Density = float | Sequence[float]
DENSITY = (0.2,)  # for every vector


@dataclass(frozen=True)
class Merge:
    """A planner and what it must be shown: pieces of any cut, whole rows (outputs) of a weight matrix, or whole
    tensors."""

    plan: Callable[..., Rule]
    whole_rows: bool = False
    whole_tensors: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Name and default of every option the method takes."""
        parameters = inspect.signature(self.plan).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def piece_size(self, shape: tuple[int, ...]) -> int:
        if self.whole_tensors:
            return max(math.prod(shape), 1)
        if not self.whole_rows:
            return CHUNK
        row = row_length(shape)
        return max(row, CHUNK // row * row)

    def prepare(self, bundle: Bundle, weights: Sequence[float] | None, options: Mapping[str, Any]) -> Rule:
        """Check the options and take the statistics; `None` stands for a method's own default."""
        known = self.options
        given = {name: value for name, value in options.items() if value is not None}
        for name in given:
            if name not in known:
                choices = [n for n in known if n != "weights"]
                raise UsageError(unknown("option of this merge", name, choices) if choices else _no_option(name))
        if "weights" in known:
            given["weights"] = _weights(weights, bundle.count)
        elif weights is not None:
            raise UsageError("this merge takes no weights: its own statistics set them.")
        if "density" in known:
            given["density"] = _per_vector(given.get("density", known["density"]), bundle.count)
        return self.plan(bundle, **given)


MERGES: Registry[Merge] = Registry("merge")


def merge_method(
    name: str, whole_rows: bool = False, whole_tensors: bool = False
) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Register a planner: `@merge_method("mean")` over a function of (bundle, *, its options)."""

    def add(plan: Callable[..., Rule]) -> Callable[..., Rule]:
        MERGES.register(name)(Merge(plan, whole_rows, whole_tensors))
        return plan

    return add


def _no_option(name: str) -> str:
    return f"no option called {name!r}: this merge has none."


def row_length(shape: tuple[int, ...]) -> int:
    return max(math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape), 1)


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    listed = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(listed) != count:
        raise UsageError(f"{len(listed)} weights for {count} vectors; give one each.")
    if not all(math.isfinite(weight) for weight in listed):
        raise UsageError(f"weights must be finite numbers, got {listed}.")
    return listed


def _per_vector(density: Density, count: int) -> list[float]:
    listed = [float(d) for d in ([density] if isinstance(density, int | float) else density)]
    listed = listed * count if len(listed) == 1 else listed
    if len(listed) != count:
        raise UsageError(f"{len(listed)} densities for {count} vectors; give one, or one each.")
    if not all(0 < d <= 1 for d in listed):
        raise UsageError(f"density must lie above 0 and at most at 1, got {density}.")
    return listed
