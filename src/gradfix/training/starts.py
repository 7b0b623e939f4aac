"""Where the lessons begin: at the target, or along the task vector, as it is, permuted or in the target's coordinates.

Every start is judged without labels: by how well the target's answers there follow the teacher's, a constant per class
aside, on inputs that no map was made from. The lowest divergence wins; at the target itself it is measured as well,
so a vector that only hurts is not followed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.align.coordinates import Batch, Moved, Side, moves
from gradfix.align.correspondence import Correspondence
from gradfix.tasks.base import Bound
from gradfix.training.costs import Work
from gradfix.training.distil import Lesson, Teaching, answers, take, typical_size, unbiased_divergence
from gradfix.vectors.scale import Coefficients, dialled
from gradfix.vectors.taskvector import TaskVector

ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
PATIENCE = 2  # alphas in a row without a new best that end the walk,
FAR = 2.0  # but not before this one: a vector between strangers may lead uphill first and well below the target then
NONE, PLAIN, PERMUTED, COORDINATES = "none", "plain", "permuted", "coordinates"


@dataclass(frozen=True)
class Lent:
    """What another method has made of the same examples, and paid for: a lesson, and the vector its maps turned.

    `work` is what that took: whoever borrows it can afford no more steps than who makes it himself."""

    lesson: Lesson
    vector: TaskVector
    work: Work


@dataclass(frozen=True)
class Old:
    """The old side beyond its answers: the vector under the teacher's names, and what answers to what.

    `rows` gives, for a token table of the target, the old row of every token (-1: none). `permuted` makes the vector
    with its units in the target's order, where bases of one shape can be aligned."""

    tau: TaskVector
    correspondence: Correspondence
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    permuted: Callable[[], TaskVector] | None = None
    lent: Lent | None = None

    def as_json(self) -> dict[str, Any]:
        return {"hash": self.correspondence.hash, "says": self.correspondence.lines()}


@dataclass(frozen=True)
class Start:
    """A point on a vector: `vector * alpha`. `curve` holds alphas and divergences; `passes` samples forward."""

    name: str
    vector: TaskVector | None
    alpha: float
    curve: tuple[tuple[float, float], ...] = ()
    passes: int = 0

    @property
    def value(self) -> float:
        return min((value for _, value in self.curve), default=math.inf)

    def as_json(self) -> dict[str, Any]:
        known = [(at, value if math.isfinite(value) else None) for at, value in self.curve]
        return {"alpha": self.alpha, "divergence": _known(self.value), "curve": known}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def choose_start(
    bound: Bound, vectors: Mapping[str, TaskVector], labelled: Batch | None, lesson: Lesson, recipe: Teaching
) -> tuple[Start, list[Start]]:
    """The start with the lowest divergence, and all that were tried; of equals the first.

    Without a teacher the few-shot loss takes the divergence's place."""
    return best_start(bound, vectors, probe_of(bound, labelled, lesson, recipe))


def learned_ways(
    start: Start, share: float, betas: tuple[float, float]
) -> Callable[[Mapping[str, nn.Parameter]], Coefficients] | None:
    """What makes the coefficients of the vector that was followed."""
    if start.vector is None:
        return None
    return partial(Coefficients, vector=start.vector, unit=start.alpha, share=share, betas=betas)


def best_start(
    bound: Bound, vectors: Mapping[str, TaskVector], probe: tuple[Callable[[], float], int]
) -> tuple[Start, list[Start]]:
    """The start where the probe is lowest, and all that were tried."""
    tried: list[Start] = []
    for name, vector in vectors.items():
        tried.append(_walk(bound, name, vector, probe, tried[0].curve[0] if tried else None))
    if not tried:
        return Start(NONE, None, 0.0), []
    best = min(tried, key=lambda start: start.value)
    return (best if best.alpha else Start(NONE, None, 0.0, best.curve)), tried


