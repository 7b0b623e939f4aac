"""Long runs killed at random moments: the same command goes on, ends in the same bits and loses little."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradfix.comparison.searching import Search
from tests.reliability.world import World, hashes
from tests.torture.children import Outcome, Series, finish, kill, start
from tests.torture.crashes import CHILD_LIMIT, Work, relative

SMALL = Search(
    alphas=(0.5, 1.0), wider=(), probes=(1.0,), margins=(0.0, 0.5), rates=(1e-3,), steps=(2,), folds=2
)  # fmt: skip
METHODS = ("naive", "one_step", "few_shot", "gradfix", "veto", "fine_tuned")


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

    def _finished(self) -> dict[str, str]:
        found = hashes(self.units) if self.units.is_dir() else {}
        return {path: digest for path, digest in found.items() if not os.path.basename(path).startswith(".")}


def kills_mid_vote(home: Path, count: int, world: World) -> Series:
    """`gradfix vote` by either rule, one sample per batch, its count saved after each."""
    out = home / "votes" / "votes.safetensors"

    def work(rule: str) -> Work:
        def vote() -> None:
            from gradfix.votes.resume import resumable
            from gradfix.workflows.configs import VoteConfig
            from gradfix.workflows.voting import run_vote

            torch.set_num_threads(1)
            resumable.__defaults__ = (0.0,)
            options = {"task": "zero-shot", "shots": 5, "batch_size": 1, "engine": "loop", "vote": rule}
            run_vote(VoteConfig(**options, data=str(world.data), target=str(world.target), out=str(out)))  # type: ignore[arg-type]

        return vote

    jobs = [
        Job("kills mid-vote", work(rule), out, out.with_name(f".{out.name}.part"), (world.target, world.data))
        for rule in ("majority", "mean")
    ]
    return _kills(jobs, count)


def kills_mid_finetune(home: Path, count: int, world: World) -> Series:
    """`gradfix finetune`, its state saved after each step."""
    out = home / "finetune" / "out"

    def work() -> None:
        import gradfix.finetuning
        from gradfix.workflows.configs import FinetuneConfig
        from gradfix.workflows.scoring import run_finetune

        torch.set_num_threads(1)
        gradfix.finetuning.SAVE_EVERY_SECONDS = 0.0
        options = {"data": str(world.data), "task": "zero-shot", "steps": 8, "train_batch": 4, "lr": 1e-3}
        run_finetune(FinetuneConfig(**options, model=str(world.base), out=str(out)))  # type: ignore[arg-type]

    inputs = (world.base, world.data)
    return _kills(
        [Job("kills mid-finetune", work, out, out.with_name(f".{out.name}.finetune"), inputs)], count
    )


def kills_mid_compare(home: Path, count: int, world: World) -> Series:
    """`gradfix compare` with its clock stopped, so that its JSON must be the same to the byte."""
    out = home / "compare" / "results.json"
    units = out.with_suffix(".work") / "units"
    ledger = Ledger(units, home / "begun")
    words = ["compare", "--data", world.data, "--task", "zero-shot", "--validation", "none", "--quiet",
             "--base", world.base, "--tuned", world.tuned, "--target", world.target, "--finetune-target",
             "--finetune-steps", 4, "--shots", 2, "--seeds", 0, 1, "--methods", *METHODS, "--json", out]  # fmt: skip

    def work() -> None:
        import gradfix.finetuning
        from gradfix.cli import run
        from gradfix.comparison import arena, running

        torch.set_num_threads(1)
        gradfix.finetuning.SAVE_EVERY_SECONDS = 0.0
        for module in (arena, running):
            module.time = _StoppedClock  # type: ignore[attr-defined]
        running.Search = lambda: SMALL  # type: ignore[assignment, misc]
        ledger.record(running._Run)
        code = run([str(word) for word in words])
        if code:
            raise RuntimeError(f"compare exits with {code}")

    inputs = (world.base, world.tuned, world.target, world.data)
    return _kills([Job("kills mid-compare", work, out, units, inputs, ledger)], count)


class _StoppedClock:
    """Measured seconds are the one thing in a comparison that no two runs share."""

    @staticmethod
    def perf_counter() -> float:
        return 0.0


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
                problem = _after_kill(job, whole) or ("" if going_on <= job.saved.exists() else "state lost")
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
