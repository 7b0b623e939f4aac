"""A vector of another shape, ready to be merged: rewritten for the target's units on examples that both bases read.

Width, depth, vocabulary and architecture may differ; what answers to what is found as for `transport --method bico`."""

from __future__ import annotations

from typing import Any

import torch

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.weights import MemoryCheckpoint
from gradfix.commands.setting import Shots
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging.folders import Vector
from gradfix.methods.opening import old_side, open_teacher
from gradfix.tasks.base import Bound, Task
from gradfix.training.lessons import lesson_for, remembered, teaching_for
from gradfix.training.starts import in_coordinates


def rewritten(
    trio: Trio, task: Task, bound: Bound, shots: Shots, how: str, seed: int
) -> tuple[MemoryCheckpoint, dict[str, Any]]:
    """The fine-tune's change under the target's names and in its shapes, and how it came about."""
    teacher = open_teacher(trio, bound, task)
    if teacher is None:
        raise UsageError(
            f"{trio.given['tuned']} has another shape than the target ({trio.apart}): its units are matched by the "
            "answers of a classifier or a zero-shot model, which this task has not."
        )
    old, recipe = old_side(trio, bound, teacher), teaching_for(bound, teacher, shots.fewshot, ())
    if not old.correspondence.linear:
        raise IncompatibleCheckpoints(
            f"no linear map of {trio.target} answers to one that {trio.given['tuned']} changed: nothing could be merged."
        )
    lesson, _ = lesson_for(bound, teacher, shots.fewshot, [], remembered(teacher, old.tau), recipe, seed)
    moved = in_coordinates(bound, teacher, old, lesson, recipe, [how])[how]
    names = name_map(bound.model, trio.target.names())
    update = names.to_disk({name: delta.cpu() for name, delta in moved.vector.items()})
    kept = {name: round(share, 6) for name, share in moved.kept.items()}
    about = {"base": str(trio.given["base"]), "tuned": str(trio.given["tuned"]), "another_shape": trio.apart}
    facts = {**about, "coordinates": how, "correspondence": old.as_json(), "kept": kept}
    return MemoryCheckpoint(update, trio.sources["tuned"].path), facts


def as_vector(change: MemoryCheckpoint, votes: Any, weight: float) -> Vector:
    """A change that is there already is the fine-tune of a base of zeros."""
    zeros = {name: torch.zeros(()).expand(change.info(name).shape) for name in change.names()}
    return Vector(zeros, change, votes, weight)
