"""The upper references of a comparison: what full fine-tuning of the target itself would give.

A user of transport does not have this checkpoint; it is made only to know how much there was to gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradfix.checkpoints.write import discard
from gradfix.system.modules import restored
from gradfix.tasks.base import Bound, Example
from gradfix.training.costs import Work
from gradfix.training.finetuning import finetune
from gradfix.vectors.taskvector import TaskVector

RECIPE: Mapping[str, Any] = {"steps": 400, "batch_size": 64, "lr": 2e-5, "micro_batch": 32}


def tuned_target(
    bound: Bound, train: Sequence[Example], options: Mapping[str, Any], checkpoint: Path | None = None
) -> tuple[TaskVector, Work]:
    """Fine-tune the target on the whole train split: what changed, and the work; the target comes back untouched.

    `options` are those of `finetune` and replace the entries of `RECIPE`."""
    recipe = {**RECIPE, **options}
    with restored(bound.model) as before:
        finetune(bound, train, checkpoint=checkpoint, **recipe)
        update = TaskVector({name: p.detach() - before[name] for name, p in bound.model.named_parameters()})
    if checkpoint is not None:
        discard(checkpoint)
    samples = recipe["steps"] * min(recipe["batch_size"], len(train))
    return update, Work(forward=samples, backward=samples, steps=recipe["steps"])
