"""The commands people type, as functions of a kind's folders: the words, the exit code, and what was reported.

Everything goes through the command line in this process; nothing is read but its output files."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gradfix.cli import run
from tests.journeys.kinds import Kind
from tests.journeys.scorers import causal_exact, causal_labels, is_adapter, seq2seq_labels, text_classes

REFUSALS = range(2, 9)


@dataclass(frozen=True)
class Journey:
    """A kind, where its checkpoints are, and where outputs may go."""

    kind: Kind
    home: Path
    outputs: Path

    @property
    def trio(self) -> tuple[str, ...]:
        home = self.home
        return ("--base", f"{home / 'base'}", "--tuned", f"{self.tuned}", "--target", f"{home / 'target'}")

    @property
    def task(self) -> tuple[str, ...]:
        return ("--data", f"{self.home / 'data'}", "--task", self.kind.task, "--device", "cpu", *self.kind.options)

    @property
    def tuned(self) -> Path:
        return self.home / self.kind.tuned

    def score(self, folder: Path, untuned: str) -> float:
        """What the user's own tool measures on the folder, a descendant of `untuned` (base or target).

        The scorer is shown the untuned model where it needs it: for a frozen head, for an adapter whose base is
        gone, and for adapters that peft has no AutoPeftModel class for."""
        kind = self.kind
        alone = kind.score in (text_classes, seq2seq_labels, causal_labels, causal_exact)
        lost = kind.lost_base and folder == self.tuned
        shown = kind.side or lost or (is_adapter(folder) and not alone)
        return kind.score(folder, self.home / "data", self.home / untuned if shown else None)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    message: str  # the last line on stderr
    printed: str
    seconds: float
    report: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None


def typed(*words: object, out: Path | None = None, report: Path | None = None) -> Outcome:
    """Type a command; `report` is where its --json goes."""
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        words = (*words, "--json", report)
    shown, complained = io.StringIO(), io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(complained):
        code = run([str(word) for word in words])
    seconds = time.perf_counter() - start
    lines = complained.getvalue().strip().splitlines()
    found = json.loads(report.read_text()) if report is not None and report.is_file() else {}
    message = next((line for line in reversed(lines) if line.startswith("gradfix:")), lines[-1] if lines else "")
    printed = shown.getvalue() + complained.getvalue()
    return Outcome(code, message, printed, seconds, found, out if out is not None and out.exists() else None)


SHORT_LESSONS = ("--lessons", 24, "--prompts", 64)


def transport(*method: str) -> Callable[[Journey], Outcome]:
    def go(journey: Journey) -> Outcome:
        name = "-".join(word.strip("-") for word in method) or "default"
        out = journey.outputs / name
        learns = not method or "best" in method
        brief = SHORT_LESSONS if learns and "chat" in journey.kind.name else ()
        words = (
            "transport",
            *journey.trio,
            *journey.task,
            *journey.kind.shaping,
            *method,
            *brief,
            "--shots",
            3,
            "--out",
            out,
        )
        return typed(*words, out=out, report=out.with_suffix(".json"))

    return go


def inspect(journey: Journey) -> Outcome:
    return typed("inspect", *journey.trio[1::2], report=journey.outputs / "inspect.json")


def compare(journey: Journey) -> Outcome:
    words = (
        "compare",
        *journey.trio,
        *journey.task,
        *journey.kind.shaping,
        "--methods",
        "naive",
        "few_shot",
        "--shots",
        3,
    )
    return typed(*words, "--no-finetune-target", report=journey.outputs / "compare.json")


def finetune(journey: Journey) -> Outcome:
    kind, out = journey.kind, journey.outputs / "finetune"
    model = journey.home / (kind.tuned if kind.adapter or kind.tuned.endswith(".pt") else "base")
    head = ("--new-head",) if kind.head and not kind.adapter else ()
    words = (
        "finetune",
        "--model",
        model,
        *journey.task,
        *head,
        "--steps",
        10,
        "--train-batch",
        12,
        "--lr",
        5e-3,
        "--out",
        out,
    )
    return typed(*words, out=out, report=out.with_suffix(".json"))


def evaluate(journey: Journey) -> Outcome:
    kind = journey.kind
    head = ("--head-from", journey.home / "base") if kind.side or kind.lost_base else ()
    return typed(
        "evaluate", "--model", journey.home / kind.tuned, *journey.task, *head, report=journey.outputs / "evaluate.json"
    )


def merge(journey: Journey) -> Outcome:
    """The one fine-tune as two halves, whose sum is the whole; a head that comes along comes once."""
    kind, out = journey.kind, journey.outputs / "merge"
    base, tuned, target = journey.trio[1::2]
    vector = {"base": base, "tuned": tuned, "data": str(journey.home / "data")}
    recipe: dict[str, Any] = {
        "target": target, "task": kind.task, "method": "task_arithmetic", "order": "plain", "alpha": 1.0, "shots": 3,
        "vectors": [vector] if kind.head else [{**vector, "weight": 0.5}, {**vector, "weight": 0.5}],
    }  # fmt: skip
    if kind.head:
        recipe["head"] = "copy"
    path = journey.outputs / "merge.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return typed("merge", path, "--out", out, out=out, report=out.with_suffix(".json"))


COMMANDS: dict[str, Callable[[Journey], Outcome]] = {
    "inspect": inspect,
    "transport": transport(),
    "best": transport("--method", "best"),
    "few_shot": transport("--method", "few_shot"),
    "naive": transport("--method", "naive"),
    "compare": compare,
    "out-lora": transport("--method", "naive", "--alpha", "1", "--out-lora", "16"),
    "finetune": finetune,
    "evaluate": evaluate,
    "merge": merge,
}


def reported(command: str, outcome: Outcome) -> float | None:
    """The accuracy the command claims for what it wrote or scored."""
    found = outcome.report
    if command == "inspect":
        return None
    if command == "evaluate":
        return found["accuracy"]
    if command == "finetune":
        return found["test"]["accuracy"]
    if command == "merge":
        (task,) = found["tasks"].values()
        return task["test_after"]["accuracy"]
    if command == "compare":
        return next(row["accuracy"] for row in found["rows"] if row["method"] == "naive")
    return found["test_after"]["accuracy"]
