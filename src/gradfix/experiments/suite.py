"""A suite: bases, tasks, data and budgets on which every experiment can run.

An experiment knows pairs and tasks by name only; a suite opens them. The paper's own models and a model that
fits into a wheel are the same thing to an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradfix.methods.search import Search
from gradfix.methods.trial import Trial
from gradfix.registry import Registry
from gradfix.tasks.base import Bound, Example
from gradfix.vectors.taskvector import TaskVector


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How much is measured: budgets per class, seeds and what methods may try.

    `main` are the budgets of the transport tables, `selection` those of the subset figure, `curve` the one of
    the alpha figure."""

    budgets: tuple[int, ...]
    main: tuple[int, ...]
    selection: tuple[int, ...]
    curve: int
    seeds: tuple[int, ...]
    search: Search


@dataclass(frozen=True)
class Scene:
    """One task on one pair, opened: the arena of the target, and the old base with its own head."""

    arena: Trial
    base: Callable[[], Bound]
    samples: int  # labelled training examples there are in all
    classes: int
    parameters: int
    tokens: float


@dataclass(frozen=True)
class Side:
    """A model and a held-out set that has nothing to do with the task."""

    bound: Bound
    examples: Sequence[Example]


@dataclass(frozen=True)
class Estimate:
    """What a run will cost: operations, a guess of the time, and disk space."""

    flops: float
    seconds: float
    disk: int
    words: str


class Suite(ABC):
    """Bases, tasks and how to open them."""

    name: str
    domain: str  # "vision" or "text"
    grid: Grid
    processes: int = 1
    scenes_kept: int = 8  # opened at the same time
    asks_first: bool = False

    @property
    @abstractmethod
    def pairs(self) -> tuple[str, ...]:
        """Pairs of bases, the one the single-model tables use first."""

    @abstractmethod
    def tasks(self, pair: str) -> tuple[str, ...]: ...

    @abstractmethod
    def open(self, pair: str, task: str) -> Scene: ...

    @abstractmethod
    def paper_model(self, pair: str) -> str:
        """The model of the paper whose figures stand beside this pair's."""

    def support(self, pair: str, side: str) -> Side | None:
        """The support set for the "base" or the "target"; None where the suite has none."""
        return None

    def source_tasks(self) -> tuple[str, ...]:
        """Tasks for which several sources exist; their target is that of the first pair."""
        return ()

    def sources(self, task: str) -> list[TaskVector]:
        """The task vectors of the several sources."""
        return []

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Everything an answer depends on; finished work is filed under it."""

    def use(self, out: Path, stage: Callable[[str], None]) -> None:  # noqa: B027
        """Where the suite may keep what it makes, such as fine-tuned checkpoints, and whom to tell."""

    @abstractmethod
    def estimate(self, questions: Sequence[Any]) -> Estimate: ...


SUITES: Registry[Callable[..., Suite]] = Registry("suite")
"""Constructors by name; each takes `quick: bool` and `local: Mapping[str, str]`."""
