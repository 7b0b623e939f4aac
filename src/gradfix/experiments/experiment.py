"""Experiments by name: one function per table or figure of the paper.

An experiment asks a book its questions and returns a table; it opens nothing and computes nothing heavy. Where
a suite cannot answer (a text table on images) the table says so and shows the paper's figures alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradfix.experiments import paper
from gradfix.experiments.lab import Answer, Book
from gradfix.experiments.suite import Suite
from gradfix.experiments.tables import Cell, Table, deviation, mean
from gradfix.methods.methods import METHODS
from gradfix.registry import Registry

Run = Callable[[Book], Table]


@dataclass(frozen=True)
class Experiment:
    """A table's function, its title, and why a suite cannot run it (an empty string where it can)."""

    run: Run
    title: str
    label: str
    needs: Callable[[Suite], str]


EXPERIMENTS: Registry[Experiment] = Registry("table")


def experiment(
    name: str, title: str, needs: Callable[[Suite], str] = lambda suite: ""
) -> Callable[[Run], Run]:
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


def both(left: Line, right: Line) -> list[tuple[float, float]]:
    """Means per task where both were measured."""
    pairs = [(value, right.per_task.get(task)) for task, value in left.per_task.items()]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def fixed_line(book: Book, pair: str, method: str) -> Line:
    values = {task: [_accuracy(book.fixed(pair, task, method))] for task in book.suite.tasks(pair)}
    known = paper.accuracies(book.suite.paper_model(pair), method)
    return Line(pair, title(method), None, values, known, method)


def seeded_line(book: Book, pair: str, method: str, shots: int) -> Line:
    values = {
        task: [_accuracy(answer) for answer in book.seeded(pair, task, method, shots)]
        for task in book.suite.tasks(pair)
    }
    known = paper.accuracies(book.suite.paper_model(pair), method, shots)
    return Line(pair, title(method), shots, values, known, method)


def _accuracy(answer: Answer) -> float | None:
    value: float | None = answer["accuracy"]
    return value


def accuracy_table(
    book: Book, lines: Sequence[Line], *, spread: bool = False
) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows: ours per task and on average, the paper's beside it where it has the task."""
    tasks = list(dict.fromkeys(task for line in lines for task in line.values))
    shared = [task for task in tasks if any(task in line.paper for line in lines)]
    header = ["pair", "method", "per class", *tasks, "mean"]
    header += ["std over seeds"] if spread else []
    header += [*(f"paper {task}" for task in shared), "paper mean"]
    rows: list[list[Cell]] = []
    for line in lines:
        row: list[Cell] = [line.pair, line.name, line.shots]
        row += [line.per_task.get(task) for task in tasks]
        row.append(line.mean)
        if spread:
            row.append(line.deviation)
        row += [line.paper.get(task) for task in shared]
        rows.append([*row, paper.average(line.paper)])
    return header, rows
