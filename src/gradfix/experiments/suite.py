"""A suite: bases, tasks, data and budgets on which every experiment can run; and the pocket suite.

An experiment knows pairs and tasks by name only; a suite opens them. The paper's own models and a model that
fits into a wheel are the same thing to an experiment. The pocket suite is the embedded models and images, and runs
anywhere: base A has two successors, so there are two pairs, "unrelated" on every task and "related" where its
fine-tunes are shipped. The clean images are the support set. The fine-tunes were made with their own recipe (see
`scripts.pocket.train`), not with the paper's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix import pocket
from gradfix._version import __version__
from gradfix.align import align
from gradfix.checkpoints.trio import Trio
from gradfix.errors import UsageError
from gradfix.methods.opening import lenders_of
from gradfix.methods.search import Search
from gradfix.methods.trial import Passes, Splits, Trial
from gradfix.registry import Registry
from gradfix.tasks.base import Batch, Bound, ClosedSet, Example
from gradfix.tasks.loading import freeze_all_but
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
    """One task on one pair, opened: the trial of the target, and the old base with its own head."""

    trial: Trial
    base: Callable[[], Bound]
    samples: int  # labelled training examples there are in all
    classes: int
    parameters: int
    tokens: float


@dataclass(frozen=True)
class SupportSet:
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

    def support(self, pair: str, task: str, side: str) -> SupportSet | None:
        """A task's support set for the "base" or the "target"; None where the suite has none."""
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

    def fine_tunes(self, questions: Sequence[Any]) -> list[tuple[str, str]]:
        """Models and tasks whose fine-tunes these questions need; several processes make them first."""
        return []

    def finetuned(self, model: str, task: str) -> Path:
        """The checkpoint of a model fine-tuned on a task."""
        raise NotImplementedError

    @abstractmethod
    def estimate(self, questions: Sequence[Any]) -> Estimate: ...


SUITES: Registry[Callable[..., Suite]] = Registry("suite")
"""Constructors by name; each takes `quick: bool` and `local: Mapping[str, str]`."""

TOKENS = 50.0  # 7 x 7 patches and the class token
FORWARD_SECONDS = 0.003  # one image, one core

FULL = Grid(
    budgets=(1, 2, 5, 10, 20, 50),
    main=(1, 2, 5),
    selection=(1, 5, 20),
    curve=5,
    seeds=(0, 1, 2),
    search=Search(
        alphas=(0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
        wider=(),
        rates=(1e-4, 3e-4),
        steps=(8, 16, 32),
        step_batch=32,
        full=True,
    ),
)
QUICK = Grid(
    budgets=(1, 5),
    main=(1, 5),
    selection=(1, 5),
    curve=5,
    seeds=(0, 1),
    search=Search(alphas=(0.2, 0.4, 0.7, 1.0), wider=(), rates=(1e-4, 3e-4), steps=(8, 16), step_batch=32, full=True),
)
TESTED = {False: 600, True: 300}  # test images by `quick`


class PocketBound(ClosedSet):
    """An embedded model; examples carry their pixels as tensors, ready for it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.model: Any = pocket.model(state)
        self.labels = list(pocket.CLASSES)
        freeze_all_but(self.model, self.trainable())

    def collate(self, examples: Sequence[Example]) -> Batch:
        labels = torch.tensor([self.labels.index(example["label"]) for example in examples])
        return {"pixel_values": torch.stack([example["image"] for example in examples]), "labels": labels}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(pixel_values=batch["pixel_values"]).logits
        return logits

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        hidden: Tensor = self.model.vit(pixel_values=batch["pixel_values"]).last_hidden_state
        return hidden[:, 0]

    def trainable(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if not name.startswith("classifier.")]


@SUITES.register("pocket")
@dataclass
class PocketSuite(Suite):
    quick: bool = False
    local: Mapping[str, str] = field(default_factory=dict)
    name = "pocket"
    domain = "vision"
    processes = 2

    def __post_init__(self) -> None:
        if self.local:
            raise UsageError("the pocket suite is embedded: there is nothing to take from local folders.")

    @property
    def grid(self) -> Grid:  # type: ignore[override]
        return QUICK if self.quick else FULL

    @property
    def pairs(self) -> tuple[str, ...]:
        return ("unrelated", "related")

    def tasks(self, pair: str) -> tuple[str, ...]:
        return pocket.pair_tasks(pair)

    def paper_model(self, pair: str) -> str:
        return "ViT-B-16"

    def open(self, pair: str, task: str) -> Scene:
        given = pocket.pair(pair, task)
        bound = PocketBound(given.target)
        tau = TaskVector.between(given.base, given.tuned)

        def aligned(how: str) -> TaskVector:
            return align(pocket.model(given.base), bound.model, method=how).apply(tau)

        splits = Splits(
            _examples("train", task), _examples("validation", task), _examples("test", task, TESTED[self.quick])
        )
        lenders = replace(
            lenders_of(Trio.open(given.base, given.tuned, given.target), bound, None),
            aligned=aligned,
            tuned_target=lambda: TaskVector.between(given.target, given.target_tuned),
        )
        trial = Trial(
            bound, tau, splits, search=self.grid.search, passes=Passes(batch_size=50), lenders=lenders
        )  # fmt: skip
        weights = dict(bound.model.named_parameters())
        size = sum(weights[name].numel() for name in bound.trainable())
        samples = pocket.figures()["images"]["all"]  # what the fine-tunes were trained on
        return Scene(trial, lambda: PocketBound(given.base), samples, len(bound.labels), size, TOKENS)

    def support(self, pair: str, task: str, side: str) -> SupportSet:
        given = pocket.pair(pair)
        bound = PocketBound(given.base if side == "base" else given.target)
        return SupportSet(bound, _examples("test", "clean", TESTED[self.quick]))

    def source_tasks(self) -> tuple[str, ...]:
        return pocket.pair_tasks("related")

    def sources(self, task: str) -> list[TaskVector]:
        return [TaskVector.between(source.base, source.tuned) for source in pocket.sources(task)[0]]

    def identity(self) -> dict[str, Any]:
        return {
            "suite": self.name,
            "version": __version__,
            "made": self._made,
            "search": asdict(self.grid.search),
            "test": TESTED[self.quick],
        }

    @cached_property
    def _made(self) -> str:
        return str([pocket.figures()["figures"], pocket.figures()["images"]])

    def estimate(self, questions: Sequence[Any]) -> Estimate:
        images = len(questions) * (len(self.grid.search.alphas) * 250 + TESTED[self.quick])
        seconds = images * FORWARD_SECONDS
        flops = 2 * 1e6 * TOKENS * images
        return Estimate(
            flops, seconds / 2, 2**20,
            f"{len(questions)} measurements on the embedded models, about {seconds / 120:.0f} minutes "
            "on two idle cores.",
        )  # fmt: skip


def _examples(split: str, task: str, limit: int | None = None) -> list[Example]:
    pixels, labels = pocket.images(split, task)
    shown = list(zip(pixels, labels.tolist(), strict=True))[:limit]
    return [{"image": image, "label": pocket.CLASSES[number]} for image, number in shown]
