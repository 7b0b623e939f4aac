"""`gradfix reproduce`: plan the questions, answer them, lay out the tables.

Planning opens nothing, so the cost is known before anything starts. Answers live in the out folder: a second
run, or another table that shares them, reads them back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfix.checkpoints.folder import versions
from gradfix.checkpoints.write import write_text
from gradfix.commands.configs import ReproduceConfig
from gradfix.errors import UsageError
from gradfix.experiments import paper
from gradfix.experiments.experiment import EXPERIMENTS
from gradfix.experiments.figures import draw
from gradfix.experiments.lab import Answer, Book, Question, answer_all
from gradfix.experiments.suite import SUITES, Estimate, Suite
from gradfix.experiments.tables import Table, text_rows
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
    files: Sequence[str] = field(default=())

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
class Job:
    """A planned reproduction: what it will ask, and what that costs."""

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
            content = {name: _table(name, self.suite, answers) for name in self.names}
            files = [str(path) for path in _write(content, self.out)] if self.out is not None else []
        seconds = sum(answer.get("took", 0.0) for answer in answers.values())
        made = Reproduction(self.suite.name, self.quick, content, versions(), seconds, files)
        if self.out is not None:
            write_text(self.out / RESULTS, json.dumps(made.as_json(), indent=1) + "\n")
        return made


def plan_reproduce(config: ReproduceConfig, suite: Suite | None = None) -> Job:
    """Check the names and list the questions; nothing is opened or downloaded."""
    names = _names(config.table)
    chosen = suite if suite is not None else SUITES[config.suite](quick=config.quick, local=_local(config))
    questions: dict[Question, None] = {}
    for name in names:
        if not EXPERIMENTS[name].needs(chosen):
            book = Book(chosen)
            EXPERIMENTS[name].run(book)
            questions |= book.asked
    out = Path(config.out) if config.out else None
    if out is None and chosen.asks_first:
        out = Path(f"gradfix-reproduce-{chosen.name}")
    return Job(chosen, names, list(questions), out, config.quick)


def run_reproduce(
    config: ReproduceConfig, stage: Stage = lambda _: None, suite: Suite | None = None
) -> Reproduction:
    """Reproduce one table or all of them on a suite; `suite` replaces the one the config names."""
    return plan_reproduce(config, suite).run(stage)


def _names(table: str) -> list[str]:
    if table == "all":
        return sorted(EXPERIMENTS, key=lambda name: list(paper.LABELS).index(name))
    if table not in EXPERIMENTS:
        raise UsageError(unknown("table", table, [*EXPERIMENTS, "all"]))
    return [table]


def _local(config: ReproduceConfig) -> dict[str, str]:
    found = {}
    for entry in config.local:
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


def _table(name: str, suite: Suite, answers: Mapping[Question, Answer]) -> dict[str, Any]:
    entry = EXPERIMENTS[name]
    reason = entry.needs(suite)
    if reason:
        absent = Table(
            entry.title, ["not measured"], [[reason]], {"label": paper.LABELS[name]}, notes=[reason]
        )
        return absent.as_json(0.0)
    book = Book(suite, answers)
    return entry.run(book).as_json(book.seconds())


def _write(content: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """One Markdown and one JSON file per table, and the figures."""
    files = []
    for name, table in content.items():
        path = out / "tables" / f"{name}.json"
        write_text(path, json.dumps(table, indent=1) + "\n")
        write_text(path.with_suffix(".md"), markdown(table))
        files += [path, path.with_suffix(".md")]
        if table["figure"] is not None:
            files += draw(table["figure"], table["title"], out / "figures" / name)
    return files


def markdown(table: Mapping[str, Any]) -> str:
    """A table with its claims, as Markdown."""
    header = list(table["header"])
    lines = [f"## {table['paper'].get('label', '')}: {table['title']}", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in text_rows(table["rows"])]
    lines += ["", *(f"{note}\n" for note in table["notes"])]
    lines += [f"- {c['text']} **{c['holds'] or 'not measured'}** ({c['evidence']})" for c in table["claims"]]
    return "\n".join(lines) + "\n"
