"""One pass through the loss, as if it were the model's first: batches of any kind, and what passes leave behind.

A module may keep what it made of its weights for the next pass (LeViT's position biases in eval mode), without a graph or
with one that is used up: every pass starts without it. And torch's own backward is put right where it is known to be wrong."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from gradfix.errors import DataError

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

_STATISTICS = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}


def leaves_of(batch: Batch) -> list[Any]:
    """The tensors and plain values of a batch, also inside the dictionaries of tokenizers and image processors."""
    found = []
    for leaf in tree_flatten(batch)[0]:
        found += leaves_of(leaf.data) if isinstance(leaf, UserDict) else [leaf]
    return found


def structure_of(batch: Batch) -> str:
    """Where the leaves stand."""
    leaves, form = tree_flatten(batch)
    return str(form) + "".join(structure_of(leaf.data) for leaf in leaves if isinstance(leaf, UserDict))


def tensors_of(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The same batch with other tensors."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            made = copy.copy(leaf)
            made.data = map_tensors(change, leaf.data)
            return made
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(one, batch)


def batch_size(batch: Batch) -> int:
    sizes = {leaf.shape[0] for leaf in tensors_of(batch) if leaf.ndim}
    if not sizes:
        raise DataError(
            f"a batch must hold tensors, samples first; this one is a {type(batch).__name__} without any that are seen. "
            "Use tensors in dicts, lists or tuples (tokenizers: return_tensors='pt')."
        )
    if len(sizes) != 1:
        raise DataError(f"a batch must hold tensors with one common first dimension, got sizes {sorted(sizes)}.")
    return int(sizes.pop())


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """The same batch with only some samples."""
    return map_tensors(lambda leaf: leaf[rows] if leaf.ndim else leaf, batch)


def samples(batch: Batch) -> Iterator[Batch]:
    for row in range(batch_size(batch)):
        yield take(batch, slice(row, row + 1))


def every_second(batch: Batch, start: int) -> Batch:
    """Half of the samples, the last one first: other neighbours, other statistics, and another place in the row."""
    return map_tensors(lambda leaf: leaf[start::2].flip(0) if leaf.ndim else leaf, batch)


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """The losses of a pass that finds nothing left by earlier ones."""
    left = _LEFT.get(model)
    if left is not None:
        left.clear()
    return loss(model, batch)


class _ContiguousGradients(TorchFunctionMode):
    """The gradient behind a norm with fixed statistics, without the transposed strides that torch misreads."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _STATISTICS and output.requires_grad:
            output.register_hook(Tensor.contiguous)
        return output


def one_sample(model: nn.Module) -> AbstractContextManager[Any]:
    """Around the forward and backward of one sample.

    torch's batch norm on the CPU (2.13, eval mode) gives wrong gradients for one sample whose output gradient is transposed."""
    first = next(model.parameters(), None)
    return _ContiguousGradients() if first is not None and first.device.type == "cpu" else nullcontext()


class _Leftovers:
    """Tensors that passes leave on a model's modules, outside weights and buffers."""

    def __init__(self, before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
        self.passes, self.before = 0, before

    def clear(self) -> None:
        self.passes += 1
        if self.passes == 2:  # what the first pass left tells which modules leave anything
            self.before = [(module, before) for module, before in self.before if _left(module, before)]
        if self.passes > 1:
            self.restore()

    def restore(self) -> None:
        for module, before in self.before:
            for name in _left(module, before):
                own, then = module.__dict__[name], before.get(name, _ABSENT)
                if then is _ABSENT:
                    delattr(module, name)
                elif isinstance(own, dict) and isinstance(then, dict):
                    own.clear()
                    own.update(then)
                else:
                    module.__dict__[name] = then


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = module.__dict__.items()
    return {name: dict(value) if isinstance(value, dict) else value for name, value in own if name not in _INTERNAL}


def _keeps(value: Any) -> bool:
    """Whether an attribute holds a tensor."""
    if isinstance(value, (dict, list, tuple)):
        return any(isinstance(item, Tensor) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _left(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Attributes that hold other tensors than before."""
    changed = [
        name for name, value in module.__dict__.items() if value is not before.get(name) and name not in _INTERNAL
    ]
    return [name for name in changed if _differs(module.__dict__[name], before.get(name))]


def _differs(value: Any, then: Any) -> bool:
    """Whether an attribute holds a tensor that it did not hold before."""
    if not isinstance(value, dict):
        return isinstance(value, Tensor)
    known = then if isinstance(then, dict) else {}
    return any(isinstance(item, Tensor) and known.get(key) is not item for key, item in value.items())


_ABSENT = object()
_INTERNAL = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
_LEFT: WeakKeyDictionary[nn.Module, _Leftovers] = WeakKeyDictionary()


@contextmanager
def nothing_left_behind(model: nn.Module) -> Iterator[None]:
    """Every pass inside starts without what an earlier one left on the modules; so does the model's owner afterwards.

    What was kept before goes the way the model itself lets go of it: by a turn of `train`."""
    everything = _Leftovers([(module, _attributes(module)) for module in model.modules()])
    turning = [module for module, _ in everything.before if type(module).train is not nn.Module.train]
    _LEFT[model] = _Leftovers(everything.before)
    if turning and any(_keeps(value) for _, before in everything.before for value in before.values()):
        for mode in (True, False):
            for module in turning:
                if module.training is not mode:  # else its parent turned it
                    module.train(mode)
        _LEFT[model] = _Leftovers([(module, _attributes(module)) for module, _ in everything.before])
    try:
        yield
    finally:
        del _LEFT[model]
        everything.restore()
