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

from gradfix.align.coordinates import OUTSIDES, Moved
from gradfix.checkpoints.write import discard
from gradfix.errors import DataError, UsageError
from gradfix.methods.method import NotHere, Outcome
from gradfix.methods.search import Score, View, total
from gradfix.methods.speaking import recipe_of
from gradfix.methods.support import Support
from gradfix.methods.trial import Trial
from gradfix.system.modules import restored
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.reading import speaks
from gradfix.training import relations
from gradfix.training.best import Best, best, mapping
from gradfix.training.costs import Work
from gradfix.training.distil import Lesson, Teaching, can_teach
from gradfix.training.finetuning import cooling, finetune, fitting_rate, tune
from gradfix.training.lessons import lesson_for, teaching_for, vocabulary
from gradfix.training.lowrank import moved_by
from gradfix.training.relations import Relations
from gradfix.training.starts import COORDINATES, Lent, Old, Start as Walked, best_start, in_coordinates, probe_of
from gradfix.training.steps import change
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply

ONE_STEP_RATE = 1e-5
IN_FULL: Mapping[str, Any] = {"steps": 400, "batch_size": 64, "lr": 2e-5, "micro_batch": 32}
GENTLER = 10  # how much smaller the steps are where the first ones did harm
Start = Callable[[View], TaskVector]
Pace = float | Callable[[int], float]  # one rate, or that of every step


def one_step(trial: Trial, support: Support) -> Outcome:
    """The paper's few-shot baseline: one step at 1e-5 on the whole few-shot set, nothing chosen."""

    def stepped(view: View) -> TaskVector:
        return _tuned(trial, support, view, ONE_STEP_RATE, 1, len(view.fit))

    update = stepped(support.whole)
    return Outcome(update, 1.0, score=scored(trial, support, stepped), chosen_by="recipe")


