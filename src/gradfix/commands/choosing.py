"""How far to go: alpha (and the veto's margin), chosen on validation data or by folds of the few-shot set.

The chooser is the one of `compare`, so that what is shipped is what was compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradfix.commands.configs import TransportConfig
from gradfix.commands.setting import Shots
from gradfix.data import Row
from gradfix.methods import search as searching
from gradfix.methods.search import Setting, View
from gradfix.methods.support import Support
from gradfix.methods.trial import Arena
from gradfix.tasks.base import Bound
from gradfix.tasks.scoring import evaluate
from gradfix.vectors.masks import MASKS
from gradfix.vectors.scale import ScaleCurve
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import transport

LOSS_WEIGHT = 1e-3  # breaks ties between equal accuracies in favour of the lower loss
Ballot = SignVotes | TaskVector | None


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


def validation_score(bound: Bound, rows: Sequence[Row], batch_size: int) -> Callable[[nn.Module], float]:
    batches = list(bound.scoring_batches(rows, max(batch_size, 32)))
    return lambda model: ranking(evaluate(model, bound, batches))


def arena_for(config: TransportConfig, bound: Bound, shots: Shots, tau: TaskVector) -> Arena:
    """The ring of `compare` around this transport's few-shot set."""
    arena = Arena(
        bound=bound, tau=tau, train=shots.fewshot, validation=shots.validation, test=shots.test or (),
        batch_size=config.batch_size, engine=config.engine,
    )  # fmt: skip
    arena.define(arena.set_name(config.shots, config.seed), shots.fewshot)
    return arena


class ScaleSearch:
    """The search of one transport that masks."""

    def __init__(self, config: TransportConfig, bound: Bound, shots: Shots) -> None:
        self.config, self.bound, self.shots = config, bound, shots

    def choose(self, tau: TaskVector, ballot: Ballot) -> Choice:
        """Alpha and margin; `ballot` is what the whole few-shot set shows the mask."""
        auto = self.config.alpha == "auto"
        given = [] if self.config.margin == "auto" else [float(self.config.margin)]
        has_margin = MASKS[self.config.mask].sees == "votes"
        if not auto and (given or not has_margin):
            return Choice(float(self.config.alpha), given[0] if has_margin else None, None, "given")
        arena = arena_for(self.config, self.bound, self.shots, tau)
        support = arena.support(self.config.shots, self.config.seed)
        if has_margin:
            settings = self._with_margins(arena.tau, support, ballot, given or arena.search.margins)
        else:
            settings = [self._setting(arena.tau, support, ballot, None)]
        with warnings.catch_warnings():  # a few examples of a fold say nothing about the transport itself
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            if auto:
                found = arena.choose(support, settings)
            else:
                found = _best_at(arena, support, settings, float(self.config.alpha))
        curve = _as_scale_curve(found, max(arena.search.alphas), self._notes(arena.regime))
        return Choice(found.alpha, found.setting.knobs.get("margin"), curve, arena.regime)

    def _with_margins(
        self, tau: TaskVector, support: Support, ballot: Ballot, margins: Sequence[float]
    ) -> list[Setting]:
        settings: dict[int, Setting] = {}
        for margin in margins:  # those between two vote counts give the same mask; the first stands for all
            steps = int(margin * len(support.examples) + 1e-9)
            settings.setdefault(steps, self._setting(tau, support, ballot, margin))
        return list(settings.values())

    def _setting(self, tau: TaskVector, support: Support, ballot: Ballot, margin: float | None) -> Setting:
        def make(view: View) -> TaskVector:
            seen = self._seen(support, view, ballot)
            return transport(tau, seen, self.config.mask, margin=margin, generator=self.config.seed).update

        return Setting({} if margin is None else {"margin": margin}, make)

    def _seen(self, support: Support, view: View, ballot: Ballot) -> Ballot:
        """What a view's examples show the mask: no example judges its own vote, unless the votes were given."""
        if ballot is None or view.left_out is None or self.config.votes is not None:
            return ballot
        if MASKS[self.config.mask].sees == "reference":
            return -support.gradient(view)
        return support.votes(view, self.config.vote)

    def _notes(self, regime: str) -> tuple[str, ...]:
        if self.config.votes is None or regime == "validation":
            return ()
        return (
            f"alpha was chosen on the few-shot examples with the votes of {self.config.votes}: none was held out",
        )


def _best_at(arena: Arena, support: Support, settings: Sequence[Setting], alpha: float) -> searching.Choice:
    """The setting that scores best at an alpha that was given; the alpha stands whatever it scores."""
    found = [arena.choose(support, [setting], [alpha]) for setting in settings]
    best = max(found, key=lambda choice: choice.curve.points[alpha].value)
    return replace(best, alpha=alpha, notes=())


def _as_scale_curve(found: searching.Choice, edge: float, notes: tuple[str, ...]) -> ScaleCurve:
    points = sorted((alpha, score.value) for alpha, score in found.curve.points.items())
    return ScaleCurve(found.alpha, points, points[-1][0] > edge, (*notes, *found.notes))
