"""The target as the task sees it, and the head that goes with a fine-tune.

A head that only the fine-tune has is copied where it fits. On a target of another width, or with other layers in its
head, it does not: then a new one is put on, and learns from the fine-tune's answers with the rest of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.stream.lora_out import layer_kinds
from gradfix.system.modules import at_work
from gradfix.tasks.base import Batch, Bound, Example, Task
from gradfix.tasks.classification import Classification, ClassificationBound
from gradfix.tasks.embedding import EmbeddingBound, texts_of
from gradfix.tasks.heads import NEW, HeadMisfit
from gradfix.vectors.taskvector import TaskVector


def open_target(trio: Trio, task: Task, dtype: torch.dtype, device: str) -> Bound:
    """The target as the task sees it, with the fine-tune's head where that is to be copied."""
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    if trio.head == "copy" and isinstance(task, Classification):
        lent = {"head_from": trio.given["tuned"], "base": trio.given["base"]}
        try:
            bound: Bound = task.open(trio.given["target"], **how, **lent)
        except HeadMisfit as error:
            if trio.apart is None:
                raise
            bound = task.with_new_head(0).open(trio.given["target"], **how)
            bound.notes = (f"{error} A new head is put on, and learns from the fine-tune's answers.",)
            return bound
    else:
        bound = task.open(trio.given["target"], **how)
    if trio.head == "copy" and fits_head(bound, trio):
        # also where the target has one of its own: what is measured is what is written
        fill(bound.model, trio.tuned, trio.target, trio.heads)
    elif trio.head == "copy":
        said = (
            f"the head of {trio.tuned} does not fit {trio.target}: the target's own stays, and learns from its answers."
        )
        bound.notes = (*bound.notes, said)
    return bound


def lent_head(trio: Trio, bound: Bound) -> dict[str, Tensor]:
    """The head that the target lacks, where the fine-tune's is to be copied: its own, or one that stands in for it."""
    if trio.head != "copy":
        return {}
    if trio.apart is None:
        return {name: trio.tuned.read(name) for name in trio.heads}
    own, names = dict(bound.model.named_parameters()), name_map(bound.model, trio.target.names())
    head = names.to_disk({name: own[name].detach().cpu() for name in bound.head_names() if name in own})
    taken = trio.heads if fits_head(bound, trio) else ()
    return {name: tensor for name, tensor in head.items() if name not in trio.target or name in taken}


def has_new_head(bound: Bound) -> bool:
    return isinstance(bound, ClassificationBound) and bound.classifier.origin == NEW


def fits_head(bound: Bound, trio: Trio) -> bool:
    """Whether every tensor of the fine-tune's head that the model has, too, has the same shape there."""
    own = {name: p.shape for name, p in bound.model.named_parameters()}
    return all(own.get(name, shape) == shape for name in trio.heads for shape in [trio.tuned.info(name).shape])


def fill(model: nn.Module, source: Checkpoint, target: Checkpoint, names: Iterable[str]) -> None:
    """Put these tensors of a checkpoint into the model, one by one; names are those of the target's files."""
    known = name_map(model, target.names())
    parameters, parts = dict(model.named_parameters()), {}
    with torch.no_grad():
        for name in names:
            if name in known.fused:
                parts[name] = source.read(name)
                continue
            for own, value in known.to_module({name: source.read(name)}).items():
                if own in parameters and parameters[own].shape == value.shape:
                    parameters[own].copy_(value)
        for own, value in known.to_module(parts).items():
            parameters[own].copy_(value)


def uncalled(bound: Bound, update: TaskVector, seen: Sequence[Batch | Example]) -> set[str]:
    """Changed weights of layers that the model reads without calling them: a wrapper around such a layer is idle.

    `seen` are batches, or inputs without labels where nothing is labelled; one look at the first is enough."""
    called: set[nn.Module] = set()
    layers = {name.removesuffix(".weight"): name for name in layer_kinds(bound.model)}
    modules = {path: bound.model.get_submodule(path) for path in layers}
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in modules.values()]
    with torch.no_grad(), at_work(bound.model):
        _look(bound, seen[0])
    for hook in hooks:
        hook.remove()
    idle = [name for path, name in layers.items() if modules[path] not in called]
    return {name for name in idle if name in update and bool(update[name].any())}


def _look(bound: Bound, first: Any) -> None:
    if any(isinstance(value, Tensor) for value in first.values()):
        bound.judge(bound.model, first)
    elif isinstance(bound, EmbeddingBound):
        bound.vectors(bound.model, texts_of(first))
    else:
        bound.judge(bound.model, bound.collate([{**first, "label": bound.labels[0]}]))