def polish(trial: Trial, support: Support, start: Start | None = None) -> Outcome:
    """Few-shot fine-tuning from the target, or from the target plus `start`; rate and steps are chosen.

    AdamW; no step at all is a candidate. One schedule serves: its peak is found by a short run with a growing rate, and
    the score says after which of its last stops to leave it. Where that is worse than nothing, it is walked once more with
    smaller steps. `Search.full` tries every rate at a constant pace instead."""
    search, last = trial.search, max(trial.search.steps)
    paths = _Paths(trial, support, start)
    if search.full:
        for rate in search.rates:
            paths.walk(rate, search.steps)
    else:
        peak = paths.peak()
        for rate in (peak, peak / GENTLER):
            paths.walk(rate, sorted({max(1, last // 2), max(1, last * 3 // 4), last}), cooled=True)
            if paths.best != (0.0, 0):
                break
    return paths.outcome()


class _Paths:
    """Runs of few-shot fine-tuning on the views of a few-shot set, their scores, and the best place on them."""

    def __init__(self, trial: Trial, support: Support, start: Start | None) -> None:
        self.trial, self.support, self.start, self.views = trial, support, start, support.views()
        self.nothing = support.untouched() if start is None else _pooled(trial, support, start)
        self.scores: dict[tuple[float, int], Score] = {(0.0, 0): self.nothing}  # by rate and steps
        self.paces: dict[float, Pace] = {}
        self.update: TaskVector | None = None  # what the best place of a single view is away from the target
        self.notes: list[str] = []

    @property
    def best(self) -> tuple[float, int]:
        return max(self.scores, key=lambda knobs: self.scores[knobs].value)  # of equals the first tried

    def peak(self) -> float:
        """The rate that fits these examples, by how fast the loss on them falls."""
        trial, search = self.trial, self.trial.search
        with restored(trial.model):
            if self.start is not None:
                apply(trial.model, self.start(self.support.whole))
            rate, work = fitting_rate(
                trial.bound, self.support.examples, between=(min(search.rates), max(search.rates)),
                batch=search.step_batch, seed=self.support.seed,
            )  # fmt: skip
        trial.bill.own += work
        return rate

    def walk(self, rate: float, stops: Sequence[int], *, cooled: bool = False) -> None:
        """Score the stops of one run; a run whose loss is not finite is left out, and said."""
        self.paces[rate] = cooling(rate, max(stops)) if cooled else rate
        found: dict[int, list[Score]] = {steps: [] for steps in stops}
        try:
            for view in self.views:
                for steps, score, before in self._along(view, rate, stops):
                    found[steps].append(score)
                    if len(self.views) == 1:
                        if score.value > self.scores[self.best].value:
                            self.update = change(self.trial.model, before)
                        self.scores[rate, steps] = score
        except DataError as error:
            self.notes.append(str(error))
            return
        self.scores.update({(rate, steps): total(scores) for steps, scores in found.items()})

    def outcome(self) -> Outcome:
        """The best place, from all examples; of a single view it is at hand."""
        (rate, steps), update, search = self.best, self.update, self.trial.search
        notes = list(self.notes)
        if search.full and (rate, steps) == (max(search.rates), max(search.steps)):
            notes.append("the largest rate and step count tried were best: a wider search may do better")
        if not steps:
            notes.append("no step scored best: fine-tuning on these examples does not help")
            update = self.start(self.support.whole) if self.start is not None else None
        elif update is None:  # folds chose the knobs; the whole set now makes the update
            batch = search.step_batch
            update = _tuned(self.trial, self.support, self.support.whole, self.paces[rate], steps, batch, self.start)
        return Outcome(
            update, float(update is not None), score=self.trial.worth(list(self.scores.values())), notes=tuple(notes),
            parts={"rate": rate, "steps": steps}, chosen_by=self.trial.regime,
        )  # fmt: skip

    def _along(self, view: View, rate: float, stops: Sequence[int]) -> Iterator[tuple[int, Score, dict[str, Tensor]]]:
        """Steps done, the score there and the untouched weights; the model is the trained one meanwhile."""
        trial, done = self.trial, Work()
        with restored(trial.model) as before:
            if self.start is not None:
                apply(trial.model, self.start(view))
            path = tune(
                trial.bound, view.fit, rate=self.paces[rate], stops=stops, batch=trial.search.step_batch,
                seed=self.support.seed,
            )  # fmt: skip
            for steps, work, _ in path:
                yield steps, trial.score(view.held), before
                done = work
            trial.bill.own += done


def by_recipe(trial: Trial, support: Support) -> Outcome:
    """A scaled transport, then lessons from the tuned old model; see `gradfix.training.best`.

    Nothing is chosen by labels. A validation set lends its inputs and may veto the result; without one the folds
    score it for a verdict, and because they choose nothing their passes are not on the method's bill."""

    if speaks(trial.bound):
        return _judged(trial, support, lambda examples: recipe_of(trial, support, examples))

    def run(examples: Sequence[Example]) -> Best:
        try:
            return best(
                trial.bound, trial.own_tau, examples, teacher=trial.teacher(), unlabelled=trial.unlabelled,
                old=_lending(trial, support) if examples is support.examples else trial.old(), seed=support.seed,
            )  # fmt: skip
        except (DataError, UsageError) as error:
            raise NotHere(str(error)) from error

    return _judged(trial, support, run)


def _lending(trial: Trial, support: Support) -> Old | None:
    """The old side; where methods are compared, with the lesson and the vector that `bico` is made of."""
    old = trial.old()
    if old is None or not trial.judged or isinstance(trial.bound, EmbeddingBound):
        return old
    try:
        found = _shared_turn(trial, support, "bico")
    except NotHere:
        return old
    assert isinstance(found.lesson, Lesson)
    return replace(old, lent=Lent(found.lesson, found.vector, found.work))


def _judged(trial: Trial, support: Support, run: Callable[[Sequence[Example]], Best]) -> Outcome:
    """Run the recipe on the whole set, and score it where choices are made."""
    found = run(support.examples)
    trial.bill.own += found.work
    outcome = Outcome(
        found.update, 1.0, notes=found.notes(), parts=found.parts, chosen_by="recipe", adapter=found.adapter
    )
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
    lesson: Lesson | Relations
    work: Work


def turned(trial: Trial, support: Support, how: str) -> TaskVector:
    """The vector for one few-shot set, made once and billed to whoever asks."""
    return _shared_turn(trial, support, how).vector


def turned_so_far(trial: Trial, support: Support, how: str) -> Walked:
    """How far along it the target's answers follow the old fine-tune's best: alpha without a label."""

    def make() -> Walked:
        found = _shared_turn(trial, support, how)
        start, _ = best_start(trial.bound, {COORDINATES: found.vector}, _probe(trial.bound, found.lesson))
        trial.bill.own += Work(forward=start.passes, vectors=len(start.curve))
        return start

    walked: Walked = trial.shared(f"turned-so-far-{how}-{support.name}", make)
    return walked


def _probe(bound: Bound, lesson: Lesson | Relations) -> tuple[Callable[[], float], int]:
    if isinstance(lesson, Lesson):
        return probe_of(bound, None, lesson, Teaching())
    assert isinstance(bound, EmbeddingBound)
    return relations.probe_of(bound, lesson, relations.SETTING)


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
    embeds = isinstance(trial.bound, EmbeddingBound) and isinstance(teacher, EmbeddingBound)
    if teacher is None or old is None or not (embeds or can_teach(trial.bound)):
        raise NotHere("coordinates need the old base and its fine-tune as models with a closed label set.")
    if not old.correspondence.linear:
        raise NotHere("no linear map of the target answers to one of the base. `--method best` needs none.")
    if isinstance(trial.bound, EmbeddingBound) and isinstance(teacher, EmbeddingBound):
        recipe = relations.SETTING
        related = relations.lesson_for(trial.bound, teacher, support.examples, trial.unlabelled, recipe, support.seed)
        moved = relations.in_their_relations(trial.bound, teacher, old, related, recipe, how)
        work = Work(forward=len(related) + moved.passes, backward=moved.passes)
        trial.bill.own += work
        return Turned(moved.vector, related, work)
    recipe = teaching_for(trial.bound, teacher, support.examples, trial.unlabelled)

    def ask() -> tuple[Lesson, int]:
        words = vocabulary(trial.bound, trial.own_tau, teacher, old)
        found = lesson_for(
            trial.bound, teacher, support.examples, trial.unlabelled, words, recipe, support.seed
        )  # fmt: skip
        trial.bill.own += Work(forward=found[1])
        return found

    lesson, asked = trial.shared(f"turned-lesson-{support.name}", ask)  # the same for every way to turn
    ways = [way for way in OUTSIDES if way == how or way in trial.planned]

    def turn() -> dict[str, Moved]:
        turned = in_coordinates(trial.bound, teacher, old, lesson, recipe, ways)
        trial.bill.own += mapping(turned[how], lesson)
        return turned

    found: dict[str, Moved] = trial.shared(f"turned-by-{'-'.join(ways)}-{support.name}", turn)
    return Turned(found[how].vector, lesson, Work(forward=asked) + mapping(found[how], lesson))


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
        with moved_by(trial.model, make(view), 1.0):
            scores.append(trial.score(view.held))
    return total(scores)


def _tuned(
    trial: Trial, support: Support, view: View, rate: Pace, steps: int, batch: int, start: Start | None = None
) -> TaskVector:
    """The update that `steps` steps make, from the untouched target."""
    with restored(trial.model) as before:
        if start is not None:
            apply(trial.model, start(view))
        for _, work, _ in tune(trial.bound, view.fit, rate=rate, stops=[steps], batch=batch, seed=support.seed):
            trial.bill.own += work
        return change(trial.model, before)
