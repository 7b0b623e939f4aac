"""Updates that come from more than a mask: the best recipe, and methods of `compare` that train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradfix.scale import search_scale
from gradfix.tasks.base import Bound
from gradfix.taskvector import TaskVector
from gradfix.workflows.choosing import Choice, validation_score
from gradfix.workflows.configs import TransportConfig
from gradfix.workflows.setting import Shots, read_unlabelled


@dataclass(frozen=True)
class Made:
    """An update, how far to go along it, and what there is to say about it."""

    update: TaskVector
    choice: Choice
    notes: Sequence[str]


def made(
    config: TransportConfig, bound: Bound, tau: TaskVector, shots: Shots, teacher: Callable[[], Bound]
) -> Made:
    """What `--method` makes of the task vector; `tau` speaks the module's names."""
    if config.method == "best":
        return _by_recipe(config, bound, tau, shots, teacher())
    return _as_compared(config, bound, tau, shots)


def _by_recipe(config: TransportConfig, bound: Bound, tau: TaskVector, shots: Shots, teacher: Bound) -> Made:
    """The recipe of `gradfix.best.recipe`; a validation set lends its inputs and may veto, it tunes nothing."""
    from gradfix.best.recipe import best

    extra = read_unlabelled(config.unlabelled, config) if config.unlabelled else shots.validation
    found = best(bound, tau, shots.fewshot, teacher=teacher, unlabelled=extra, seed=config.seed)
    note = f"best recipe: {found.verdict}, starting at alpha {found.alpha:g} along the task vector"
    if shots.validation is None:
        return Made(found.update, Choice(1.0, None, None, "recipe"), [note])
    score = validation_score(bound, shots.validation, config.batch_size)
    alpha = search_scale(bound.model, found.update, score, [1.0]).best
    return Made(found.update, Choice(alpha, None, None, "validation"), [note])


def _as_compared(config: TransportConfig, bound: Bound, tau: TaskVector, shots: Shots) -> Made:
    """A method as `compare` runs it, on the same few-shot set."""
    from gradfix.comparison.arena import Arena
    from gradfix.comparison.methods import METHODS

    arena = Arena(
        bound=bound, tau=tau, train=shots.fewshot, validation=shots.validation, test=shots.test or (),
        batch_size=config.batch_size, engine=config.engine,
    )  # fmt: skip
    arena.define(arena.set_name(config.shots, config.seed), shots.fewshot)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tensors abstained")
        found = METHODS[config.method].run(arena, arena.support(config.shots, config.seed))
    choice = Choice(found.alpha, found.margin, None, arena.regime)
    return Made(found.update if found.update is not None else tau, choice, [*arena.notes, *found.notes])
