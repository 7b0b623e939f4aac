"""A suite of seconds: small perceptrons over number strings, two tasks, two sources, a support set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from torch import nn

from arenas import NumbersBound, network, rows, trained
from gradfix.errors import IncompatibleCheckpoints
from gradfix.experiments.suite import Estimate, Grid, Scene, Suite, SupportSet
from gradfix.methods.search import Search
from gradfix.methods.trial import Lenders, Splits, Trial
from gradfix.vectors.taskvector import TaskVector

GRID = Grid(
    budgets=(1, 3),
    main=(1, 3),
    selection=(1, 3),
    curve=3,
    seeds=(0, 1),
    search=Search(alphas=(0.5, 1.0), wider=(), rates=(1e-2,), steps=(2,)),
)
SHIFTS = {"near": 0.6, "far": 0.8}


@cache
def _models() -> tuple[nn.Module, nn.Module, dict[tuple[str, str], nn.Module]]:
    base, target = (trained(network(seed), rows(90, seed, 0.0), 20, 0.01) for seed in (1, 2))
    tuned = {
        (name, task): trained(model, rows(90, 4, shift), 20, 0.01)
        for name, model in (("base", base), ("target", target))
        for task, shift in SHIFTS.items()
    }
    return base, target, tuned


class Miniature(Suite):
    name, domain, grid = "miniature", "vision", GRID
    pairs = ("only",)  # type: ignore[assignment]
    opened = 0

    def __init__(self) -> None:
        self.base, self.target, self.tuned = _models()

    def tasks(self, pair: str) -> tuple[str, ...]:
        return tuple(SHIFTS)

    def paper_model(self, pair: str) -> str:
        return "ViT-B-16"

    def open(self, pair: str, task: str) -> Scene:
        self.opened += 1
        shift = SHIFTS[task]
        bound = NumbersBound(self.target)

        def aligned(how: str) -> TaskVector:
            raise IncompatibleCheckpoints("a perceptron has no permutation spec.")

        trial = Trial(
            bound,
            TaskVector.between(self.base, self.tuned["base", task]),
            Splits(rows(60, 4, shift), rows(30, 5, shift), rows(30, 6, shift)),
            search=self.grid.search,
            lenders=Lenders(
                aligned=aligned, tuned_target=lambda: TaskVector.between(self.target, self.tuned["target", task])
            ),
        )
        size = sum(p.numel() for p in self.target.parameters())
        return Scene(trial, lambda: NumbersBound(self.base), 60, 3, size, 1.0)

    def support(self, pair: str, task: str, side: str) -> SupportSet:
        return SupportSet(NumbersBound(self.base if side == "base" else self.target), rows(30, 7, 0.0))

    def source_tasks(self) -> tuple[str, ...]:
        return ("near",)

    def sources(self, task: str) -> list[TaskVector]:
        models = {"base": self.base, "target": self.target}
        return [TaskVector.between(model, self.tuned[name, task]) for name, model in models.items()]

    def identity(self) -> dict[str, Any]:
        return {"suite": self.name, "search": asdict(self.grid.search)}

    def estimate(self, questions: Sequence[Any]) -> Estimate:
        return Estimate(0.0, 0.0, 0, f"{len(questions)} measurements.")
