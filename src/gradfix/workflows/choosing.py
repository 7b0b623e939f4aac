"""How far to go: alpha (and the veto's margin), chosen on validation data or by folds of the few-shot set."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradfix.data import Row, folds
from gradfix.diagnostics import mean_loss
from gradfix.masks import MASKS
from gradfix.scale import ScaleCurve, average_curves, search_scale
from gradfix.scoring import evaluate
from gradfix.tasks.base import Bound
from gradfix.taskvector import TaskVector
from gradfix.transported import transport
from gradfix.votes.collect import collect_gradient
from gradfix.votes.tally import SignVotes
from gradfix.workflows.configs import TransportConfig
from gradfix.workflows.setting import Shots

FOLDS = 5
MARGINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LOSS_WEIGHT = 1e-3  # breaks ties between equal accuracies in favour of the lower loss


@dataclass(frozen=True)
class Choice:
    """How far to go, and who said so."""

    alpha: float
    margin: float | None
    curve: ScaleCurve | None
    regime: str


def ranking(metrics: dict[str, float]) -> float:
    """Accuracy first; equal accuracies are told apart by the loss."""
    return metrics["accuracy"] - LOSS_WEIGHT * min(metrics["loss"], 1e3)


def total(votes: Sequence[SignVotes]) -> SignVotes:
    return functools.reduce(operator.add, votes)


def validation_score(bound: Bound, rows: Sequence[Row], batch_size: int) -> Callable[[nn.Module], float]:
    batches = list(bound.scoring_batches(rows, max(batch_size, 32)))
    return lambda model: ranking(evaluate(model, bound, batches))


class ScaleSearch:
    """The search of one transport; `vote` takes votes on any batches of the few-shot set."""

    def __init__(
        self, config: TransportConfig, bound: Bound, shots: Shots, vote: Callable[[Sequence[Any]], SignVotes]
    ) -> None:
        self.config, self.bound, self.shots, self.vote = config, bound, shots, vote

    def choose(self, tau: TaskVector, ballot: SignVotes | TaskVector | None) -> Choice:
        margins = self._margins()
        if self.config.alpha != "auto" and len(margins) == 1:
            return Choice(float(self.config.alpha), margins[0], None, "given")
        if self.shots.validation is not None:
            score, regime = (
                validation_score(self.bound, self.shots.validation, self.config.batch_size),
                "validation",
            )
            search = [(m, self._search(self._update(tau, ballot, m), score)) for m in margins]
        else:
            regime = "few_shot"
            search = self._search_by_folds(tau, margins)
        margin, curve = max(search, key=lambda pair: pair[1].best_score)
        return Choice(curve.best, margin, curve, regime)

    def _margins(self) -> tuple[float | None, ...]:
        if MASKS[self.config.mask].sees != "votes":
            return (None,)
        return MARGINS if self.config.margin == "auto" else (float(self.config.margin),)

    def _update(
        self, tau: TaskVector, ballot: SignVotes | TaskVector | None, margin: float | None
    ) -> TaskVector:
        return transport(tau, ballot, self.config.mask, margin=margin, generator=self.config.seed).update

    def _search(self, update: TaskVector, score: Callable[[nn.Module], float]) -> ScaleCurve:
        grid = None if self.config.alpha == "auto" else [float(self.config.alpha)]
        return search_scale(self.bound.model, update, score, grid)

    def _search_by_folds(
        self, tau: TaskVector, margins: Sequence[float | None]
    ) -> list[tuple[float | None, ScaleCurve]]:
        """Votes of the other folds, loss on the held-out one: no example judges its own vote."""
        rows = self.shots.fewshot
        parts = [held for _, held in folds(rows, min(FOLDS, len(rows)), self.config.seed)]
        cut = [list(self.bound.batches([rows[i] for i in part], self.config.batch_size)) for part in parts]
        sees = MASKS[self.config.mask].sees
        curves: dict[float | None, list[ScaleCurve]] = {margin: [] for margin in margins}
        by_part = [self.vote(batches) for batches in cut] if sees in ("direction", "votes") else []
        for index, held in enumerate(cut):
            ballot: SignVotes | TaskVector | None = None
            if by_part:
                ballot = total([votes for other, votes in enumerate(by_part) if other != index])
            elif sees == "reference":
                rest = [batch for other, part in enumerate(cut) if other != index for batch in part]
                ballot = -collect_gradient(self.bound.model, self.bound.loss, rest)
            for margin in margins:
                update = self._update(tau, ballot, margin)
                score = lambda model, held=held: -mean_loss(model, self.bound.loss, held)  # noqa: E731
                curves[margin].append(self._search(update, score))
        return [(margin, average_curves(some)) for margin, some in curves.items()]
