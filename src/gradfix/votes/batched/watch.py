"""Watch a model's operations on its weights, without touching the model.

A torch-function mode sees every torch call while it is active and nothing afterwards. `PlanningWatch` records what is done
to each weight and asks autograd which entries one sample reaches; what it finds becomes a plan."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils.weak import WeakIdKeyDictionary

from gradfix.votes.batched.layers import rule_for
from gradfix.votes.batched.passplan import Key, NeedsLoop, Operation
from gradfix.votes.batched.recurrent import spelled_out
from gradfix.votes.batched.replay import overwrites
from gradfix.votes.batched.sample_rows import keeps_rows
from gradfix.votes.engines.passes import tensors_of

_LIKENESSES = {Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as}
_BACKWARDS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
Receiver = Callable[[Sequence[Tensor], Tensor], None]


class Tap(Function):
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


class Spread(Function):
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
        self.parameters = parameters
        self.tracked = {id(p): Tracked(p, (name,)) for name, p in parameters.items()}
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def __enter__(self) -> Watch:
        _show_functions()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _hide_functions()

    @contextmanager
    def only_inside(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watch what some modules do: calls elsewhere are not slowed down by a mode that has no use for them."""
        inside_one = False

        def watched(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            call = _CALLS.get(type(module))
            if call is not None and "forward" not in module.__dict__:
                return lambda input: self.__torch_function__(*call(module, input))

            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside_one
                if inside_one:
                    return forward(*args, **kwargs)
                inside_one = True
                TorchFunctionMode.__enter__(self)
                try:
                    return forward(*args, **kwargs)
                finally:
                    TorchFunctionMode.__exit__(self, None, None, None)
                    inside_one = False

            return run

        _show_functions()
        try:
            with around_forward(modules, watched):
                yield
        finally:
            _hide_functions()

    def weights_in(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tracked]:
        found: list[Tracked] = []
        if func in _LIKENESSES:  # what else it is given tells a shape or a dtype, no values
            self._search(args[:1], found)
            return found
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
            known = self.tracked.get(id(tensor))
            if tensor.requires_grad and (known is None or known.roots != roots):
                self.tracked[id(tensor)] = Tracked(tensor, roots, step, live)


class PlanningWatch(Watch):
    """Record every operation on a weight, and which entries of its output each asked sample reaches."""

    def __init__(self, parameters: dict[str, nn.Parameter], batch: Any, samples: int, device: torch.device) -> None:
        super().__init__(parameters, device)
        self.samples = samples
        self.look: Callable[[Operation, Tensor], None] | None = None  # at the gradient of an operation's output
        self.from_samples: Any = WeakIdKeyDictionary()  # tensors that depend on the batch
        self.batch = {id(leaf): leaf for leaf in tensors_of(batch)}
        self.operations: list[Operation] = []
        self.in_place: set[Any] = set()  # graph nodes that index, and leave every row with its sample
        self.computed: set[torch.dtype] = set()  # in which gradients of samples come about

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_inner(func)
        weights = self.weights_in(func, args, kwargs)
        given = args[:1] if func in _LIKENESSES else (args, kwargs)
        on_samples = any(self._depends_on_samples(t) for t in tensors_in(given))
        if not weights or not torch.is_grad_enabled():
            output = func(*args, **kwargs)
        elif on_samples and (opened := opened_up(func, args, kwargs)) is not None:
            with self:
                return opened()
        else:
            output = self._record(func, args, kwargs, weights, on_samples)
        if on_samples:
            if keeps_rows(func, args, self.samples, self._depends_on_samples):
                self.in_place.add((args[0] if func is Tensor.__setitem__ else output).grad_fn)
            for tensor in tensors_in(output):
                if id(tensor) not in self.tracked:
                    self.from_samples[tensor] = True
                if tensor.requires_grad and tensor.is_floating_point():
                    self.computed.add(tensor.dtype)
        return output

    def shapes(self) -> list[tuple[tuple[Key, int], torch.Size]]:
        """Of what operations give, each by its key and how many of that key came before it."""
        counts: Counter[Key] = Counter()
        found = []
        for operation in self.operations:
            shape = torch.Size() if operation.output is None else operation.output.shape
            found.append(((operation.key, counts[operation.key]), shape))
            counts[operation.key] += 1
        return found

    def dtypes(self) -> set[torch.dtype]:
        return {operation.output.dtype for operation in self.operations if operation.output is not None}

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
        made = made_by(func, args, output)
        if not any(tensor.requires_grad for tensor in tensors_in(made)):
            return output
        if not on_samples:
            self.in_place.update(tensor.grad_fn for tensor in tensors_in(made))  # picks rows of weights
        on_samples = on_samples and not _is_part(made, weights)
        inputs = [(t.tensor, frozenset(t.roots), t.made_by) for t in weights]
        operation = Operation(key_of(func, weights), args, kwargs, inputs, on_samples)
        if isinstance(output, Tensor) and not output.is_sparse and not (overwrites(func) and output._is_view()):

            def receive(_: Sequence[Tensor], gradient: Tensor) -> None:
                if self.look is not None:
                    self.look(operation, gradient)

            output = Tap.apply(output, self.anchor, receive, _may_overwrite(func, output))
            operation.output, operation.node = output.detach(), output.grad_fn
            if rule_for(func) is None:
                operation.output = operation.output.clone()  # compared later, when the model may have changed it
        if not on_samples:
            self.track(made if output is None else output, weights, len(self.operations), True)
        self.operations.append(operation)
        return output


def refuse_inner(func: Any) -> None:
    """A loss that differentiates on its way sees weights detached, and hooks that are not meant for it."""
    if func in _BACKWARDS:
        raise NeedsLoop(f"the loss calls {func.__name__} itself")


def key_of(func: Any, weights: list[Tracked]) -> Key:
    return func, tuple(weight.roots for weight in weights)


def made_by(func: Any, args: Sequence[Any], output: Any) -> Any:
    """What an operation gives; an assignment to some entries gives the tensor that holds them."""
    return args[0] if func is Tensor.__setitem__ else output


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def _is_part(output: Any, weights: list[Tracked]) -> bool:
    """Whether all that comes out is a part of one weight: an expert's, even where the samples chose the expert."""
    return len(weights) == 1 and all(same_storage(tensor, weights[0].tensor) for tensor in tensors_in(output))


def same_storage(a: Tensor, b: Tensor) -> bool:
    dense = not a.is_sparse and not b.is_sparse
    return dense and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _may_overwrite(func: Any, output: Tensor) -> bool:
    """Whether the tap may take over the output itself, so that later in-place changes stay legal."""
    rule = rule_for(func)
    return rule is not None and rule.owns_output and is_own(output)


def is_own(output: Tensor) -> bool:
    return not output._is_view() and not (output.is_leaf and output.requires_grad)


def opened_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The call in smaller ones that a mode sees: multi-head attention and recurrent layers, say."""
    if isinstance(func, types.FunctionType):  # written in Python over other torch functions, with no rule of its own
        composite = func.__module__ == F.__name__ and rule_for(func) is None
        return functools.partial(inside(func), *args, **kwargs) if composite else None
    if func is Tensor.__setitem__:
        return _assigned_by_rows(*args)
    return spelled_out(func, args, kwargs)


def _assigned_by_rows(data: Tensor, index: Any, value: Any) -> Callable[[], None] | None:
    """A weight assigned to rows that the samples chose: a copy for every row first."""
    if not isinstance(value, Tensor) or value.shape == data.detach()[index].shape:
        return None
    return lambda: data.__setitem__(index, torch.zeros_like(data.detach()[index]).add(value))


@functools.cache
def inside(func: types.FunctionType) -> Callable[..., Any]:
    """The same function without its first question whether a mode wants it, so that the mode sees its inside."""
    scope = {**func.__globals__, "has_torch_function": _no, "has_torch_function_unary": _no}
    scope |= {"has_torch_function_variadic": _no}
    bare = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    bare.__kwdefaults__ = func.__kwdefaults__
    return bare


@contextmanager
def around_forward(
    modules: Iterable[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Every one of the modules runs `wrap(module, its own forward)` inside, and comes back as it was.

    A model that asks a forward for its parameters (peft's prefixes do) gets its own."""
    wrapped = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        for module, _ in wrapped:
            run = wrap(module, module.forward)
            run.__wrapped__ = module.forward  # type: ignore[attr-defined]
            module.__dict__["forward"] = run
        yield
    finally:
        for module, own in wrapped:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


# Modules that are one call and nothing else: no mode is needed to see it.
_CALLS: dict[type[nn.Module], Callable[[Any, Tensor], tuple[Any, tuple[()], tuple[Any, ...]]]] = {
    nn.Linear: lambda own, data: (F.linear, (), (data, own.weight, own.bias)),
    nn.LayerNorm: lambda own, data: (F.layer_norm, (), (data, own.normalized_shape, own.weight, own.bias, own.eps)),
}
_APPLY = Function.__dict__["apply"]
_showing = 0


def _show_functions() -> None:
    """Let modes see calls of custom autograd functions, which they do not otherwise."""
    global _showing  # noqa: PLW0603
    _showing += 1
    Function.apply = classmethod(_apply_in_sight)  # type: ignore[assignment]


def _hide_functions() -> None:
    global _showing  # noqa: PLW0603
    _showing -= 1
    if not _showing:
        Function.apply = _APPLY  # type: ignore[method-assign]


def _apply_in_sight(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(_applied(kind), (), *args, **kwargs)
    return _applied(kind)(*args, **kwargs)


@functools.cache
def _applied(kind: type[Function]) -> Callable[..., Any]:
    return functools.partial(_APPLY.__func__, kind)


def _no(*_: Any) -> bool:
    return False
