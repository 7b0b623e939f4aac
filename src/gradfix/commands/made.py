"""Updates that come from more than a mask: the best recipe, and methods of `compare` that train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradfix.commands.choosing import Choice, arena_for, validation_score
from gradfix.commands.configs import TransportConfig
from gradfix.commands.setting import Shots, read_unlabelled
from gradfix.data import check_disjoint
from gradfix.tasks.base import Bound
from gradfix.vectors.scale import search_scale
from gradfix.vectors.taskvector import TaskVector


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
        return _by_recipe(config, bound, tau, shots, teacher)
    return _as_compared(config, bound, tau, shots)


def _by_recipe(
    config: TransportConfig, bound: Bound, tau: TaskVector, shots: Shots, teacher: Callable[[], Bound]
) -> Made:
    """The recipe of `gradfix.training.best`; a validation set lends its inputs and may veto, it tunes nothing."""
    from gradfix.training.best import best
    from gradfix.training.distil import can_teach

    extra = shots.validation
    if config.unlabelled:
        extra = read_unlabelled(config.unlabelled, config)
        check_disjoint({"unlabelled": extra, "test": shots.test or ()})
    asked = teacher() if can_teach(bound) else None
    found = best(bound, tau, shots.fewshot, teacher=asked, unlabelled=extra, seed=config.seed)
    note = f"best recipe: {found.verdict}, starting at alpha {found.alpha:g} along the task vector"
    if shots.validation is None:
        return Made(found.update, Choice(1.0, None, None, "recipe"), [note])
    score = validation_score(bound, shots.validation, config.batch_size)
    alpha = search_scale(bound.model, found.update, score, [1.0]).best
    return Made(found.update, Choice(alpha, None, None, "validation"), [note])


def _as_compared(config: TransportConfig, bound: Bound, tau: TaskVector, shots: Shots) -> Made:
    """A method as `compare` runs it, on the same few-shot set."""
    from gradfix.methods.methods import METHODS

    arena = arena_for(config, bound, shots, tau)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tensors abstained")
        found = METHODS[config.method].run(arena, arena.support(config.shots, config.seed))
    choice = Choice(found.alpha, found.margin, None, arena.regime)
    return Made(found.update if found.update is not None else tau, choice, [*arena.notes, *found.notes])
