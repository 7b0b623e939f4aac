"""Send finished results to an experiment tracker: `tensorboard:FOLDER`, `wandb:PROJECT` or `trackio:PROJECT`.

A tracker is a function of (results, where) in one registry. Nothing is imported before it is asked for, and
a tracker that is not installed is an error before the work starts, not after."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gradfix.errors import UsageError
from gradfix.methods.results import Results
from gradfix.registry import Registry
from gradfix.report.markdown import to_markdown

Send = Callable[[Results, str], None]
CURVE_STEPS = 1000  # trackers count in whole steps: alpha 0.25 is step 250


@dataclass(frozen=True)
class Tracker:
    """How to send, and the package it takes."""

    send: Send
    package: str


TRACKERS: Registry[Tracker] = Registry("tracker")


def tracker(name: str, package: str) -> Callable[[Send], Send]:
    def add(send: Send) -> Send:
        TRACKERS.register(name)(Tracker(send, package))
        return send

    return add


def parse(spec: str) -> tuple[Tracker, str]:
    """The tracker and its folder or project; an unknown or missing tracker is an error with the way out."""
    name, _, where = spec.partition(":")
    found = TRACKERS[name]
    if not where:
        raise UsageError(f"--track {name} needs a folder or project: --track {name}:NAME.")
    if find_spec(found.package) is None:
        raise UsageError(f"--track {name} needs the package {found.package}: run `pip install {found.package}`.")
    return found, where


def track(results: Results, spec: str) -> None:
    """Send every row, curve and verdict of the results to the tracker that `spec` names."""
    found, where = parse(spec)
    found.send(results, where)


def scalars(results: Results) -> Iterator[tuple[str, float, int]]:
    """(name, value, step): accuracy and recovered share over shots, and the alpha curves."""
    for row in results.summary_rows():
        place = "/".join(part for part in (row["pair"], row["method"]) if part)
        for key in ("accuracy", "recovered", "alpha", "seconds"):
            if row[key] is not None:
                yield f"{key}/{place}", float(row[key]), int(row["shots"])
    for curve in results.curves:
        place = "/".join(str(curve[key]) for key in ("pair", "method", "shots", "seed") if curve.get(key) is not None)
        for alpha, score in curve["points"]:
            yield f"alpha_curve/{place}", float(score), round(alpha * CURVE_STEPS)


@tracker("tensorboard", "tensorboard")
def to_tensorboard(results: Results, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for name, value, step in scalars(results):
            writer.add_scalar(name, value, step)
        writer.add_text("verdict", str(results.verdict.get("text", "")))
        writer.add_text("table", to_markdown(results))


@tracker("wandb", "wandb")
def to_wandb(results: Results, project: str) -> None:
    _log_run(importlib.import_module("wandb"), results, project)


@tracker("trackio", "trackio")
def to_trackio(results: Results, project: str) -> None:
    _log_run(importlib.import_module("trackio"), results, project)


def _log_run(client: Any, results: Results, project: str) -> None:
    """wandb's words, which trackio shares: init, log, finish. Steps of a run only grow, so they are sorted."""
    verdict = str(results.verdict.get("text", ""))
    client.init(project=project, config={"verdict": verdict, **results.versions})
    by_step: dict[int, dict[str, float]] = {}
    for name, value, step in scalars(results):
        by_step.setdefault(step, {})[name] = value
    for step in sorted(by_step):
        client.log(by_step[step], step=step)
    client.finish()
