"""The best recipe as a method of `compare`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gradfix.errors import DataError, UsageError
from gradfix.methods.methods import NotHere, Outcome
from gradfix.methods.search import Score
from gradfix.methods.support import Support
from gradfix.methods.trial import Arena
from gradfix.tasks.base import Example
from gradfix.training.best import Best, best
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector


def best_outcome(arena: Arena, support: Support) -> Outcome:
    """In the few-shot regime its score for the verdict comes from folds; they choose nothing, so their passes
    are not on the method's bill."""
    extra = arena.unlabelled or (arena.validation if arena.regime == "validation" else None)

    def run(examples: Sequence[Example]) -> Best:
        teacher = arena.teacher()
        try:
            return best(
                arena.bound, arena.tau, examples, teacher=teacher, unlabelled=extra, seed=support.seed
            )
        except (DataError, UsageError) as error:
            raise NotHere(str(error)) from error

    found = run(support.examples)
    arena.bill.own += found.work
    if arena.regime == "validation":
        score = _scored(arena, found.update, "validation")
        if support.untouched().value > score.value:
            return Outcome(None, 0.0, score=support.untouched(), notes=("the target as it is scored best",))
    else:
        began, bill = time.perf_counter(), arena.bill.own
        parts = [_scored(arena, run(view.fit).update, view.held) for view in support.views()]
        score = sum(parts[1:], parts[0])
        arena.bill.own = bill
        arena.bill.away += time.perf_counter() - began
    return Outcome(found.update, 1.0, score=score, notes=found.notes(), parts=found.parts)


def _scored(arena: Arena, update: TaskVector, name: str) -> Score:
    with dialled(arena.model, update) as dial:
        dial.turn(1.0)
        return arena.score(name)
