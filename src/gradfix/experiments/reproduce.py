"""`gradfix reproduce`: plan the questions, answer them, lay out the tables.

Planning opens nothing, so the cost is known before anything starts. Answers live in the out folder: a second
run, or another table that shares them, reads them back. Several processes may answer."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.folder import versions
from gradfix.checkpoints.write import write_text
from gradfix.errors import UsageError
from gradfix.experiments import paper
from gradfix.experiments.experiment import EXPERIMENTS, Questions, text_rows
from gradfix.experiments.measures import Answer, OpenSuite, Question
from gradfix.experiments.suite import SUITES, Estimate, Suite
from gradfix.registry import unknown

Stage = Callable[[str], None]
RESULTS = "reproduction.json"


@dataclass(frozen=True)
class Reproduction:
    """The tables that were asked for, in the paper's order."""

    suite: str
    quick: bool
    content: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, Any]
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "quick": self.quick,
            "measured_seconds": round(self.seconds, 1),
            "tables": {name: dict(table) for name, table in self.content.items()},
            **self.versions,
        }

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, header and cells as text, for any printer; the claims come last."""
        shown = []
        for table in self.content.values():
            label = table["paper"].get("label", "")
            header, rows = _narrow(list(table["header"]), text_rows(table["rows"]))
            shown.append((f"{label}: {table['title']}", header, rows))
        claims = [
            [f"{claim['text']} ({claim['evidence']})", claim["holds"] or "not measured"]
            for table in self.content.values()
            for claim in table["claims"]
        ]
        return [*shown, ("Claims of the paper", ["claim", "verdict here"], claims)]


def _narrow(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Pair and method in one column: a terminal is narrow."""
    if header[:2] != ["pair", "method"]:
        return header, rows
    several = len({row[0] for row in rows}) > 1
    return header[1:], [[f"{row[0]}: {row[1]}" if several else row[1], *row[2:]] for row in rows]


@dataclass(frozen=True)
class PlannedReproduction:
    """What a reproduction will ask, and what that costs."""

    suite: Suite
    names: Sequence[str]
    questions: Sequence[Question]
    out: Path | None
    quick: bool

    @property
    def estimate(self) -> Estimate:
        return self.suite.estimate(self.questions)

    def run(self, stage: Stage = lambda _: None) -> Reproduction:
        with _folder(self.out) as store:
            self.suite.use(store, stage)
            answers = answer_all(self.suite, store, self.questions, stage)
            stage("laying out the tables")
            content = {name: EXPERIMENTS[name].table(self.suite, answers) for name in self.names}
        seconds = sum(answer.get("took", 0.0) for answer in answers.values())
        made = Reproduction(self.suite.name, self.quick, content, versions(), seconds)
        if self.out is not None:
            _write(content, self.out)
            write_text(self.out / RESULTS, json.dumps(made.as_json(), indent=1) + "\n")
        return made


def plan_reproduce(
    table: str = "all",
    suite: str | Suite = "pocket",
    *,
    quick: bool = False,
    out: str | os.PathLike[str] | None = None,
    local: Sequence[str] = (),
) -> PlannedReproduction:
    """Check the names and list the questions; nothing is opened or downloaded.

    `local` are NAME=FOLDER words: folders that stand in for hub models and datasets."""
    names = _names(table)
    chosen = SUITES[suite](quick=quick, local=_folders(local)) if isinstance(suite, str) else suite
    questions: dict[Question, None] = {}
    for name in names:
        if not EXPERIMENTS[name].needs(chosen):
            ask = Questions(chosen)
            EXPERIMENTS[name].run(ask)
            questions |= ask.asked
    folder = Path(out) if out else Path(f"gradfix-reproduce-{chosen.name}") if chosen.asks_first else None
    return PlannedReproduction(chosen, names, list(questions), folder, quick)


def _names(table: str) -> list[str]:
    if table == "all":
        return sorted(EXPERIMENTS, key=lambda name: list(paper.LABELS).index(name))
    if table not in EXPERIMENTS:
        raise UsageError(unknown("table", table, [*EXPERIMENTS, "all"]))
    return [table]


def _folders(local: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in local:
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise UsageError(f"--local {entry!r} must read NAME=FOLDER, e.g. tanganke/dtd=data/dtd.")
        found[name] = folder
    return found


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="gradfix-reproduce-") as folder:
        yield Path(folder)


def _write(content: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """One Markdown and one JSON file per table, and the figures."""
    from gradfix.experiments.document import draw, markdown  # a script as well: imported early, it would run twice

    for name, table in content.items():
        path = out / "tables" / f"{name}.json"
        write_text(path, json.dumps(table, indent=1) + "\n")
        write_text(path.with_suffix(".md"), markdown(table))
        if table["figure"] is not None:
            draw(table["figure"], table["title"], out / "figures" / name)


def answer_all(suite: Suite, store: Path, questions: Sequence[Question], stage: Stage) -> dict[Question, Answer]:
    """Every answer; questions of one place are answered together, by as many processes as the suite likes."""
    opened = OpenSuite(suite, store)
    found = {question: known for question in questions if (known := opened.known(question)) is not None}
    missing = sorted((q for q in questions if q not in found), key=lambda q: (q.place, str(q)))
    groups = [list(group) for _, group in groupby(missing, key=lambda q: q.place)]
    for question, answer in _answered(suite, opened, groups):
        found[question] = answer
        stage(f"{len(found)} of {len(questions)}: {question}")
    return found


def _answered(suite: Suite, opened: OpenSuite, groups: Sequence[list[Question]]) -> Iterator[tuple[Question, Answer]]:
    workers = min(suite.processes, os.cpu_count() or 1, len(groups))
    if workers < 2:
        for group in groups:
            for question in group:
                yield question, opened.answer(question)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(suite, opened.store)) as pool:
        jobs = {pool.submit(_work, group): group for group in sorted(groups, key=len, reverse=True)}
        try:
            for job in as_completed(jobs):
                yield from zip(jobs[job], job.result(), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_OPENED: list[OpenSuite] = []


def _start(suite: Suite, store: Path) -> None:
    """One thread per process: small models gain nothing from more."""
    heal_torchvision()
    torch.set_num_threads(1)
    _OPENED[:] = [OpenSuite(suite, store)]


def _work(questions: Sequence[Question]) -> list[Answer]:
    return [_OPENED[0].answer(question) for question in questions if _wanted()]


def _wanted() -> bool:
    """A killed parent leaves its workers behind; they stop at the next question."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
