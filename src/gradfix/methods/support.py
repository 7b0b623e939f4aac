"""The few-shot set of one budget and seed: its folds, and what the target says about it.

Votes and gradients add up over examples, so each example is asked once however many folds share it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gradfix.data import folds
from gradfix.errors import DataError, UsageError
from gradfix.methods.search import Score, View, total
from gradfix.system.processes import current
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.embedding import EmbeddingBound, texts_of
from gradfix.training.costs import Work
from gradfix.training.distil import answers
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.collect import collect_gradient, collect_votes
from gradfix.votes.distributed.parallel import InParallel
from gradfix.votes.engines.loop import Batches
from gradfix.votes.runs import collect

if TYPE_CHECKING:
    from gradfix.methods.trial import Trial


ASKED = "asked"
NO_LABELS = (
    "0 examples per class need unlabelled inputs (--unlabelled) and an old fine-tune that can be asked about them; "
    "give both, or 1 example or more."
)
LEAST = 16  # examples that the first rung of a race has


class Support:
    """One few-shot set: its examples, its folds, and what the target says about them."""

    def __init__(self, trial: Trial, shots: int, seed: int) -> None:
        self.trial, self.shots, self.seed = trial, shots, seed
        self.name = trial.few_shot_set(shots, seed)
        self.examples = tuple(trial.examples[self.name])
        self.parts = [self.examples]  # cut into folds when a choice must be made on them

    @property
    def whole(self) -> View:
        if self.trial.regime == "validation":
            return View(self.examples, "validation")
        return View(self.examples, self.name if self.examples else self._asked())

    def views(self) -> list[View]:
        """What choices are made on: all examples scored on validation, or each fold scored by the others.

        Without labels, the unlabelled inputs: how often the answer is the old fine-tune's."""
        if self.trial.regime == "validation" or not self.examples:
            return [self.whole]
        self._cut()
        return [View(tuple(self._without(left)), self._fold(left), left) for left in range(len(self.parts))]

    def _without(self, left: int) -> Sequence[Example]:
        """All other folds; nobody among them knows the examples that are held out."""
        rest = [example for number, part in enumerate(self.parts) if number != left for example in part]
        return self.trial.bound.linked(rest, anew=True)

    def rungs(self) -> list[list[tuple[View, str]]]:
        """What a race is run on, a little first and the most last: views, and the part of what they hold out.

        Where everything is measured there is one rung."""
        views = self.views()
        if self.trial.regime == "validation":
            return [[(views[0], part)] for part in self.trial.parts(views[0].held)]
        held = [(view, view.held) for view in views]
        first = -(-LEAST * len(held) // len(self.examples))  # so many folds hold enough to tell losers by
        cuts = [0, len(held)] if self.trial.search.full else [0, first, first + 1, len(held)]
        return [held[start:end] for start, end in pairwise(cuts) if held[start:end]]

    def _cut(self) -> None:
        if len(self.examples) < 2:
            raise DataError("one example cannot be held out; give --shots 2 or more, or validation data.")
        if len(self.parts) > 1:
            return
        cuts = folds(self.examples, min(self.trial.search.folds, len(self.examples)), self.seed)
        self.parts = [tuple(self.examples[i] for i in held) for _, held in cuts]
        for number, part in enumerate(self.parts):
            self.trial.define(self._fold(number), part)

    def _fold(self, number: int) -> str:
        return f"fold-{number}-of-{self.name}"

    def _asked(self) -> str:
        """The unlabelled inputs with the old fine-tune's answers in place of labels; the name of their batches."""
        trial = self.trial
        if ASKED not in trial.examples:
            teacher, rows = trial.teacher(), trial.splits.unlabelled
            if teacher is None or not rows:
                raise UsageError(NO_LABELS)
            if isinstance(teacher, EmbeddingBound):  # it has no labels to give, but it finds what lies near
                trial.define(ASKED, trial.shared(ASKED, lambda: self._neighbours(teacher, rows)))
                return ASKED
            told = trial.shared(ASKED, lambda: self._answers(teacher, rows))
            trial.define(ASKED, [{**row, "label": label} for row, label in zip(rows, told, strict=True)])
        return ASKED

    def _answers(self, teacher: Bound, rows: Sequence[Example]) -> list[str]:
        unanswered = [{**row, "label": teacher.labels[0]} for row in rows]
        found = [answers(teacher, batch) for batch in teacher.batches(unanswered, self.trial.passes.batch_size)]
        self.trial.bill.own += Work(forward=len(rows))
        return [teacher.labels[index] for logits in found for index in logits.argmax(-1).tolist()]

    def _neighbours(self, teacher: EmbeddingBound, rows: Sequence[Example]) -> list[Example]:
        found = teacher.nearest([text for row in rows for _, text in texts_of(row)])
        self.trial.bill.own += Work(forward=len(found))
        return found

    def untouched(self) -> Score:
        """The target itself on what scores the choices, fold by fold; a set that cannot be cut is asked whole."""
        try:
            held = [view.held for view in self.views()]
        except DataError:
            held = [self.whole.held]
        return total(self.trial.untouched(name) for name in held)

    def votes(self, view: View, rule: str = "majority") -> SignVotes:
        """Votes on a view's examples. Votes add up, so every example is asked once however many folds there are."""
        if rule == "mean":
            return self._mean(view)
        total: SignVotes | None = None
        for number in self._numbers(view):
            votes = self.trial.shared(self._key("votes", number), partial(self._vote, number), file=True)
            total = votes if total is None else total + votes
        assert total is not None
        return total

    def gradient(self, view: View) -> TaskVector:
        """The mean gradient over a view's examples."""
        total: TaskVector | None = None
        count = 0
        for number in self._numbers(view):
            part = self.trial.shared(self._key("gradient", number), partial(self._gradient, number))
            size = len(self.parts[number])
            total, count = part * size if total is None else total + part * size, count + size
        assert total is not None
        return total / count

    def _mean(self, view: View) -> SignVotes:
        gradient = self.gradient(view)
        return SignVotes({name: (-g.sign()).to(torch.int32) for name, g in gradient.items()}, 1, rule="mean")

    def _numbers(self, view: View) -> list[int]:
        return [number for number in range(len(self.parts)) if number != view.left_out]

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}-{self.shots}-{self.seed}-{len(self.parts)}-{number}"

    def _vote(self, number: int) -> SignVotes:
        trial, part = self.trial, self.parts[number]
        where = [str(getattr(example, "where", f"example {n}")) for n, example in enumerate(part, 1)]
        batches = Batches(trial.bound.collate, part, trial.passes.batch_size, where)
        group, engine = current(), trial.passes.engine
        if group.size > 1:
            votes = collect(InParallel(group, trial.model, trial.bound.loss, batches, engine))
        else:
            kept = trial.store.partial(self._key("votes", number))
            votes = collect_votes(trial.model, trial.bound.loss, batches, engine=engine, checkpoint=kept)
        trial.bill.own += Work(forward=len(part), backward=len(part))
        return votes

    def _gradient(self, number: int) -> TaskVector:
        trial, part = self.trial, self.parts[number]
        batches = trial.bound.batches(part, trial.passes.batch_size)
        trial.bill.own += Work(forward=len(part), backward=len(part))
        return collect_gradient(trial.model, trial.bound.loss, batches)