def probe_of(bound: Bound, labelled: Batch | None, lesson: Lesson, recipe: Teaching) -> tuple[Callable[[], float], int]:
    """What is measured at every alpha, and how many samples that takes, shorter ones as parts of one."""
    if len(lesson):
        held = lesson.take(torch.arange(len(lesson))[-recipe.probes :])
        samples = round(lesson.length(slice(-len(held), None)) * len(held))
        return lambda: unbiased_divergence(answers(bound, held.inputs), held.answers), samples
    assert labelled is not None  # no labels and no teacher is refused before
    few = take(labelled, torch.arange(min(recipe.labelled, len(labelled["labels"]))))

    @torch.no_grad()
    def loss() -> float:
        return float(bound.loss(bound.model, few).mean())

    return loss, len(few["labels"])


def _walk(
    bound: Bound,
    name: str,
    vector: TaskVector,
    probe: tuple[Callable[[], float], int],
    at_zero: tuple[float, float] | None,
) -> Start:
    """How the probe changes along a vector; the target itself, where all vectors begin, is measured once for all."""
    measure, samples = probe
    curve = [] if at_zero is None else [at_zero]
    known = len(curve)
    with dialled(bound.model, vector) as dial:
        for alpha in ALPHAS[known:]:
            dial.turn(alpha)
            value = measure()
            curve.append((alpha, math.inf if math.isnan(value) else value))
            lowest = min(range(len(curve)), key=lambda i: curve[i][1])
            if alpha >= FAR and len(curve) - 1 - lowest >= PATIENCE:
                break
    alpha = min(curve, key=lambda point: point[1])[0]
    return Start(name, vector, alpha, tuple(curve), (len(curve) - known) * samples)


def in_coordinates(
    bound: Bound, teacher: Bound, old: Old, lesson: Lesson, recipe: Teaching, methods: Sequence[str] = ("bico",)
) -> dict[str, Moved]:
    """The old vector in the target's coordinates, from the lesson's inputs and the teacher's answers to them.

    The inputs that judge a start are kept out of the maps. The teacher stands at its base meanwhile."""
    spare = len(lesson) - recipe.probes
    count = min(recipe.mapped, spare if spare >= recipe.probes else len(lesson))
    labels = lesson.answers.argmax(-1)
    batches = []
    for rows in _by_length(lesson.inputs, count).split(recipe.map_batch):
        told = labels[rows.to(labels.device)]
        sides = [take(side, rows) for side in (lesson.theirs, lesson.inputs)]
        batches.append(({**sides[0], "labels": told}, {**sides[1], "labels": told}))
    with dialled(teacher.model, old.tau) as dial:
        dial.turn(-1.0)
        return moves(
            old.tau, old.correspondence, Side(teacher.model, _asked(teacher)), Side(bound.model, _asked(bound)),
            batches, methods=methods, rows=old.rows,
        )  # fmt: skip


def _by_length(inputs: Batch, count: int) -> Tensor:
    """The first so many rows, short texts first: sums over all of them are the same in any order."""
    if "attention_mask" not in inputs:
        return torch.arange(count)
    return inputs["attention_mask"][:count].flatten(1).sum(1).argsort(stable=True).cpu()


def _asked(bound: Bound) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(bound.logits(model, batch).float(), batch["labels"], reduction="none")

    return loss


def step_unit(bound: Bound, tau: TaskVector | None, teacher: Bound | None, old: Old | None) -> float:
    """The typical entry of the vector: the measure of a step. 0 where the vector is zero in all that is trained.

    Across shapes its share of the old weights is what counts: a vector is as large as the weights it was made for."""
    if tau is not None:
        return typical_size(tau, bound.trainable())
    if old is None or teacher is None:
        return 0.0
    before, after = (_typical_weight(side) for side in (teacher, bound))
    return typical_size(old.tau, teacher.trainable()) * (after / before if before else 1.0)


def _typical_weight(bound: Bound) -> float:
    """Of the matrices: gains and biases have a scale of their own."""
    weights = {name: p.detach() for name, p in bound.model.named_parameters() if p.dim() > 1}
    return typical_size(weights, _both(weights, bound.trainable()))


def _both(names: Mapping[str, Tensor], others: Sequence[str]) -> list[str]:
    return [name for name in others if name in names]
