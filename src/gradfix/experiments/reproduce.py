"""`gradfix reproduce`: plan the questions, answer them, lay out the tables.

Planning opens no model, so the cost is known before anything starts. Answers live in the out folder: a second
run, or another table that shares them, reads them back. Several processes may answer, and a table is written when
its last answer is there."""

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
from gradfix.system import processes

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
    asked: Mapping[str, Sequence[Question]]  # by table
    out: Path | None
    quick: bool
    jobs: int

    @property
    def questions(self) -> list[Question]:
        return list(dict.fromkeys(question for asked in self.asked.values() for question in asked))

    @property
    def estimate(self) -> Estimate:
        return self.suite.estimate(self.questions)

    def run(self, stage: Stage = lambda _: None) -> Reproduction:
        questions = self.questions
        with _folder(self.out) as store:
            self.suite.use(store, stage)
            opened = OpenSuite(self.suite, store)
            answers = {question: known for question in questions if (known := opened.known(question)) is not None}
            made = self._laid_out(answers, None)
            for question, answer in _answered(opened, [q for q in questions if q not in answers], self.jobs, stage):
                answers[question] = answer
                stage(f"{len(answers)} of {len(questions)}: {question}")
                made = self._laid_out(answers, made)
        return made

    def _laid_out(self, answers: Mapping[Question, Answer], before: Reproduction | None) -> Reproduction:
        """The tables whose answers are all known; those that were not there before are written."""
        old = before.content if before is not None else {}
        ready = {name for name, asked in self.asked.items() if name in old or all(q in answers for q in asked)}
        if before is not None and ready == set(old):
            return before
        fresh = {name: EXPERIMENTS[name].table(self.suite, answers) for name in self.asked if name in ready - set(old)}
        content = {name: fresh.get(name) or old[name] for name in self.asked if name in ready}
        seconds = sum(answer.get("took", 0.0) for answer in answers.values())
        made = Reproduction(self.suite.name, self.quick, content, versions(), seconds)
        if self.out is not None:
            _write(fresh, self.out)
            write_text(self.out / RESULTS, json.dumps(made.as_json(), indent=1) + "\n")
        return made


def plan_reproduce(
    table: str = "all",
    suite: str | Suite = "pocket",
    *,
    quick: bool = False,
    out: str | os.PathLike[str] | None = None,
    local: Sequence[str] = (),
    jobs: int | None = None,
) -> PlannedReproduction:
    """Check the names and list the questions; no model is opened and nothing is downloaded.

    `local` are NAME=FOLDER words: folders that stand in for models and datasets. `jobs` processes measure side by
    side; by default as many as the suite likes on this machine."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be 1 or more, got {jobs}.")
    names = _names(table)
    chosen = SUITES[suite](quick=quick, local=_folders(local)) if isinstance(suite, str) else suite
    asked: dict[str, list[Question]] = {}
    for name in names:
        ask = Questions(chosen)
        if not EXPERIMENTS[name].needs(chosen):
            EXPERIMENTS[name].run(ask)
        asked[name] = list(ask.asked)
    folder = Path(out) if out else Path(f"gradfix-reproduce-{chosen.name}") if chosen.asks_first else None
    return PlannedReproduction(chosen, asked, folder, quick, jobs or min(chosen.processes, os.cpu_count() or 1))


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


def _answered(
    opened: OpenSuite, missing: Sequence[Question], jobs: int, stage: Stage
) -> Iterator[tuple[Question, Answer]]:
    """Answers as they come. Questions of one place are answered together, by one of several processes.

    What two processes would both make, the fine-tunes, is made before."""
    ordered = sorted(missing, key=lambda q: (q.place, str(q)))
    groups = [list(group) for _, group in groupby(ordered, key=lambda q: q.place)]
    if min(jobs, len(groups)) < 2:
        for group in groups:
            for question in group:
                yield question, opened.answer(question)
        return
    with _workers(opened, min(jobs, len(groups))) as pool:
        tuned = opened.suite.fine_tunes(missing)
        for number, job in enumerate(as_completed([pool.submit(_tune, *one) for one in tuned]), 1):
            stage(f"{number} of {len(tuned)} fine-tunes: {job.result()}")
        largest_first = sorted(groups, key=len, reverse=True)
        for done in as_completed([pool.submit(_work, group) for group in largest_first]):
            yield from done.result()


@contextmanager
def _workers(opened: OpenSuite, count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the last question, or at once when anything goes wrong."""
    context: Any = multiprocessing.get_context(processes.START)
    start = (opened.suite, opened.store)
    with ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=start) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_OPENED: list[OpenSuite] = []


def _start(suite: Suite, store: Path) -> None:
    """One thread per process: small models gain nothing from more."""
    heal_torchvision()
    torch.set_num_threads(1)
    _OPENED[:] = [OpenSuite(suite, store)]


def _tune(model: str, task: str) -> str:
    if _wanted():
        _OPENED[0].suite.finetuned(model, task)
    return f"{model} on {task}"


def _work(questions: Sequence[Question]) -> list[tuple[Question, Answer]]:
    return [(question, _OPENED[0].answer(question)) for question in questions if _wanted()]


def _wanted() -> bool:
    """A killed parent leaves its workers behind; they stop at the next question."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
