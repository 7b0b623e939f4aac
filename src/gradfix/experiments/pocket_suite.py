"""The pocket suite: the embedded models and images. Runs anywhere, downloads nothing.

Base A has two successors, so there are two pairs: "unrelated" on every task, "related" where its fine-tunes are
shipped. The clean images are the support set. The fine-tunes were made with their own recipe (see
`gradfix.pocket.train`), not with the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradfix import pocket
from gradfix._version import __version__
from gradfix.align import align
from gradfix.errors import UsageError
from gradfix.experiments.suite import SUITES, Estimate, Grid, Scene, Side, Suite
from gradfix.methods.search import Search
from gradfix.methods.trial import Lenders, Passes, Splits, Trial
from gradfix.tasks.base import Batch, ClosedSet, Example
from gradfix.tasks.loading import freeze_all_but
from gradfix.vectors.taskvector import TaskVector

TOKENS = 50.0  # 7 x 7 patches and the class token
FORWARD_SECONDS = 0.003  # one image, one core

FULL = Grid(
    budgets=(1, 2, 5, 10, 20, 50),
    main=(1, 2, 5),
    selection=(1, 5, 20),
    curve=5,
    seeds=(0, 1, 2),
    search=Search(
        alphas=(0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0), wider=(), rates=(1e-4, 3e-4), steps=(8, 16, 32)
    ),
)
QUICK = Grid(
    budgets=(1, 5),
    main=(1, 5),
    selection=(1, 5),
    curve=5,
    seeds=(0, 1),
    search=Search(alphas=(0.2, 0.4, 0.7, 1.0), wider=(), rates=(1e-4, 3e-4), steps=(8, 16)),
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
            _examples("train", task),
            _examples("validation", task),
            _examples("test", task, TESTED[self.quick]),
        )
        tuned = lambda: TaskVector.between(given.target, given.target_tuned)  # noqa: E731
        arena = Trial(
            bound, tau, splits, search=self.grid.search, passes=Passes(batch_size=50),
            lenders=Lenders(aligned=aligned, tuned_target=tuned),
        )  # fmt: skip
        weights = dict(bound.model.named_parameters())
        size = sum(weights[name].numel() for name in bound.trainable())
        samples = pocket.figures()["images"]["all"]  # what the fine-tunes were trained on
        return Scene(arena, lambda: PocketBound(given.base), samples, len(bound.labels), size, TOKENS)

    def support(self, pair: str, side: str) -> Side:
        given = pocket.pair(pair)
        bound = PocketBound(given.base if side == "base" else given.target)
        return Side(bound, _examples("test", "clean", TESTED[self.quick]))

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
