"""How a setting and its alpha are chosen: a walk on a part of the examples, then a race of the better ones on more.

In full (`Search.full`), and where the examples are too few to cut, every alpha is measured on everything, as the paper
does. Either way the choice is made by scores on all examples, and 0 is a candidate to the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from gradfix.errors import UnsafeResult, UsageError
from gradfix.methods.search import Choice, Curve, Score, Setting, View, total
from gradfix.training.costs import Work
from gradfix.vectors.scale import Dial, dialled, highest, walk
from gradfix.vectors.taskvector import TaskVector

if TYPE_CHECKING:
    from gradfix.methods.support import Support
    from gradfix.methods.trial import Trial

A_RUNG = 0.6  # passes over all examples that one rung of a race may take
FINALISTS = 2  # at least so many see every example

Lane = tuple[int, float]  # a setting's number and an alpha above 0


def choose(trial: Trial, support: Support, settings: Sequence[Setting], alphas: Sequence[float] | None) -> Choice:
    """The best setting and alpha; with `alphas` only those (and 0) are tried."""
    race = Race(trial, support, settings)
    if alphas is not None:
        if len(settings) > 1:
            raise UsageError("fixed alphas are for methods with one setting.")
        race.finish((0, alpha) for alpha in alphas)
        return race.choice(0, None)
    winner = _raced(race) if race.last else _in_full(race)
    return race.choice(winner, max(trial.search.alphas))


def _in_full(race: Race) -> int:
    """Settings at the probes, then the best one on the whole grid, widened while its edge is best."""
    search, numbers, best = race.trial.search, range(len(race.settings)), 0
    if len(numbers) > 1:
        race.finish((number, alpha) for number in numbers for alpha in search.probes)
        best = max(numbers, key=lambda number: (race.curve(number).score.value, -number))
    race.finish((best, alpha) for alpha in search.alphas)
    edge = max(search.alphas)
    for alpha in sorted(alpha for alpha in search.wider if alpha > edge):
        if race.curve(best).best < edge:
            break
        race.finish([(best, alpha)])
        edge = alpha
    return best


def _raced(race: Race) -> int:
    """A walk on the first rung, then fewer and fewer lanes on the others; the setting that wins."""
    _walked(race)
    for rung in range(1, len(race.rungs)):
        race.run(race.leading(rung - 1, max(FINALISTS, round(A_RUNG / race.share(rung)))), rung)
    numbers = sorted({number for number, _ in race.on(race.last)})
    return max(numbers, key=lambda number: (race.curve(number).score.value, -number))


def _walked(race: Race) -> None:
    """Alphas of the middle setting; then all settings at its best one and at those beside it."""
    search, middle, several = race.trial.search, len(race.settings) // 2, len(race.settings) > 1

    def measure(alpha: float) -> float:
        return race.value((middle, alpha), 0) if alpha else race.zero(0).value

    found = walk(search.alphas, search.wider, measure, rounds=0 if several else 2)
    if several:
        walked = [alpha for alpha in found if alpha]
        place = walked.index(highest([point for point in found.items() if point[0]]))
        beside = walked[max(0, place - 1) : place + 2]
        race.run([(number, alpha) for number in range(len(race.settings)) for alpha in beside], 0)


class Race:
    """Scores of lanes on more and more examples. Alpha 0 is the same in every setting, and never left behind."""

    def __init__(self, trial: Trial, support: Support, settings: Sequence[Setting]) -> None:
        self.trial, self.settings = trial, settings
        self.rungs = support.rungs()
        self.last = len(self.rungs) - 1
        self.scores: dict[Lane, list[Score]] = {}  # of the rungs so far, one by one
        self._made: tuple[Setting, View, TaskVector] | None = None  # the last update: mostly the next one, too

    def share(self, rung: int) -> float:
        """How much of all examples a rung adds."""
        sizes = [sum(len(self.trial.examples[held]) for _, held in one) for one in self.rungs]
        return sizes[rung] / sum(sizes)

    def run(self, lanes: Iterable[Lane], rung: int) -> None:
        """Bring the lanes up to a rung; those that were there already stay as they are."""
        lanes = list(dict.fromkeys(lanes))
        for step in range(rung + 1):
            missing = [lane for lane in lanes if len(self.scores.setdefault(lane, [])) == step]
            found: dict[Lane, list[Score]] = {lane: [] for lane in missing}
            for view, held in self.rungs[step]:
                for number in dict.fromkeys(number for number, _ in missing):
                    alphas = [alpha for owner, alpha in missing if owner == number]
                    for alpha, score in self._along(view, held, self.settings[number], alphas):
                        found[number, alpha].append(score)
            for lane, scores in found.items():
                self.scores[lane].append(total(scores))

    def finish(self, lanes: Iterable[Lane]) -> None:
        self.run(lanes, self.last)

    def on(self, rung: int) -> list[Lane]:
        return [lane for lane, scores in self.scores.items() if len(scores) > rung]

    def so_far(self, lane: Lane, rung: int) -> Score:
        return total(self.scores[lane][: rung + 1])

    def value(self, lane: Lane, rung: int) -> float:
        self.run([lane], rung)
        return self.so_far(lane, rung).value

    def zero(self, rung: int) -> Score:
        return total(self.trial.untouched(held) for one in self.rungs[: rung + 1] for _, held in one)

    def leading(self, rung: int, count: int) -> list[Lane]:
        """The lanes that stand best on a rung; of equals the smaller alpha."""
        values = {lane: self.so_far(lane, rung).value for lane in self.on(rung)}
        return sorted(values, key=lambda lane: (-values[lane], lane[1], lane[0]))[:count]

    def curve(self, number: int) -> Curve:
        """What was measured on all examples."""
        ended = sorted(alpha for owner, alpha in self.on(self.last) if owner == number)
        return Curve({0.0: self.zero(self.last), **{a: self.so_far((number, a), self.last) for a in ended}})

    def choice(self, number: int, edge: float | None) -> Choice:
        curve = self.curve(number)
        looked = max(alpha for owner, alpha in self.scores if owner == number)
        notes = _notes(curve, looked, edge)
        ended = [self.so_far(lane, self.last) for lane in sorted(self.on(self.last))]
        worth = self.trial.worth([self.zero(self.last), *ended])
        return Choice(self.settings[number], curve.best, Curve(curve.points, notes), notes, worth)

    def _along(self, view: View, held: str, setting: Setting, alphas: Iterable[float]) -> Iterator[tuple[float, Score]]:
        """Settings that several methods share are measured once, and billed to each."""
        with ExitStack() as stack:
            dials: list[Dial] = []

            def measure(alpha: float) -> Score:
                if not dials:
                    dials.append(stack.enter_context(dialled(self.trial.model, self._update(setting, view))))
                dials[0].turn(alpha)
                self.trial.bill.own += Work(vectors=1)
                return self.trial.score(held)

            for alpha in alphas:
                if setting.key is None:
                    yield alpha, measure(alpha)
                else:
                    key = f"score-{setting.key}-{held}-{alpha}"
                    yield alpha, self.trial.shared(key, partial(measure, alpha))

    def _update(self, setting: Setting, view: View) -> TaskVector:
        if self._made is None or self._made[0] is not setting or self._made[1] is not view:
            self._made = None  # never two at a time
            self._made = (setting, view, setting.make(view))
        return self._made[2]


def _notes(curve: Curve, looked: float, edge: float | None) -> tuple[str, ...]:
    """What a reader of the curve should know; `looked` is the largest alpha that was looked at, `edge` the grid's end."""
    best, notes = curve.best, []
    if curve.score.loss != curve.score.loss:
        raise UnsafeResult("no alpha gives a finite loss; the update or the model is not finite.")
    if edge is not None and best >= edge and looked > edge:
        notes.append(f"the best alpha lay at the edge {edge:g}, so the grid was widened to {looked:g}")
    if best == looked:
        notes.append(f"the best alpha {best:g} is the largest one tried: a wider grid may do better")
    if best == 0:
        notes.append("alpha 0 scored best: do not transport")
    return tuple(notes)
