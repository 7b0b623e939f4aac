"""The recipe that `--method best` runs: find how far to go along the task vector, then learn the rest from the teacher.

The tuned old model comes with every transport and is an excellent judge of the task's inputs. It answers inputs
made from the few-shot examples (or real unlabelled ones), and the target is brought to the same answers in a few
dozen steps that start where the task vector leads. Nothing is chosen by labels, so no validation
set is needed; with one, its inputs are asked about too, and its labels veto a result that is worse than none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.errors import DataError, UsageError
from gradfix.system.modules import restored
from gradfix.tasks.base import Bound, Example
from gradfix.training.costs import Work
from gradfix.training.distil import (
    Batch,
    Lesson,
    Teaching,
    answers,
    can_teach,
    distil,
    join,
    take,
    typical_size,
    unbiased_divergence,
)
from gradfix.training.remix import remix, splice_words
from gradfix.training.steps import change
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector

ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
PATIENCE = 2  # alphas in a row without a new best that end the walk
ENOUGH = 320  # real unlabelled inputs that need no made-up ones beside them


@dataclass(frozen=True)
class Best:
    """`target + update` is the result; `alpha` is where along the task vector the polish began.

    `verdict`: "transported", or "taught" where the vector did not help and the steps began at the target."""

    update: TaskVector
    verdict: str
    alpha: float
    parts: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    seconds: float = 0.0

    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the update came about."""
        said = []
        if not self.alpha:
            said.append("the task vector did not help: taught from the target's own weights")
        if not self.parts.get("asked"):
            said.append("the old fine-tune could not be asked: learned from the few-shot labels alone")
        return tuple(said)


def best(
    bound: Bound,
    tau: TaskVector,
    examples: Sequence[Example],
    *,
    teacher: Bound | None = None,
    unlabelled: Sequence[Example] | None = None,
    recipe: Teaching | None = None,
    seed: int = 0,
) -> Best:
    """One update for `bound.model`, which is left as it was.

    `tau` speaks the module's names. `teacher` is the tuned old model with its own head; without one (or where
    the task has no closed label set) alpha and polish look at the few-shot labels alone, which is weaker.
    `unlabelled` examples may carry labels: they are not read."""
    recipe, began = recipe or Teaching(), time.perf_counter()
    if not examples:
        raise DataError("the best recipe needs labelled examples; check the data and --shots.")
    labelled = bound.collate(examples)
    vocabulary = remembered(bound, tau)
    lesson, asked = _lesson(bound, teacher, examples, unlabelled or (), vocabulary, recipe, seed)
    alpha, curve = _start(bound, tau, labelled, lesson, recipe)
    names = bound.trainable()
    rate = recipe.rate * typical_size(tau, names)
    if not rate:
        raise UsageError("the task vector is zero in every trainable tensor: there is nothing to transport.")
    with restored(bound.model) as before, dialled(bound.model, tau) as dial:
        dial.turn(alpha)
        passes = distil(bound, labelled, lesson, rate, recipe, seed)
        update = change(bound.model, before)
    probed = min(recipe.probes, len(lesson)) or min(recipe.labelled, len(examples))
    tried = len(curve) * probed
    work = Work(forward=passes + asked + tried, backward=passes, steps=recipe.steps, vectors=len(curve))
    known = [(at, value if math.isfinite(value) else None) for at, value in curve]  # JSON has no infinity
    parts = {"start_alpha": alpha, "start_curve": known, "rate": rate, "steps": recipe.steps, "asked": asked}
    verdict = "transported" if alpha else "taught"
    return Best(update, verdict, alpha, parts, work, time.perf_counter() - began)


def _lesson(
    bound: Bound,
    teacher: Bound | None,
    examples: Sequence[Example],
    unlabelled: Sequence[Example],
    vocabulary: Tensor | None,
    recipe: Teaching,
    seed: int,
) -> tuple[Lesson, int]:
    """Inputs and the teacher's answers; and how many samples the teacher was asked about.

    Each side reads the examples with its own transform, and the same draws make the same remixes of both."""
    if teacher is None or not can_teach(bound):
        return Lesson({}, torch.empty(0)), 0
    order = torch.randperm(len(unlabelled), generator=torch.Generator().manual_seed(seed)).tolist()
    real = [{**unlabelled[i], "label": bound.labels[0]} for i in order[: recipe.pool]]
    parts: list[list[Batch]] = [[side.collate(real) for side in (bound, teacher)]] if real else []
    if len(real) < ENOUGH:
        known = [*examples, *real]
        parts.append(_made_up(bound, teacher, known, recipe.pool - len(real), vocabulary, seed))
    ours, theirs = (
        _unanswered(sides[0] if len(sides) == 1 else join(*sides)) for sides in zip(*parts, strict=True)
    )
    return Lesson(ours, answers(teacher, theirs)), len(next(iter(theirs.values())))


