"""Methods that take optimiser steps on the target: few-shot fine-tuning, the best recipe, and full fine-tuning.

And what the recipe shares with `theseus` and `bico`: the task vector in the target's coordinates. Its maps are made from
the few-shot inputs, from inputs made of them and from unlabelled ones where there are some; what the old fine-tune
answers stands for their labels. So the vector belongs to a few-shot set, and to no label of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfix.align.coordinates import OUTSIDES
from gradfix.checkpoints.write import discard
from gradfix.errors import DataError, UsageError
from gradfix.methods.method import NotHere, Outcome
from gradfix.methods.search import Score, View
from gradfix.methods.support import Support
from gradfix.methods.trial import Trial
from gradfix.system.modules import restored
from gradfix.tasks.base import Bound, Example
from gradfix.training.best import Best, best, lesson_for, remembered
from gradfix.training.costs import Work
from gradfix.training.distil import Lesson, Teaching
from gradfix.training.finetuning import finetune, tune
from gradfix.training.starts import COORDINATES, Start as Walked, choose_start, in_coordinates
from gradfix.training.steps import change
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply

ONE_STEP_RATE = 1e-5
IN_FULL: Mapping[str, Any] = {"steps": 400, "batch_size": 64, "lr": 2e-5, "micro_batch": 32}
Start = Callable[[View], TaskVector]


def one_step(trial: Trial, support: Support) -> Outcome:
    """The paper's few-shot baseline: one step at 1e-5 on the whole few-shot set, nothing chosen."""

    def stepped(view: View) -> TaskVector:
        return _tuned(trial, support, view, ONE_STEP_RATE, 1, batch=len(view.fit))

    update = stepped(support.whole)
    return Outcome(update, 1.0, score=scored(trial, support, stepped), chosen_by="recipe")


def polish(trial: Trial, support: Support, start: Start | None = None) -> Outcome:
    """Few-shot fine-tuning from the target, or from the target plus `start`; rate and steps are chosen.

    AdamW; no step at all is a candidate."""
    search, views = trial.search, support.views()
    untouched = support.untouched() if start is None else _pooled(trial, support, start)
    scores: dict[tuple[float, int], Score] = {(0.0, 0): untouched}
    update, notes = None, []
    for rate in search.rates:
        found: dict[int, Score] = {}
        try:
            for view in views:
                for steps, score, before in _path(trial, support, view, rate, start):
                    found[steps] = found[steps] + score if steps in found else score
                    if len(views) == 1 and score.value > max(known.value for known in scores.values()):
                        update = change(trial.model, before)
                    if len(views) == 1:
                        scores[rate, steps] = score
        except DataError as error:
            notes.append(str(error))
            continue
        scores.update({(rate, steps): score for steps, score in found.items()})
    rate, steps = max(scores, key=lambda knobs: scores[knobs].value)  # of equals the first tried
    outcome = Outcome(
        update, 1.0, score=scores[rate, steps], parts={"rate": rate, "steps": steps}, chosen_by=trial.regime
    )
    if (rate, steps) == (max(search.rates), max(search.steps)):
        notes.append("the largest rate and step count tried were best: a wider search may do better")
    if not steps:
        notes.append("no step scored best: fine-tuning on these examples does not help")
        update = start(support.whole) if start is not None else None
        outcome = replace(outcome, update=update, alpha=float(update is not None), score=untouched)
    elif update is None:  # folds chose the knobs; the whole set now makes the update
        update = _tuned(trial, support, support.whole, rate, steps, batch=search.step_batch, start=start)
        outcome = replace(outcome, update=update)
    return replace(outcome, notes=tuple(notes))


def by_recipe(trial: Trial, support: Support) -> Outcome:
    """A scaled transport, then lessons from the tuned old model; see `gradfix.training.best`.

    Nothing is chosen by labels. A validation set lends its inputs and may veto the result; without one the folds
    score it for a verdict, and because they choose nothing their passes are not on the method's bill."""

    def run(examples: Sequence[Example]) -> Best:
        try:
            return best(
                trial.bound, trial.own_tau, examples, teacher=trial.teacher(), unlabelled=trial.unlabelled,
                old=trial.old(), seed=support.seed,
            )  # fmt: skip
        except (DataError, UsageError) as error:
            raise NotHere(str(error)) from error

    found = run(support.examples)
    trial.bill.own += found.work
    outcome = Outcome(found.update, 1.0, notes=found.notes(), parts=found.parts, chosen_by="recipe")
    if trial.regime == "validation":
        score = _pooled(trial, support, lambda view: found.update)
        if support.untouched().value > score.value:
            notes = ("the target as it is scored best",)
            return Outcome(None, 0.0, score=support.untouched(), notes=notes, chosen_by="validation")
        return replace(outcome, score=score, chosen_by="validation")
    began, bill = time.perf_counter(), trial.bill.own
    score_of_folds = scored(trial, support, lambda view: (run(view.fit) if support.examples else found).update)
    trial.bill.own = bill
    trial.bill.away += time.perf_counter() - began
    return replace(outcome, score=score_of_folds)


