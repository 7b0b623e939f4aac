"""Experiments by name: one function per table or figure of the paper.

An experiment asks its questions and returns a table of numbers with the claims it tests; it opens nothing and
computes nothing heavy. Cells are numbers or names, formatted where a person reads them. A claim holds, holds
partly or does not hold, by a rule that is part of the experiment and not of the reader's mood. Where a suite
cannot answer (a text table on images) the table says so and shows the paper's figures alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from gradfix.experiments import paper
from gradfix.experiments.measures import Answer, Question
from gradfix.experiments.suite import Suite
from gradfix.methods.methods import METHODS
from gradfix.registry import Registry

Cell = str | int | float | None

HOLDS, PARTLY, FAILS = "holds", "holds partly", "does not hold"
CLEAR = 1.0  # points of accuracy: a smaller difference is called equal


class Unanswered(dict[str, Any]):
    """The answer while questions are only being listed."""

    def __missing__(self, name: str) -> Any:
        return 0.0


class Questions:
    """What an experiment sees: the suite's names, and answers to its questions.

    Without answers it lists the questions, so that they can be counted, sorted and answered first."""

    def __init__(self, suite: Suite, answers: Mapping[Question, Answer] | None = None) -> None:
        self.suite, self.grid = suite, suite.grid
        self._answers = answers
        self.asked: dict[Question, None] = {}

    def measure(self, name: str, **arguments: Any) -> Answer:
        question = Question.of(name, arguments)
        self.asked[question] = None
        if self._answers is None:
            return Unanswered(curve=[], blocks={}, accuracies=Unanswered(), alpha=0.0)
        return self._answers[question]

    def method(self, pair: str, task: str, method: str, shots: int, seed: int) -> Answer:
        return self.measure("method", pair=pair, task=task, method=method, shots=shots, seed=seed)

    def fixed(self, pair: str, task: str, method: str) -> Answer:
        """A method that depends on neither budget nor seed."""
        return self.method(pair, task, method, self.grid.main[0], self.grid.seeds[0])

    def seeded(self, pair: str, task: str, method: str, shots: int) -> list[Answer]:
        return [self.method(pair, task, method, shots, seed) for seed in self.grid.seeds]

    def seconds(self) -> float:
        """What these questions took when they were answered, wherever that was."""
        return sum((self._answers or {}).get(question, {}).get("took", 0.0) for question in self.asked)


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, what was found about it, and the figures that say so."""

    text: str
    holds: str | None
    evidence: str


@dataclass(frozen=True)
class Figure:
    """Data of a picture: `kind` is "lines" or "heat", one panel per task or pair."""

    kind: str
    x: str
    y: str
    panels: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PaperTable:
    """One table or figure of the paper, measured; `paper` is what stands there, the title the experiment's own
    unless it says more."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    claims: Sequence[Claim] = ()
    paper: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None
    figure: Figure | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """A table's function, its title, its name in the paper, and why a suite cannot run it ("" where it can)."""

    run: Callable[[Questions], PaperTable]
    title: str
    label: str
    needs: Callable[[Suite], str]

    def table(self, suite: Suite, answers: Mapping[Question, Answer]) -> dict[str, Any]:
        """The table as JSON; where the suite cannot run it, the reason in its place."""
        ask, reason = Questions(suite, answers), self.needs(suite)
        made = PaperTable(["not measured"], [[reason]], notes=[reason]) if reason else self.run(ask)
        return {
            "title": made.title or self.title,
            "header": list(made.header),
            "rows": [list(row) for row in made.rows],
            "paper": {"label": self.label, **made.paper},
            "claim": " ".join(claim.text for claim in made.claims),
            "holds": overall(made.claims),
            "claims": [vars(claim) for claim in made.claims],
            "notes": list(made.notes),
            "figure": vars(made.figure) if made.figure is not None else None,
            "seconds": round(ask.seconds(), 2),
        }


EXPERIMENTS: Registry[Experiment] = Registry("table")
Run = Callable[[Questions], PaperTable]


def experiment(name: str, title: str, needs: Callable[[Suite], str] = lambda suite: "") -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        EXPERIMENTS.register(name)(Experiment(run, title, paper.LABELS[name], needs))
        return run

    return add


def title(method: str) -> str:
    return METHODS[method].title


