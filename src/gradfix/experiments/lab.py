"""Ask questions about a suite and keep the answers.

A question is a measure's name and its arguments, all plain data. Its answer is a small file that is whole or
absent, so a killed run loses the question it was in, experiments share answers, and questions can be answered
by several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput
from gradfix.experiments.suite import Scene, Suite
from gradfix.methods.workfolder import digest
from gradfix.registry import Registry

Answer = dict[str, Any]


class Question(NamedTuple):
    """What is asked: a measure and its arguments as sorted pairs."""

    measure: str
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, measure: str, arguments: Mapping[str, Any]) -> Question:
        return cls(measure, tuple(sorted(arguments.items())))

    def get(self, name: str) -> Any:
        return dict(self.arguments).get(name)

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Questions of one place share a model and its votes."""
        return (
            str(self.get("pair") or ""),
            str(self.get("task") or ""),
            self.get("shots") or 0,
            self.get("seed") or 0,
        )

    def __str__(self) -> str:
        shown = ", ".join(str(value) for _, value in self.arguments if value is not None)
        return f"{self.measure} ({shown})"


Measure = Callable[..., Answer]
MEASURES: Registry[Measure] = Registry("measure")


class Lab:
    """One process's view of a suite: opened scenes and stored answers."""

    def __init__(self, suite: Suite, store: Path) -> None:
        self.suite, self.store = suite, store
        self._identity = digest(suite.identity())
        self._scenes: OrderedDict[tuple[str, str], Scene] = OrderedDict()

    def scene(self, pair: str, task: str) -> Scene:
        key = (pair, task)
        if key not in self._scenes:
            while len(self._scenes) >= self.suite.scenes_kept:
                self._scenes.popitem(last=False)
            self._scenes[key] = self.suite.open(pair, task)
        self._scenes.move_to_end(key)
        return self._scenes[key]

    def known(self, question: Question) -> Answer | None:
        path = self._path(question)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return content["answer"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise CorruptInput(f"{path} is not a finished unit of work; remove it and run again.") from None

    def answer(self, question: Question) -> Answer:
        known = self.known(question)
        if known is not None:
            return known
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            found = MEASURES[question.measure](self, **dict(question.arguments))
        found = {**found, "took": round(time.perf_counter() - start, 3)}
        content = {"question": [question.measure, dict(question.arguments)], "answer": found}
        write_text(self._path(question), json.dumps(content, allow_nan=False) + "\n")
        return found

    def _path(self, question: Question) -> Path:
        name = digest([self._identity, question.measure, question.arguments])
        return self.store / "units" / f"{question.measure}-{name}.json"


class Blank(dict[str, Any]):
    """The answer while questions are only being listed."""

    def __missing__(self, name: str) -> Any:
        return 0.0


class Book:
    """What an experiment sees: the suite's names, and answers to its questions.

    Without answers it lists the questions, so that they can be counted, sorted and answered first."""

    def __init__(self, suite: Suite, answers: Mapping[Question, Answer] | None = None) -> None:
        self.suite, self.grid = suite, suite.grid
        self._answers = answers
        self.asked: dict[Question, None] = {}

    def ask(self, measure: str, **arguments: Any) -> Answer:
        question = Question.of(measure, arguments)
        self.asked[question] = None
        if self._answers is None:
            return Blank(curve=[], blocks={}, accuracies=Blank(), alpha=0.0)
        return self._answers[question]

    def fixed(self, pair: str, task: str, method: str) -> Answer:
        """A method that depends on neither budget nor seed."""
        grid = self.grid
        return self.ask("method", pair=pair, task=task, method=method, shots=grid.main[0], seed=grid.seeds[0])

    def seeded(self, pair: str, task: str, method: str, shots: int) -> list[Answer]:
        return [
            self.ask("method", pair=pair, task=task, method=method, shots=shots, seed=seed)
            for seed in self.grid.seeds
        ]

    def seconds(self) -> float:
        """What this book's questions took when they were answered, wherever that was."""
        return sum((self._answers or {}).get(question, {}).get("took", 0.0) for question in self.asked)


Progress = Callable[[str], None]


def answer_all(
    suite: Suite, store: Path, questions: Sequence[Question], stage: Progress
) -> dict[Question, Answer]:
    """Every answer; questions of one place are answered together, by as many processes as the suite likes."""
    lab = Lab(suite, store)
    found = {question: known for question in questions if (known := lab.known(question)) is not None}
    missing = sorted((q for q in questions if q not in found), key=lambda q: (q.place, str(q)))
    groups = [list(group) for _, group in groupby(missing, key=lambda q: q.place)]
    for question, answer in _answered(suite, lab, groups):
        found[question] = answer
        stage(f"{len(found)} of {len(questions)}: {question}")
    return found


def _answered(suite: Suite, lab: Lab, groups: Sequence[list[Question]]) -> Iterator[tuple[Question, Answer]]:
    workers = min(suite.processes, os.cpu_count() or 1, len(groups))
    if workers < 2:
        for group in groups:
            for question in group:
                yield question, lab.answer(question)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=spawn, initializer=_start, initargs=(suite, lab.store)
    ) as pool:
        jobs: list[Future[list[Answer]]] = []
        by_job: dict[Future[list[Answer]], list[Question]] = {}
        for group in sorted(groups, key=len, reverse=True):
            jobs.append(pool.submit(_work, group))
            by_job[jobs[-1]] = group
        try:
            for job in as_completed(jobs):
                yield from zip(by_job[job], job.result(), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_LAB: list[Lab] = []


def _start(suite: Suite, store: Path) -> None:
    """One thread per process: small models gain nothing from more."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch

    import gradfix.experiments.measures  # noqa: F401  fills the registry

    torch.set_num_threads(1)
    _LAB[:] = [Lab(suite, store)]


def _work(questions: Sequence[Question]) -> list[Answer]:
    return [_LAB[0].answer(question) for question in questions if _wanted()]


def _wanted() -> bool:
    """A killed parent leaves its workers behind; they stop at the next question."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
