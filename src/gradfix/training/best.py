"""The recipe that `--method best` runs: find where to start and how far to go, then learn the rest from the teacher.

The tuned old model comes with every transport and is an excellent judge of the task's inputs. It answers inputs
made from the few-shot examples (or real unlabelled ones), and the target is brought to the same answers in a few
dozen steps. They start where the task vector leads, as it is or in the target's coordinates, or at the target itself:
where no weight answers to another, the teacher alone is handed on. Nothing is chosen by labels, so no validation
set is needed; with one, its inputs are asked about too, and its labels veto a result that is worse than none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradfix.align.coordinates import Moved
from gradfix.errors import DataError, GradfixError, UsageError
from gradfix.system.modules import at_work, restored
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.reading import speaks
from gradfix.training.costs import Work
from gradfix.training.distil import ENOUGH, GENTLER, Lesson, Teaching, a_step, can_teach, distil
from gradfix.training.free_text import Taught, asked_of, learn
from gradfix.training.lessons import heard_of, lesson_for, teaching_for, vocabulary
from gradfix.training.relations import SETTING, learn_relations
from gradfix.training.starts import (
    COORDINATES,
    NONE,
    PERMUTED,
    PLAIN,
    Old,
    Start,
    choose_start,
    in_coordinates,
    learned_ways,
    probe_of,
    step_unit,
)
from gradfix.training.steps import change
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector


@dataclass(frozen=True)
class Best:
    """`target + update` is the result; the polish began at `alpha` along the vector that `start` names.

    `start`: "plain" (the task vector as it is), "permuted" (its units in the target's order), "coordinates" (turned
    to the target's units) or "none".
    `verdict`: "transported", or "taught" where no vector helped and the steps began at the target. `adapter`: the LoRA
    that was trained, where it is all of the update."""

    update: TaskVector
    verdict: str
    alpha: float
    start: str = PLAIN
    parts: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    seconds: float = 0.0
    adapter: Any = None

    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the update came about."""
        said = [_reason(self.start, self.parts.get("starts", {}))]
        if not self.parts.get("asked"):
            said.append("the old fine-tune could not be asked: learned from the few-shot labels alone")
        right, known = self.parts.get("named_right", (0, 0))
        if 2 * right < known:
            said.append(
                f"the old fine-tune itself names {right} of the {known} labelled examples right: is it a fine-tune for "
                "this task, and are these its labels?"
            )
        return tuple(filter(None, said))


def _reason(start: str, tried: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Which start was taken and why; nothing where the task vector was the only one and helped."""
    if start == NONE:
        why = "the task vector did not help" if tried else "no weight of the target answers to one of the base"
        return f"{why}: taught from the target's own weights"
    if len(tried) < 2 and start == COORDINATES:
        found = tried[start]
        before = _shown({"divergence": found["curve"][0][1]})
        return (
            f"started from the task vector in the target's coordinates, at alpha {found['alpha']:g}: divergence from the old "
            f"fine-tune's answers {before} -> {_shown(found)}"
        )
    if len(tried) < 2:
        return None
    listed = ", ".join(f"{name} {_shown(found)} at alpha {found['alpha']:g}" for name, found in tried.items())
    return f"started from {start}: it follows the old fine-tune's answers best (divergence: {listed})"


def _shown(found: Mapping[str, Any]) -> str:
    return "unknown" if found["divergence"] is None else f"{found['divergence']:.3f}"


def best(
    bound: Bound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    *,
    teacher: Bound | None = None,
    unlabelled: Sequence[Example] | None = None,
    old: Old | None = None,
    recipe: Teaching | None = None,
    seed: int = 0,
) -> Best:
    """One update for `bound.model`, which is left as it was. Open answers have a recipe of their own (`free_text`).

    `tau` speaks the module's names; None where the target has another shape. `teacher` is the tuned old model with its
    own head; without one (or where the task has no closed label set) alpha and polish look at the few-shot labels
    alone, which is weaker. `old` lets the vector be turned to the target's units. `unlabelled` examples may carry
    labels: they are not read; with them `examples` may be empty, and the teacher alone is learned from."""
    if speaks(bound):
        said = asked_of(teacher, bound, examples, unlabelled or (), seed=seed)
        return spoken(learn(bound, tau, examples, said, teacher=teacher, old=old, seed=seed))
    began = time.perf_counter()
    if not examples and not (unlabelled and teacher is not None and can_teach(bound)):
        raise DataError(
            "the best recipe needs labelled examples, or unlabelled ones and a fine-tune that can be asked; "
            "check the data, --shots and --unlabelled."
        )
    if isinstance(bound, EmbeddingBound):
        return _by_relations(bound, tau, examples, teacher, unlabelled or (), old, recipe or SETTING, seed)
    recipe = recipe or teaching_for(bound, teacher, examples, unlabelled or ())
    labelled = bound.collate(examples) if examples else None
    lent = old.lent if old is not None else None
    if lent is None:
        words = vocabulary(bound, tau, teacher, old)
        lesson, asked = lesson_for(bound, teacher, examples, unlabelled or (), words, recipe, seed)
    else:
        lesson, asked = lent.lesson, 0  # whoever lends it has paid for the asking
    rate = recipe.rate * step_unit(bound, tau, teacher, old)
    if not rate:
        raise UsageError("the task vector is zero in every trainable tensor: there is nothing to transport.")
    heard = None
    if len(lesson) and teacher is not None and examples:
        heard, asked = heard_of(teacher, examples), asked + len(examples)
    vectors, work, found = _vectors(bound, tau, teacher, old, lesson, recipe)
    start, tried = choose_start(bound, vectors, labelled, lesson, recipe)
    if len(unlabelled or ()) >= ENOUGH and len(lesson):
        recipe = recipe.real()
    follows, probes = probe_of(bound, labelled, lesson, recipe)
    work += Work(forward=asked + sum(one.passes for one in tried), vectors=sum(len(one.curve) for one in tried))
    paid = work + lent.work if lent is not None else work
    recipe = recipe.affordable(paid + Work(forward=probes), a_step(labelled, lesson, recipe))
    # a handful of labels alone does not say how far each matrix should go
    along = learned_ways(start, recipe.along / rate, recipe.betas) if len(lesson) else None
    passes = looked = 0
    for size in (rate, rate / GENTLER):  # the second only where the first led away from the teacher
        with restored(bound.model) as before, dialled(bound.model, start.vector or {}) as dial:
            dial.turn(start.alpha)
            passes += distil(bound, labelled, lesson, size, recipe, seed, along, heard)
            with at_work(bound.model):
                left_behind = len(lesson) > 0 and not follows() <= start.value
            update = change(bound.model, before)
        looked += probes if len(lesson) else 0
        if not left_behind:
            break
    work += Work(forward=passes + looked, backward=passes, steps=recipe.steps)
    parts = {**_told(start, tried), **found, "rate": size, "steps": recipe.steps, "asked": len(lesson)}
    if heard is not None and labelled is not None:
        right = heard.argmax(-1) == labelled["labels"].to(heard.device)
        parts["named_right"] = (int(right.sum()), len(right))
    verdict = "taught" if start.name == NONE else "transported"
    return Best(update, verdict, start.alpha, start.name, parts, work, time.perf_counter() - began)


def _by_relations(
    bound: EmbeddingBound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    teacher: Bound | None,
    unlabelled: Sequence[Example],
    old: Old | None,
    recipe: Teaching,
    seed: int,
) -> Best:
    """Retrievers have no answers to hand on; they hand on how texts relate."""
    if not isinstance(teacher, EmbeddingBound):
        raise UsageError("the old base and its fine-tune must be embedding models that can be opened.")
    began = time.perf_counter()
    found = learn_relations(bound, tau, examples, teacher, unlabelled=unlabelled, old=old, recipe=recipe, seed=seed)
    parts = {**_told(found.start, found.tried), **found.parts}
    verdict = "taught" if found.start.name == NONE else "transported"
    seconds = time.perf_counter() - began
    return Best(found.update, verdict, found.start.alpha, found.start.name, parts, found.work, seconds)


def spoken(found: Taught) -> Best:
    """What was learned of free text, told as the recipe tells it."""
    start = found.start
    verdict = "taught" if start.name == NONE else "transported"
    return Best(found.update, verdict, start.alpha, start.name, found.parts, found.work, found.seconds, found.adapter)


def _vectors(
    bound: Bound, tau: TaskVector | None, teacher: Bound | None, old: Old | None, lesson: Lesson, recipe: Teaching
) -> tuple[dict[str, TaskVector], Work, dict[str, Any]]:
    """The vectors a start may lie on, what they cost, and what is to be told of them."""
    vectors, work = ({} if tau is None else {PLAIN: tau}), Work()
    told: dict[str, Any] = {}
    if old is not None:
        told["correspondence"] = old.as_json()
    if old is not None and old.lent is not None:
        vectors[COORDINATES], work = old.lent.vector, Work(vectors=1)
    elif old is not None and teacher is not None and len(lesson) and old.correspondence.linear:
        try:
            moved = in_coordinates(bound, teacher, old, lesson, recipe)["bico"]
        except (DataError, UsageError) as error:  # the other starts, and the lessons, need no coordinates
            told["no_coordinates"] = str(error)
        else:
            vectors[COORDINATES] = moved.vector
            work = mapping(moved, lesson) + Work(vectors=1)
    if tau is not None and old is not None and old.permuted is not None and COORDINATES not in vectors:
        try:  # maps say more than permutations and take less time; where there are none, an order is better than nothing
            vectors[PERMUTED] = old.permuted()
        except GradfixError as error:
            told["no_permutation"] = str(error)
    return vectors, work, told


def _told(start: Start, tried: Sequence[Start]) -> dict[str, Any]:
    return {
        "start": start.name,
        "start_alpha": start.alpha,
        "start_curve": start.as_json()["curve"],
        "starts": {one.name: one.as_json() for one in tried},
    }


def mapping(moved: Moved, lesson: Lesson) -> Work:
    """What it took to compare the units of both bases on inputs of a lesson."""
    passes = round(moved.passes * lesson.length(slice(moved.passes // 2)))
    return Work(forward=passes, backward=passes)