def is_turned(how: str) -> bool:
    return how in OUTSIDES


@dataclass(frozen=True)
class Turned:
    """The vector in the target's coordinates, and what its maps were made from."""

    vector: TaskVector
    lesson: Lesson


def turned(trial: Trial, support: Support, how: str) -> TaskVector:
    """The vector for one few-shot set, made once and billed to whoever asks."""
    return _shared_turn(trial, support, how).vector


def turned_so_far(trial: Trial, support: Support, how: str) -> Walked:
    """How far along it the target's answers follow the old fine-tune's best: alpha without a label."""

    def make() -> Walked:
        found = _shared_turn(trial, support, how)
        start, _ = choose_start(trial.bound, {COORDINATES: found.vector}, None, found.lesson, Teaching())
        trial.bill.own += Work(forward=start.passes, vectors=len(start.curve))
        return start

    walked: Walked = trial.shared(f"turned-so-far-{how}-{support.name}", make)
    return walked


def _shared_turn(trial: Trial, support: Support, how: str) -> Turned:
    def make() -> Turned:
        try:
            return _turned(trial, support, how)
        except (DataError, UsageError) as error:
            raise NotHere(str(error)) from error

    found: Turned = trial.shared(f"turned-{how}-{support.name}", make)
    return found


def _turned(trial: Trial, support: Support, how: str) -> Turned:
    teacher, old = trial.teacher(), trial.old()
    if teacher is None or old is None:
        raise NotHere("coordinates need the old base and its fine-tune as models with a closed label set.")
    if not old.correspondence.linear:
        raise NotHere("no linear map of the target answers to one of the base. `--method best` needs none.")
    recipe = Teaching()
    lesson, asked = lesson_for(
        trial.bound, teacher, support.examples, trial.unlabelled, remembered(teacher, old.tau), recipe, support.seed
    )  # fmt: skip
    moved = in_coordinates(trial.bound, teacher, old, lesson, recipe, how)
    trial.bill.own += Work(forward=asked + moved.passes, backward=moved.passes)
    return Turned(moved.vector, lesson)


def in_full(
    bound: Bound, train: Sequence[Example], options: Mapping[str, Any], checkpoint: Path | None = None
) -> tuple[TaskVector, Work]:
    """Fine-tune the target on the whole train split: what changed, and the work; the target comes back untouched.

    A user of transport does not have this checkpoint; it is made only to know how much there was to gain.
    `options` are those of `finetune` and replace the entries of `IN_FULL`."""
    recipe = {**IN_FULL, **options}
    with restored(bound.model) as before:
        finetune(bound, train, checkpoint=checkpoint, **recipe)
        update = change(bound.model, before)
    if checkpoint is not None:
        discard(checkpoint)
    samples = recipe["steps"] * min(recipe["batch_size"], len(train))
    return update, Work(forward=samples, backward=samples, steps=recipe["steps"])


def scored(trial: Trial, support: Support, make: Start) -> Score | None:
    """A fixed update's score where choices are made: nothing is chosen, so only a verdict wants to know."""
    return _pooled(trial, support, make) if trial.judged else None


def _pooled(trial: Trial, support: Support, make: Start) -> Score:
    scores = []
    for view in support.views():
        with dialled(trial.model, make(view)) as dial:
            dial.turn(1.0)
            scores.append(trial.score(view.held))
    return sum(scores[1:], scores[0])


def _path(
    trial: Trial, support: Support, view: View, rate: float, start: Start | None
) -> Iterator[tuple[int, Score, dict[str, Tensor]]]:
    """Steps done, the score there and the untouched weights; the model is the trained one meanwhile."""
    search = trial.search
    with restored(trial.model) as before:
        if start is not None:
            apply(trial.model, start(view))
        done = Work()
        for steps, work in tune(
            trial.bound, view.fit, rate=rate, stops=search.steps, batch=search.step_batch, seed=support.seed
        ):
            yield steps, trial.score(view.held), before
            done = work
        trial.bill.own += done


def _tuned(
    trial: Trial, support: Support, view: View, rate: float, steps: int, *, batch: int, start: Start | None = None
) -> TaskVector:
    """The update that `steps` steps make, from the untouched target."""
    with restored(trial.model) as before:
        if start is not None:
            apply(trial.model, start(view))
        for _, work in tune(trial.bound, view.fit, rate=rate, stops=[steps], batch=batch, seed=support.seed):
            trial.bill.own += work
        return change(trial.model, before)
