"""Long commands made short: real command lines on the small world, saving after every batch, step and unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gradfix.methods.search import Search
from tests.reliability.world import World

SMALL = Search(
    alphas=(0.5, 1.0), wider=(), probes=(1.0,), margins=(0.0, 0.5), rates=(1e-3,), steps=(2,), folds=2
)  # fmt: skip
METHODS = ("naive", "one_step", "few_shot", "gradfix", "veto", "fine_tuned")


def vote_words(world: World, out: Path, rule: str) -> list[str]:
    options = {"shots": 5, "batch_size": 1, "engine": "loop", "vote": rule, "quiet": True}
    return world.arguments("vote", out=out, **options)


def finetune_words(world: World, out: Path) -> list[str]:
    options = {"steps": 8, "train_batch": 4, "lr": 1e-3, "target": None, "shots": None, "quiet": True}
    return world.arguments("finetune", model=world.base, out=out, **options)


def compare_words(world: World, out: Path) -> list[str]:
    options = {"validation": "none", "base": world.base, "tuned": world.tuned, "finetune_target": True,
               "finetune_steps": 4, "out": None, "quiet": True}  # fmt: skip
    return [*world.arguments("compare", **options, json=out), "--seeds", "0", "1", "--methods", *METHODS]


def hasten() -> None:
    """For the rest of this process: save at every chance, search little, one thread, and a clock that stands still."""
    import gradfix.training.finetuning
    from gradfix.methods import comparison, trial
    from gradfix.votes import resume

    torch.set_num_threads(1)
    resume.SAVE_EVERY_SECONDS = 0.0
    gradfix.training.finetuning.SAVE_EVERY_SECONDS, gradfix.training.finetuning.SAVE_SHARE = 0.0, float("inf")
    comparison.Search = lambda: SMALL  # type: ignore[assignment, misc]
    for module in (trial, comparison):
        module.time = _StoppedClock  # type: ignore[attr-defined]


def hastened(words: list[str]) -> Callable[[], None]:
    """The command, as the work of a child."""

    def work() -> None:
        from gradfix.cli import run

        hasten()
        code = run(words)
        if code:
            raise RuntimeError(f"{words[0]} exits with {code}")

    return work


class _StoppedClock:
    """Measured seconds are the one thing in a comparison that no two runs share."""

    @staticmethod
    def perf_counter() -> float:
        return 0.0
