"""Methods that mask the task vector: one class, whose fields are the options of `transport`.

What is not given is chosen where the trial chooses: alpha, and the margin where the mask has one. No example
judges its own vote, unless the votes were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradfix.methods.method import Outcome
from gradfix.methods.search import Choice, Setting, View
from gradfix.methods.support import Support
from gradfix.methods.trained import is_turned, scored, turned, turned_so_far
from gradfix.methods.trial import Trial
from gradfix.vectors.diagnostics import kept_by_block
from gradfix.vectors.masks import MASKS
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import Transported, random_like, transport


@dataclass(frozen=True)
class Masked:
    """`target + alpha * mask(tau)`: the paper's way, with every knob given or chosen.

    `votes` were taken earlier, under the module's names. `noise` puts a random vector of tau's mean and spread
    in its place."""

    mask: str = "agree"
    vote: str = "majority"
    align: str = "none"
    noise: bool = False
    alpha: float | None = None
    margin: float | None = None
    votes: SignVotes | None = None

    @property
    def sees(self) -> str:
        return MASKS[self.mask].sees

    @property
    def voted(self) -> bool:
        return self.sees in ("direction", "votes")

    @property
    def given(self) -> bool:
        """Nothing is left to choose."""
        return self.alpha is not None and (self.margin is not None or self.sees != "votes")

    def _told(self, trial: Trial) -> bool:
        """The old fine-tune alone tells how far to go: nothing is given, no mask wants labels, none are held out."""
        return is_turned(self.align) and self.sees == "nothing" and self.alpha is None and trial.regime == "few_shot"

    def choice(self, trial: Trial, support: Support, tau: TaskVector | None = None) -> Choice:
        """The alpha and margin that score best, where they are not given.

        Without a validation set a turned vector goes as far as the old fine-tune's answers are followed."""
        settings = self._settings(trial, support, self._vector(trial, support) if tau is None else tau)
        if self._told(trial):
            return Choice(settings[0], turned_so_far(trial, support, self.align).alpha, None)
        if self.alpha is None:
            return trial.choose(support, settings)
        if self.given:
            return Choice(settings[0], self.alpha, None)
        return best_at(trial, support, settings, self.alpha)

    def __call__(self, trial: Trial, support: Support) -> Outcome:
        tau = self._vector(trial, support)
        choice = self.choice(trial, support, tau)
        margin = choice.setting.knobs.get("margin")
        moved = None if self.sees == "nothing" else self._moved(tau, support, support.whole, margin)
        outcome = shipped(trial, choice, support, moved, tau)
        told = self._told(trial)
        if told:
            score = scored(trial, support, lambda view: tau * choice.alpha)
            outcome = replace(outcome, score=score)
        old = trial.old() if is_turned(self.align) else None
        return replace(
            outcome,
            parts={**outcome.parts, **({"correspondence": old.as_json()} if old is not None else {})},
            margin=margin,
            notes=(*self._warnings(trial), *outcome.notes),
            votes=self._votes(support, support.whole) if self.voted else None,
            chosen_by="given" if self.given else "recipe" if told else trial.regime,
        )

    def _vector(self, trial: Trial, support: Support) -> TaskVector:
        if is_turned(self.align):
            tau = turned(trial, support, self.align)
        else:
            tau = trial.tau if self.align == "none" else trial.aligned(self.align)
        if not self.noise:
            return tau
        noise = random_like(tau, support.seed)
        return noise.map(lambda name, tensor: tensor if bool(tau[name].any()) else torch.zeros_like(tensor))

    def _votes(self, support: Support, view: View) -> SignVotes:
        return self.votes if self.votes is not None else support.votes(view, self.vote)

    def _moved(self, tau: TaskVector, support: Support, view: View, margin: float | None) -> Transported:
        shown = -support.gradient(view) if self.sees == "reference" else None
        if self.voted:
            return transport(tau, self._votes(support, view), self.mask, margin=margin)
        return transport(tau, shown, self.mask, generator=support.seed)

    def _settings(self, trial: Trial, support: Support, tau: TaskVector) -> list[Setting]:
        plain = "tau" if tau is trial.own_tau else None
        if self.sees == "nothing":
            return [Setting({}, lambda view: tau, plain)]
        if self.sees != "votes":
            return [Setting({}, lambda view: self._moved(tau, support, view, None).update, self._key(support, plain))]
        settings: dict[int, Setting] = {}
        for margin in trial.search.margins if self.margin is None else [self.margin]:
            # Margins between two vote counts give the same mask; ask once.
            settings.setdefault(int(margin * len(support.examples) + 1e-9), self._vetoed(tau, support, margin, plain))
        return list(settings.values())

    def _vetoed(self, tau: TaskVector, support: Support, margin: float, plain: str | None) -> Setting:
        # At margin 1 nothing can be vetoed, but a tensor without votes is dropped all the same.
        if margin == 1 and set(tau) <= set(self._votes(support, support.whole)):
            return Setting({"margin": margin}, lambda view: tau, plain)
        key = self._key(support, plain, margin)
        return Setting({"margin": margin}, lambda view: self._moved(tau, support, view, margin).update, key)

    def _key(self, support: Support, plain: str | None, margin: float | None = None) -> str | None:
        """Names the masked vector where other methods may make the same one from the same few-shot set."""
        if plain is None or self.votes is not None:
            return None
        return f"{plain}-{self.mask}-{self.vote}-{margin}-{support.name}"

    def _warnings(self, trial: Trial) -> tuple[str, ...]:
        if self.votes is None or self.given or trial.regime == "validation":
            return ()
        return ("alpha was chosen on the few-shot examples with votes from a file: none was held out",)


def best_at(trial: Trial, support: Support, settings: Sequence[Setting], alpha: float) -> Choice:
    """The setting that scores best at an alpha that was given; the alpha stands whatever it scores."""
    found = [trial.choose(support, [setting], [alpha]) for setting in settings]
    best = max(found, key=lambda choice: choice.curve.points[alpha].value if choice.curve else 0.0)
    return replace(best, alpha=alpha, notes=())


def masked_by(trial: Trial, support: Support, make: Callable[[View], Transported]) -> Outcome:
    """Whatever `make` leaves of the vector, at the alpha that is best for it."""
    choice = trial.choose(support, [Setting({}, lambda view: make(view).update)])
    return shipped(trial, choice, support, make(support.whole))


def shipped(
    trial: Trial, choice: Choice, support: Support, moved: Transported | None = None, tau: TaskVector | None = None
) -> Outcome:
    """The choice as an outcome: made anew from the whole few-shot set. `tau` is what was masked, if not the trial's."""
    update = moved.update if moved is not None else choice.setting.make(support.whole)
    parts: dict[str, Any] = {}
    if choice.curve is not None:
        parts["curve"] = choice.curve.accuracies()
    if moved is not None:
        whole_vector = trial.tau if tau is None else tau
        sizes = {name: int(whole_vector[name].count_nonzero()) for name in update}
        changed = {name: share for name, share in moved.kept.items() if sizes[name]}
        parts["kept"] = kept_by_block(changed, sizes)
        whole = sum(sizes.values())
        parts["kept_share"] = sum(share * sizes[name] for name, share in changed.items()) / whole
    return Outcome(update, choice.alpha, None, choice.worth, choice.notes, parts, choice.curve, chosen_by=trial.regime)
