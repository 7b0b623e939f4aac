"""What a comparison may try and how it keeps score: search grids, scores, curves, views of the few-shot set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from gradfix.errors import UsageError
from gradfix.tasks.base import Example
from gradfix.vectors.scale import PAPER_GRID, WIDEN_BY
from gradfix.vectors.taskvector import TaskVector


@dataclass(frozen=True, kw_only=True)
class Search:
    """What the methods may try. The same for all of them.

    `alphas` is widened by `wider` while its edge is best. They are walked on a part of the examples, and the better ones
    race on more of them. `full` measures every alpha on all examples instead, as the paper does; settings such
    as margins are then compared at the `probes` first."""

    alphas: tuple[float, ...] = PAPER_GRID
    wider: tuple[float, ...] = WIDEN_BY
    probes: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    margins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    rates: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4)
    steps: tuple[int, ...] = (5, 10, 20, 40)
    step_batch: int = 16
    folds: int = 5
    full: bool = False

    def __post_init__(self) -> None:
        if not self.alphas or min(*self.alphas, *self.probes) <= 0:
            raise UsageError("the alphas and probes of a search must be positive; 0 is always tried besides.")

    @classmethod
    def quick(cls) -> Search:
        """A coarse search for demonstrations: the same rules, fewer points."""
        return cls(
            alphas=(0.25, 0.5, 1.0), wider=(1.5, 2.0, 3.0, 4.0, 6.0, 8.0), probes=(0.5, 1.0), margins=(0.0, 0.4, 1.0),
            rates=(1e-4, 3e-4), steps=(8, 16), step_batch=16, folds=3,
        )  # fmt: skip


@dataclass(frozen=True)
class Score:
    """Counts of one measurement; scores of several folds add up to one that still knows its `parts`.

    `marks` has a "1" for every right answer and a "0" for every other, in the order of the examples. `further` are
    sums of other measures."""

    right: float
    loss_sum: float
    count: int
    marks: str = ""
    parts: tuple[Score, ...] = ()
    further: Mapping[str, float] = field(default_factory=dict)
    by_loss: bool = False  # open answers are hardly ever right to the letter: the loss tells them apart
    losses: tuple[float, ...] = ()  # of open answers, one by one

    def __add__(self, other: Score) -> Score:
        further = {name: value + other.further.get(name, 0.0) for name, value in self.further.items()}
        return Score(
            self.right + other.right, self.loss_sum + other.loss_sum, self.count + other.count,
            self.marks + other.marks, (*(self.parts or (self,)), *(other.parts or (other,))), further, self.by_loss,
            self.losses + other.losses,
        )  # fmt: skip

    @property
    def accuracy(self) -> float:
        return 100 * self.right / self.count

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count

    def as_json(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "loss": self.loss, "samples": self.count, **self.measures()}

    def measures(self) -> dict[str, float]:
        """The other measures, in percent."""
        return {name: 100 * value / self.count for name, value in self.further.items()}

    @property
    def value(self) -> float:
        """Accuracy; ties go to the lower loss, which is worth less than half an example. Of open answers the loss."""
        loss = self.loss if self.loss == self.loss else float("inf")
        if self.by_loss:
            return 100 / (1 + max(loss, 0.0))
        return self.accuracy + 0.5 * (100 / self.count) / (1 + max(loss, 0.0))


def total(scores: Iterable[Score]) -> Score:
    """One score of several sets, which are not empty together."""
    first, *others = scores
    return sum(others, first)


@dataclass(frozen=True)
class Curve:
    """Scores along alpha for one setting, all on the same examples."""

    points: dict[float, Score]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> float:
        return max(self.points, key=lambda alpha: (self.points[alpha].value, -alpha))

    @property
    def score(self) -> Score:
        return self.points[self.best]

    def scores(self) -> list[Score]:
        return [score for _, score in sorted(self.points.items())]

    def values(self) -> list[tuple[float, float]]:
        return [(alpha, score.value) for alpha, score in sorted(self.points.items())]

    def accuracies(self) -> list[tuple[float, float]]:
        return [(alpha, score.accuracy) for alpha, score in sorted(self.points.items())]


def of_the_choice(scores: Sequence[Score]) -> Score:
    """What choosing among these was worth: every fold is answered by what the other folds would have chosen.

    The best score itself is flattered, because its folds chose it. On a validation split, which is one part, it is
    taken as it is. Of equals the first."""
    best = max(scores, key=lambda score: score.value)
    if len(best.parts) < 2 or any(len(score.parts) != len(best.parts) for score in scores):
        return best
    answered = []
    for left in range(len(best.parts)):
        others = [reduce(add, [p for n, p in enumerate(score.parts) if n != left]) for score in scores]
        chosen = max(range(len(scores)), key=lambda n: others[n].value)
        answered.append(scores[chosen].parts[left])
    return reduce(add, answered)


@dataclass(frozen=True)
class View:
    """One way to split the few-shot set: what a method may learn from, and what it is scored on."""

    fit: tuple[Example, ...]
    held: str  # the name of the batches that score it
    left_out: int | None = None


@dataclass(frozen=True)
class Setting:
    """One thing a method can do: its knobs, and the update it makes from a view of the few-shot set.

    `key` names an update that other methods make as well: its scores are measured once."""

    knobs: Mapping[str, float]
    make: Callable[[View], TaskVector]
    key: str | None = None


@dataclass(frozen=True)
class Choice:
    """The setting and alpha that scored best, with its curve, and what the choice was worth."""

    setting: Setting
    alpha: float
    curve: Curve | None  # None where nothing was left to choose
    notes: tuple[str, ...] = ()
    worth: Score | None = None

    def accuracies(self) -> list[tuple[float, float]]:
        return self.curve.accuracies() if self.curve is not None else []