@dataclass(frozen=True)
class Line:
    """One row of an accuracy table before it is laid out: accuracies per task, one per seed."""

    pair: str
    name: str
    shots: int | None
    values: Mapping[str, Sequence[float | None]]
    paper: Mapping[str, float]
    method: str = ""

    @property
    def per_task(self) -> dict[str, float | None]:
        return {task: mean(found) for task, found in self.values.items()}

    @property
    def mean(self) -> float | None:
        return mean(list(self.per_task.values()))

    @property
    def deviation(self) -> float | None:
        """Over seeds, averaged over the tasks."""
        return mean([deviation(found) for found in self.values.values()])


def fixed_line(ask: Questions, pair: str, method: str, model: str | None = None) -> Line:
    """Beside it what the paper has for `model`, or for its model that the pair is set beside."""
    values = {task: [ask.fixed(pair, task, method)["accuracy"]] for task in ask.suite.tasks(pair)}
    known = paper.accuracies(model or ask.suite.paper_model(pair), method)
    return Line(pair, title(method), None, values, known, method)


def seeded_line(ask: Questions, pair: str, method: str, shots: int) -> Line:
    values = {
        task: [answer["accuracy"] for answer in ask.seeded(pair, task, method, shots)] for task in ask.suite.tasks(pair)
    }
    known = paper.accuracies(ask.suite.paper_model(pair), method, shots)
    return Line(pair, title(method), shots, values, known, method)


def accuracy_table(lines: Sequence[Line], *, spread: bool = False) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows: ours per task and on average, the paper's beside it where it has the task."""
    tasks = list(dict.fromkeys(task for line in lines for task in line.values))
    shared = [task for task in tasks if any(task in line.paper for line in lines)]
    header = ["pair", "method", "per class", *tasks, "mean", *(["std over seeds"] if spread else [])]
    header += [*(f"paper {task}" for task in shared), "paper mean"]
    rows: list[list[Cell]] = []
    for line in lines:
        row: list[Cell] = [line.pair, line.name, line.shots]
        row += [*(line.per_task.get(task) for task in tasks), line.mean]
        row += [line.deviation] if spread else []
        rows.append([*row, *(line.paper.get(task) for task in shared), paper.average(line.paper)])
    return header, rows


def both(left: Line, right: Line) -> list[tuple[float, float]]:
    """Means per task where both were measured."""
    pairs = [(value, right.per_task.get(task)) for task, value in left.per_task.items()]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def beats(sentence: str, *lines: tuple[Line, Line], where: str = "") -> Claim:
    """The left line of every pair is better, clearly, on every task; the evidence is the last pair's."""
    wins = [better(a, b) for left, right in lines for a, b in both(left, right)]
    left, right = lines[-1]
    return Claim(sentence, verdict(wins), f"mean {points(left.mean, right.mean)}{where}")


def stays(sentence: str, lines: Sequence[Line], zero: Line, what: str = " zero-shot") -> Claim:
    """Every line is within two points of another one on every task."""
    near = [abs(a - b) <= 2 * CLEAR for line in lines for a, b in both(line, zero)]
    shown = ", ".join(text(line.mean) for line in lines)
    return Claim(sentence, verdict(near), f"mean {shown} against {text(zero.mean)}{what}")


def overall(claims: Sequence[Claim]) -> str | None:
    found = {claim.holds for claim in claims if claim.holds is not None}
    if not found:
        return None
    return found.pop() if len(found) == 1 else PARTLY


def verdict(wins: Sequence[bool]) -> str | None:
    """All, some or none; nothing measured is no verdict."""
    if not wins:
        return None
    return HOLDS if all(wins) else PARTLY if any(wins) else FAILS


def better(left: float, right: float) -> bool:
    return left - right > CLEAR


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) > 1 else None


def text(cell: Cell) -> str:
    """A cell as a person reads it."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if 0 < abs(cell) < 1 or abs(cell) >= 1e6 else f"{cell:.1f}"
    return str(cell)


def text_rows(rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    return [[text(cell) for cell in row] for row in rows]


def points(left: float | None, right: float | None) -> str:
    """ "58.4 against 22.2": the way evidence quotes two accuracies."""
    return f"{text(left)} against {text(right)}"
