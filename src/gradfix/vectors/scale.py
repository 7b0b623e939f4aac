"""Choose how far to go: one number alpha, searched on a score, never on test data.

Zero is always a candidate, so "do not transport" is a possible answer. When the best alpha lies at the
upper edge of the grid, the grid is widened and the curve says so: short fine-tunes often want
alphas far above one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradfix.errors import UnsafeResult, UsageError
from gradfix.vectors.diagnostics import notebook_table
from gradfix.vectors.transported import add_scaled, by_weight

PAPER_GRID = tuple(round(0.1 * step, 1) for step in range(1, 11))
WIDEN_BY = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True)
class ScaleCurve:
    """Scores along alpha. `best` is the smallest alpha with the highest score."""

    best: float
    points: list[tuple[float, float]]
    widened: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def best_score(self) -> float:
        return dict(self.points)[self.best]

    def __repr__(self) -> str:
        wide = ", grid widened" if self.widened else ""
        return f"ScaleCurve(best alpha {self.best:g}, score {self.best_score:.4g}, {len(self.points)} points{wide})"

    def _repr_html_(self) -> str:
        return notebook_table(
            repr(self), ("alpha", "score"), [(f"{a:g}", f"{s:.4g}") for a, s in self.points]
        )


class Dial:
    """Set a model to `weights + alpha * update` for any alpha, always from the untouched weights."""

    def __init__(self, model: nn.Module, update: Mapping[str, Tensor]) -> None:
        self._parts = [(weight, weight.detach().clone(), delta) for weight, delta in by_weight(model, update)]

    @torch.no_grad()
    def turn(self, alpha: float) -> None:
        for weight, original, delta in self._parts:
            weight.copy_(original)
            if alpha:
                add_scaled(weight, delta, alpha)


@contextmanager
def dialled(model: nn.Module, update: Mapping[str, Tensor]) -> Iterator[Dial]:
    """A dial over the model; whatever happens, the weights come back bit for bit."""
    dial = Dial(model, update)
    try:
        yield dial
    finally:
        dial.turn(0.0)


def search_scale(
    model: nn.Module,
    update: Mapping[str, Tensor],
    score: Callable[[nn.Module], float],
    grid: Sequence[float] | None = None,
) -> ScaleCurve:
    """Try every alpha of the grid (and 0) and keep the best; the model comes back bit-identical.

    `score(model)` is a float, higher is better. Without a grid: 0.1 to 1.0, widened up to 8 while the best
    lies at the edge. A given grid is taken as it is, and the curve notes when its edge was best."""
    widen = grid is None
    alphas = sorted({0.0, *(float(alpha) for alpha in (PAPER_GRID if grid is None else grid))})
    if any(alpha < 0 for alpha in alphas) or len(alphas) < 2:
        raise UsageError("the alpha grid needs at least one positive number and no negative ones.")
    points: list[tuple[float, float]] = []

    with dialled(model, update) as dial:

        def measure(alpha: float) -> None:
            dial.turn(alpha)
            value = float(score(model))
            points.append((alpha, float("-inf") if math.isnan(value) else value))

        for alpha in alphas:
            measure(alpha)
        widened = False
        if widen:
            for alpha in WIDEN_BY:
                if _best(points) != points[-1][0]:
                    break
                measure(alpha)
                widened = True
    best = _best(points)
    if dict(points)[best] == float("-inf"):
        raise UnsafeResult("no alpha gives a finite score; the update or the model is not finite.")
    return ScaleCurve(best, points, widened, _notes(points, widened))


def _notes(points: Sequence[tuple[float, float]], widened: bool) -> tuple[str, ...]:
    """What a reader of this curve should know."""
    notes: list[str] = []
    best, largest = _best(points), points[-1][0]
    if widened:
        notes.append(f"the best alpha lay at the edge of 0.1..1, so the grid was widened to {largest:g}")
    if best == largest and best > 0:
        notes.append(f"the best alpha {best:g} is the largest one tried: a wider grid may do better")
    if best == 0:
        notes.append("alpha 0 scored best: do not transport")
    return tuple(notes)


def _best(points: Iterable[tuple[float, float]]) -> float:
    return max(points, key=lambda point: (point[1], -point[0]))[0]
