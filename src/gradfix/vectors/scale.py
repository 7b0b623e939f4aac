"""Choose how far to go: one number alpha, searched on a score, never on test data.

Zero is always a candidate, so "do not transport" is a possible answer. When the best alpha lies at the
upper edge of the grid, the grid is widened and the curve says so: short fine-tunes often want
alphas far above one. Where steps are taken afterwards, every matrix may learn a number of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradfix.checkpoints.slices import is_split, own_slice
from gradfix.errors import UnsafeResult, UsageError
from gradfix.system.processes import current
from gradfix.vectors.diagnostics import notebook_table
from gradfix.vectors.transported import add_scaled, by_weight

PAPER_GRID = tuple(round(0.1 * step, 1) for step in range(1, 11))
WIDEN_BY = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
AT_ONCE = 2**30  # entries of a product of two vectors: BLAS counts them in 32 bits


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
        return notebook_table(repr(self), ("alpha", "score"), [(f"{a:g}", f"{s:.4g}") for a, s in self.points])


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


class Coefficients:
    """How far every matrix goes along a vector, learned under AdamW beside its entries.

    A vector that leads the right way as a whole goes too far in one matrix and not far enough in the next. A coefficient is
    moved by the gradient of all entries at once, so it learns in a few steps what they would take hundreds for.
    There is one for every matrix among the parameters that the vector names.

    They are counted in `unit`s, the way that was gone along the whole vector. `share` is their rate beside that of the
    weights. Between a backward pass and the weights' own step `look` takes their gradient; `go` takes their step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        vector: Mapping[str, Tensor],
        unit: float,
        share: float,
        betas: tuple[float, float],
    ) -> None:
        self.unit, self.share = unit, share
        self.ways = [
            (parameter, own_slice(vector[name].detach(), parameter).to(parameter.device))
            for name, parameter in parameters.items()
            if parameter.dim() > 1 and name in vector
        ]
        self.split = any(is_split(parameter) for parameter, _ in self.ways)
        like = self.ways[0][1] if self.ways else torch.zeros(())
        self.values = nn.Parameter(torch.zeros(len(self.ways), device=like.device, dtype=_wide(like)))
        self.gone = torch.zeros_like(self.values)
        self.optimizer = torch.optim.AdamW([self.values], weight_decay=0.0, betas=betas)

    @torch.no_grad()
    def look(self) -> None:
        """The gradient of each coefficient, from that of its matrix; processes that share a model add up theirs."""
        slopes = torch.stack([self._slope(parameter, way) for parameter, way in self.ways])
        if self.split:
            dist.all_reduce(slopes)
        self.values.grad = self.unit * slopes

    def _slope(self, parameter: Any, way: Tensor) -> Tensor:
        if parameter.grad is None:
            return self.gone.new_zeros(())
        slope = _inner(own_slice(parameter.grad, parameter), way).to(self.gone)
        return slope / current().size if self.split and not is_split(parameter) else slope

    @torch.no_grad()
    def go(self) -> None:
        """Move every matrix by as much as its coefficient."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        steps = self.unit * (self.values - self.gone)
        for (parameter, way), step in zip(self.ways, steps.unbind(), strict=True):
            weight = own_slice(parameter.detach(), parameter)
            moved = weight.to(_wide(weight)).addcmul_(way, step)
            if moved is not weight:
                weight.copy_(moved)
        self.gone.copy_(self.values)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """The sum of products of two matrices, without a third one that holds them: every launch counts on a card."""
    wide = torch.promote_types(_wide(one), other.dtype)
    pairs = zip(one.reshape(-1).to(wide).split(AT_ONCE), other.reshape(-1).to(wide).split(AT_ONCE), strict=True)
    sums = [torch.dot(a, b) for a, b in pairs]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@contextmanager
def dialled(model: nn.Module, update: Mapping[str, Tensor]) -> Iterator[Dial]:
    """A dial over the model; whatever happens, the weights come back bit for bit."""
    dial = Dial(model, update)
    try:
        yield dial
    finally:
        dial.turn(0.0)


def walk(
    grid: Sequence[float], wider: Sequence[float], measure: Callable[[float], float], *, rounds: int | None = None
) -> dict[float, float]:
    """Values of the alphas that a climb to the best one passes; 0 is measured first.

    Alphas of the grid that are a factor of two apart come next, then wider ones while the largest is best. Each of
    the `rounds` (None: as many as there are) looks at the middle of the gaps beside the best so far."""
    found = {0.0: measure(0.0)}
    for alpha in _doubling(sorted(grid, reverse=True))[::-1]:
        found[alpha] = measure(alpha)
    for alpha in _doubling([max(grid), *sorted(one for one in wider if one > max(grid))])[1:]:
        if highest(found.items()) != max(found):
            break
        found[alpha] = measure(alpha)
    ladder = sorted({0.0, *grid, *(alpha for alpha in wider if alpha <= max(found))})
    while rounds is None or rounds > 0:
        gaps = _gaps(ladder, found)
        if not gaps:
            break
        for gap in gaps:
            middle = gap[len(gap) // 2]
            found[middle] = measure(middle)
        rounds = None if rounds is None else rounds - 1
    return dict(sorted(found.items()))


def _doubling(alphas: Sequence[float]) -> list[float]:
    """Those of the sorted alphas that are at least a factor of two from the one taken before."""
    taken: list[float] = []
    for alpha in alphas:
        if not taken or max(alpha, taken[-1]) >= 2 * min(alpha, taken[-1]):
            taken.append(alpha)
    return taken


def _gaps(ladder: Sequence[float], found: Mapping[float, float]) -> list[list[float]]:
    """What lies unmeasured between the best alpha and its measured neighbours."""
    best = highest(found.items())
    below, above = (alpha for alpha in found if alpha < best), (alpha for alpha in found if alpha > best)
    low, high = max(below, default=best), min(above, default=best)
    sides = ([a for a in ladder if low < a < best], [a for a in ladder if best < a < high])
    return [side for side in sides if side]


def search_scale(
    model: nn.Module,
    update: Mapping[str, Tensor],
    score: Callable[[nn.Module], float],
    grid: Sequence[float] | None = None,
) -> ScaleCurve:
    """Find the best alpha (0 among them); the model comes back bit-identical.

    `score(model)` is a float, higher is better. Without a grid the best of 0.1 to 1.0, and up to 8 while the best
    lies at the edge, is walked to, which takes about eight scores; it is the best of all where the curve has one hill. Every
    alpha of a given grid is tried, and the curve notes when its edge was best."""
    alphas = sorted({0.0, *(float(alpha) for alpha in (PAPER_GRID if grid is None else grid))})
    if any(alpha < 0 for alpha in alphas) or len(alphas) < 2:
        raise UsageError("the alpha grid needs at least one positive number and no negative ones.")

    with dialled(model, update) as dial:

        def measure(alpha: float) -> float:
            dial.turn(alpha)
            value = float(score(model))
            return float("-inf") if math.isnan(value) else value

        found = walk(PAPER_GRID, WIDEN_BY, measure) if grid is None else {alpha: measure(alpha) for alpha in alphas}
    best, widened = highest(found.items()), max(found) > alphas[-1]
    if found[best] == float("-inf"):
        raise UnsafeResult("no alpha gives a finite score; the update or the model is not finite.")
    points = list(found.items())
    return ScaleCurve(best, points, widened, _notes(points, widened))


def _notes(points: Sequence[tuple[float, float]], widened: bool) -> tuple[str, ...]:
    """What a reader of this curve should know."""
    notes: list[str] = []
    best, largest = highest(points), points[-1][0]
    if widened:
        notes.append(f"the best alpha lay at the edge of 0.1..1, so the grid was widened to {largest:g}")
    if best == largest and best > 0:
        notes.append(f"the best alpha {best:g} is the largest one tried: a wider grid may do better")
    if best == 0:
        notes.append("alpha 0 scored best: do not transport")
    return tuple(notes)


def highest(points: Iterable[tuple[float, float]]) -> float:
    """The smallest of the alphas that score best."""
    return max(points, key=lambda point: (point[1], -point[0]))[0]
