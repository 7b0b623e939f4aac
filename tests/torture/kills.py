"""Long runs killed at random moments: the same command goes on, ends in the same bits and loses little."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.world import World, hashes
from tests.torture.children import Outcome, Series, finish, kill, start
from tests.torture.commands import compare_words, finetune_words, hastened, vote_words
from tests.torture.crashes import CHILD_LIMIT, Work, relative


@dataclass(frozen=True)
class Job:
    """Work on one output; `saved` is what a killed run leaves to go on from."""

    name: str
    work: Work
    out: Path
    saved: Path
    inputs: tuple[Path, ...]
    ledger: Ledger | None = None


class Ledger:
    """The units of a comparison: begun by the running process, and finished on disk."""

    def __init__(self, units: Path, begun: Path) -> None:
        self.units, self.begun = units, begun
        self._kept: dict[str, str] = {}

    def open(self) -> None:
        """A process is about to start."""
        self._kept = self._finished()
        self.begun.write_bytes(b"")

    def settle(self, allowed: int) -> str:
        """What is wrong after a process has ended; it may have lost so many units."""
        now = self._finished()
        if any(now.get(path) != digest for path, digest in self._kept.items()):
            return "a finished unit is gone or has changed"
        lost = self.begun.stat().st_size - (len(now) - len(self._kept))
        return "" if 0 <= lost <= allowed else f"{lost} units were begun and are not on disk"

    def record(self, run: type[Any]) -> None:
        """Count every unit that a comparison begins, one byte each."""
        real, log = run._work, self.begun

        def counted(*given: Any) -> Any:
            with open(log, "ab", buffering=0) as file:
                file.write(b".")
            return real(*given)

        run._work = counted
        module = sys.modules[run.__module__]
        real_had = module.had  # what the user had is a unit, too

        def counted_had(*given: Any) -> Any:
            with open(log, "ab", buffering=0) as file:
                file.write(b".")
            return real_had(*given)

        module.had = counted_had

    def _finished(self) -> dict[str, str]:
        found = hashes(self.units) if self.units.is_dir() else {}
        return {path: digest for path, digest in found.items() if not os.path.basename(path).startswith(".")}


def kills_mid_vote(home: Path, count: int, world: World) -> Series:
    """`gradfix vote` by either rule."""
    out = home / "votes" / "votes.safetensors"
    saved, inputs = out.with_name(f".{out.name}.part"), (world.target, world.data)
    rules = [hastened(vote_words(world, out, rule)) for rule in ("majority", "mean")]
    return _kills([Job("kills mid-vote", work, out, saved, inputs) for work in rules], count)


def kills_mid_finetune(home: Path, count: int, world: World) -> Series:
    """`gradfix finetune`."""
    out = home / "finetune" / "out"
    saved, inputs = out.with_name(f".{out.name}.finetune"), (world.base, world.data)
    work = hastened(finetune_words(world, out))
    return _kills([Job("kills mid-finetune", work, out, saved, inputs)], count)


def kills_mid_compare(home: Path, count: int, world: World) -> Series:
    """`gradfix compare`: the same JSON to the byte, and at most one unit lost."""
    out = home / "compare" / "results.json"
    units = out.with_suffix(".work") / "units"
    ledger = Ledger(units, home / "begun")
    compared = hastened(compare_words(world, out))

    def work() -> None:
        from gradfix.methods import comparison as running

        ledger.record(running._Run)
        compared()

    inputs = (world.base, world.tuned, world.target, world.data)
    return _kills([Job("kills mid-compare", work, out, units, inputs, ledger)], count)


def _kills(jobs: list[Job], count: int) -> Series:
    """As many kills of each job in turn as it takes; all have one name."""
    began = time.time()
    outcomes: list[Outcome] = []
    resumed = 0
    for number, job in enumerate(jobs, 1):
        resumed += _kill_one(job, count * number // len(jobs), outcomes)
    return Series.of(jobs[0].name, outcomes, began, resumed_from_a_saved_state=resumed)


def _kill_one(job: Job, until: int, outcomes: list[Outcome]) -> int:
    """SIGKILL at a random moment, up to three times in a row, then let the work finish."""
    before = hashes(*job.inputs)
    shutil.rmtree(job.out.parent, ignore_errors=True)
    clock = time.monotonic()
    problem = _finished(job, None)
    length = time.monotonic() - clock
    if problem:
        outcomes.append(Outcome("wrong", f"undisturbed: {problem}"))
        return 0
    whole = relative(job.out.parent)
    draw = random.Random(f"{job.name} {len(outcomes)}")
    resumed = 0
    while len(outcomes) < until:
        shutil.rmtree(job.out.parent)
        for _ in range(min(draw.choice((1, 2, 3)), until - len(outcomes))):
            going_on = job.saved.exists()
            if _killed(job.work, draw.uniform(0.2, 1.0) * length, job.ledger):
                resumed += job.saved.exists()
                kept = job.saved.exists() or job.out.exists()  # a finished run puts its state away
                problem = _after_kill(job, whole) or ("" if kept or not going_on else "state lost")
                outcomes.append(Outcome("wrong", problem) if problem else Outcome("same"))
            if hashes(*job.inputs) != before:
                outcomes.append(Outcome("wrong", "an input changed"))
        if job.out.exists():
            continue  # it was complete before the kill; only hidden files of the dead process may lie beside it
        problem = _finished(job, whole)
        if problem:
            outcomes.append(Outcome("wrong", f"after resuming: {problem}"))
    return resumed


def _killed(work: Work, after: float, ledger: Ledger | None) -> bool:
    """False when the work was done before the kill came."""
    if ledger is not None:
        ledger.open()
    child = start(work)
    time.sleep(after)
    return kill(child)


def _after_kill(job: Job, whole: dict[str, str]) -> str:
    """The output is absent, or exactly what an undisturbed run writes."""
    mine: Callable[[str], bool] = lambda name: Path(name).parts[0] == job.out.name  # noqa: E731
    found = {name: digest for name, digest in relative(job.out.parent).items() if mine(name)}
    if found and found != {name: digest for name, digest in whole.items() if mine(name)}:
        return "an incomplete output under the final name"
    return job.ledger.settle(allowed=1) if job.ledger is not None else ""


def _finished(job: Job, whole: dict[str, str] | None) -> str:
    """Let the work come to its end: every file as an undisturbed run leaves it, and none besides."""
    if job.ledger is not None:
        job.ledger.open()
    code = finish(start(job.work), CHILD_LIMIT)
    found = relative(job.out.parent) if job.out.parent.exists() else {}
    if code != 0 or (whole is not None and found != whole):
        return f"exit {code}, left {sorted(found)}"
    return job.ledger.settle(allowed=0) if job.ledger is not None else ""
