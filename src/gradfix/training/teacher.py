"""The teacher: the tuned old model, ready to be asked about inputs of the target's task.

It is rebuilt from what every transport has, base A and the task vector, so a LoRA or a vector file serves as
well as a full fine-tune."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Source, open_checkpoint
from gradfix.tasks.base import Bound, Task
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply


def can_teach(bound: Bound) -> bool:
    """Whether a model of this task has answers to hand on: scores over a closed label set."""
    return type(bound).logits is not Bound.logits and bool(bound.labels)


def teacher_of(bound: Bound, base: Source, tau: TaskVector, task: Task | None = None) -> Bound | None:
    """The tuned old model as a bound one: base A with its own head and transform, plus the task vector.

    From an open checkpoint alone, without a task to open it, only models that carry their head can be built;
    None where nobody can, or where the task has no closed label set to teach."""
    if not can_teach(bound):
        return None
    weight = next(bound.model.parameters())
    if task is not None and isinstance(base, (str, os.PathLike)):
        old = task.open(base, dtype=weight.dtype, device=weight.device)
    elif not hasattr(bound, "head"):
        old = copy.copy(bound)
        old.model = copy.deepcopy(bound.model)
        _load(old.model, base)
    else:
        return None
    names = dict(old.model.named_parameters())
    mapped = tau if set(tau) <= set(names) else name_map(old.model, list(tau)).to_module(tau)
    apply(old.model, {name: delta for name, delta in mapped.items() if name in names})
    return old


@torch.no_grad()
def _load(model: nn.Module, base: Source) -> None:
    """The base's values in place of the model's own, for every tensor that both have."""
    state: Mapping[str, Tensor] = open_checkpoint(base).state()
    known = dict(model.named_parameters())
    if not set(known) <= set(state):
        state = name_map(model, list(state)).to_module(state)
    for name in known.keys() & state.keys():
        known[name].copy_(state[name])