def _made_up(
    bound: Bound, teacher: Bound, known: Sequence[Example], count: int, vocabulary: Tensor | None, seed: int
) -> list[Batch]:
    """The same made-up inputs as each side reads them: by tokens, or by words where the tokens cannot be cut.

    They cannot where the tokenizers differ, and where a sample holds one sequence per label (causal tasks).
    Without a plain text to cut (chats) the known inputs themselves are the lesson."""
    ours, theirs = (_unanswered(side.collate(known)) for side in (bound, teacher))
    tokens = [batch.get("input_ids") for batch in (ours, theirs)]
    per_label = tokens[0] is not None and tokens[0].dim() > 2
    same = tokens[0] is None or tokens[1] is None or torch.equal(tokens[0].cpu(), tokens[1].cpu())
    if same and not per_label:
        table = _table(teacher)
        if vocabulary is not None and table is not None:
            vocabulary = vocabulary[
                : table.num_embeddings
            ]  # tokens that only the new base has say nothing to the old
        return [_unanswered(remix(batch, count, seed, vocabulary)) for batch in (ours, theirs)]
    column = _text_column(known[0], per_label)
    if not all(isinstance(example.get(column), str) for example in known):
        return [ours, theirs]
    texts = splice_words([example[column] for example in known], count, seed)
    made = [{**known[0], column: text} for text in texts]
    return [side.collate(made) for side in (bound, teacher)]


def _text_column(example: Example, per_label: bool) -> str:
    """The column a task reads its text from; causal ones look at messages first, then at the prompt."""
    order = ("messages", "prompt", "text") if per_label else ("text", "prompt")
    return next((name for name in order if name in example), "prompt")


def _unanswered(batch: Batch) -> Batch:
    """The batch with a placeholder for every label: tasks may count on the entry, nobody reads its values."""
    first = next(iter(batch.values()))
    return {**batch, "labels": torch.zeros(len(first), dtype=torch.long, device=first.device)}


def remembered(bound: Bound, tau: TaskVector) -> Tensor | None:
    """How much the fine-tune has to do with each token: the squared length of its row in the task vector.

    A row moves only when its token is in a training text, so the vector knows the task's vocabulary. All zeros where
    the embedding was not trained; None for models that do not read tokens."""
    table = _table(bound)
    if table is None:
        return None
    name = next((name for name, p in bound.model.named_parameters() if p is table.weight), None)
    if name is None or name not in tau:
        return torch.zeros(table.num_embeddings)
    return tau[name].float().square().sum(1)


def _table(bound: Bound) -> nn.Embedding | None:
    try:
        table = getattr(bound.model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # models of two towers (CLIP) have no one table
        return None
    return table if isinstance(table, nn.Embedding) else None


def _start(
    bound: Bound, tau: TaskVector, labelled: Batch, lesson: Lesson, recipe: Teaching
) -> tuple[float, list[tuple[float, float]]]:
    """The alpha at which the target's answers follow the teacher's best, a constant per class aside.

    Without a teacher: the alpha of the lowest few-shot loss."""
    rows = torch.arange(min(recipe.probes, len(lesson)))
    few = torch.arange(min(recipe.labelled, len(labelled["labels"])))
    probe = lesson.take(rows) if len(lesson) else None
    curve: list[tuple[float, float]] = []
    with dialled(bound.model, tau) as dial:
        for alpha in ALPHAS:
            dial.turn(alpha)
            if probe is not None:
                value = unbiased_divergence(answers(bound, probe.inputs), probe.answers)
            else:
                with torch.no_grad():
                    value = float(bound.loss(bound.model, take(labelled, few)).mean())
            curve.append((alpha, float("inf") if math.isnan(value) else value))
            lowest = min(range(len(curve)), key=lambda i: curve[i][1])
            if len(curve) - 1 - lowest >= PATIENCE:
                break
    return min(curve, key=lambda point: point[1])[0], curve
