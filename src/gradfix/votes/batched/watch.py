"""Watch a model's operations on its weights, without touching the model.

A torch-function mode sees every torch call while it is active and nothing afterwards. `PlanningWatch` records what is done
to each weight and asks autograd which entries one sample reaches; what it finds becomes a plan."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradfix.votes.batched.layers import rule_for
from gradfix.votes.batched.passplan import Key, NeedsLoop, Operation
from gradfix.votes.batched.replay import overwrites
from gradfix.votes.batched.sample_rows import keeps_rows, support
from gradfix.votes.engines.passes import tensors_of

_BACKWARDS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
Receiver = Callable[[Sequence[Tensor], Tensor], None]


class Tap(torch.autograd.Function):
    """The identity; on the way back it shows the gradient to a receiver."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, receiver: Receiver, in_place: bool, *inputs: Tensor
    ) -> Tensor:
        ctx.receiver, ctx.inputs = receiver, len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        if in_place:
            ctx.mark_dirty(output)
            return output
        return output.clone()  # an alias could not be modified in place later

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # type: ignore[override]
        if gradient is not None:
            saved = ctx.saved_tensors  # may run a checkpointed forward again, under the mode
            with torch._C.DisableTorchFunction():
                ctx.receiver(saved, gradient)
        return gradient, None, None, None, *(None for _ in range(ctx.inputs))


class Spread(torch.autograd.Function):
    """A weight as if every sample had its own, without the memory; on the way back it shows each sample's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, receiver: Receiver, shape: Sequence[int]) -> Tensor:
        ctx.receiver = receiver
        ctx.set_materialize_grads(False)
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # type: ignore[override]
        if gradient is not None:
            with torch._C.DisableTorchFunction():
                ctx.receiver((), gradient)
        return None, None, None, None


@dataclass(slots=True)
class Tracked:
    """A tensor made of weights alone. `votes` is the part of the tally with the same entries, if there is one.

    Without one, its samples' gradients are summed over its uses, and sent back through what made it when all are in."""

    tensor: Tensor
    roots: tuple[str, ...]
    made_by: int | None = None
    live: bool = True
    votes: Tensor | None = None
    detached: Tensor | None = None
    uses: int = 0
    gradients: Tensor | None = None

    def without_grad(self) -> Tensor:
        if self.detached is None:
            self.detached = self.tensor.detach()
        return self.detached


class Watch(TorchFunctionMode):
    """Follow weights through torch calls; subclasses say what to do with a call that takes one."""

    def __init__(self, parameters: dict[str, nn.Parameter], device: torch.device) -> None:
        super().__init__()
        self.tracked = {id(p): Tracked(p, (name,)) for name, p in parameters.items()}
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def weights_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tracked]:
        found: list[Tracked] = []
        self._search(args, found)
        if kwargs:
            self._search(kwargs.values(), found)
        return found

    def _search(self, values: Iterable[Any], found: list[Tracked]) -> None:
        tracked = self.tracked
        for value in values:
            if id(value) in tracked:
                found.append(tracked[id(value)])
            elif value.__class__ in (list, tuple):
                self._search(value, found)
            elif value.__class__ is dict:
                self._search(value.values(), found)

    def forget(self) -> None:
        """Let go of the model's tensors: taps and their graph refer back to the mode, a cycle that would keep them."""
        self.tracked.clear()

    def track(self, output: Any, weights: list[Tracked], step: int | None, live: bool) -> None:
        roots = tuple(dict.fromkeys(name for weight in weights for name in weight.roots))
        for tensor in tensors_in(output):
            if tensor.requires_grad and id(tensor) not in self.tracked:
                self.tracked[id(tensor)] = Tracked(tensor, roots, step, live)


class PlanningWatch(Watch):
    """Record every operation on a weight, and which entries of its output each asked sample reaches."""

    def __init__(self, parameters: dict[str, nn.Parameter], batch: Any, samples: int, device: torch.device) -> None:
        super().__init__(parameters, device)
        self.samples = samples
        self.group: Sequence[int] | None = None  # whose losses are switched on
        self.from_samples: Any = WeakIdKeyDictionary()  # tensors that depend on the batch
        self.batch = {id(leaf): leaf for leaf in tensors_of(batch)}
        self.operations: list[Operation] = []
        self.in_place: set[Any] = set()  # graph nodes that index, and leave every row with its sample

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_inner(func)
        weights = self.weights_in(args, kwargs)
        on_samples = any(self._depends_on_samples(t) for t in tensors_in((args, kwargs)))
        if not weights or not torch.is_grad_enabled():
            output = func(*args, **kwargs)
        elif on_samples and is_composite(func):
            with self:
                return inside(func)(*args, **kwargs)
        else:
            output = self._record(func, args, kwargs, weights, on_samples)
        if on_samples:
            if keeps_rows(func, args, self.samples, self._depends_on_samples):
                self.in_place.add((args[0] if func is Tensor.__setitem__ else output).grad_fn)
            for tensor in tensors_in(output):
                if id(tensor) not in self.tracked:
                    self.from_samples[tensor] = True
        return output

    def forget(self) -> None:
        super().forget()
        self.in_place.clear()
        for operation in self.operations:
            operation.args, operation.kwargs, operation.weights = (), {}, []
            operation.output = operation.node = None

    def _depends_on_samples(self, tensor: Tensor) -> bool:
        return id(tensor) in self.batch or tensor in self.from_samples

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked], on_samples: bool
    ) -> Any:
        output = func(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_in(output)):
            return output
        inputs = [(t.tensor, frozenset(t.roots), t.made_by) for t in weights]
        operation = Operation(key_of(func, weights), args, kwargs, inputs, on_samples)
        if isinstance(output, Tensor) and not (overwrites(func) and output._is_view()):

            def receive(_: Sequence[Tensor], gradient: Tensor) -> None:
                if self.group is not None:
                    operation.seen.append((self.group, support(gradient, self.samples)))

            output = Tap.apply(output, self.anchor, receive, _may_overwrite(func, output))
            operation.output, operation.node = output.detach(), output.grad_fn
            if rule_for(func) is None:
                operation.output = operation.output.clone()  # compared later, when the model may have changed it
        if not on_samples:
            self.track(output, weights, len(self.operations), True)
        self.operations.append(operation)
        return output


def refuse_inner(func: Any) -> None:
    """A loss that differentiates on its way sees weights detached, and hooks that are not meant for it."""
    if func in _BACKWARDS:
        raise NeedsLoop(f"the loss calls {func.__name__} itself")


def key_of(func: Any, weights: list[Tracked]) -> Key:
    return func, tuple(weight.roots for weight in weights)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def _may_overwrite(func: Any, output: Tensor) -> bool:
    """Whether the tap may take over the output itself, so that later in-place changes stay legal."""
    return rule_for(func) is not None and is_own(output)


def is_own(output: Tensor) -> bool:
    return not output._is_view() and not (output.is_leaf and output.requires_grad)


def is_composite(func: Any) -> bool:
    """Written in Python over other torch functions, with no rule of its own: multi-head attention, say."""
    return isinstance(func, types.FunctionType) and func.__module__ == F.__name__ and rule_for(func) is None


@functools.cache
def inside(func: types.FunctionType) -> Callable[..., Any]:
    """The same function without its first question whether a mode wants it, so that the mode sees its inside."""
    scope = {**func.__globals__, "has_torch_function": _no, "has_torch_function_unary": _no}
    scope |= {"has_torch_function_variadic": _no}
    bare = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    bare.__kwdefaults__ = func.__kwdefaults__
    return bare


def _no(*_: Any) -> bool:
    return False
