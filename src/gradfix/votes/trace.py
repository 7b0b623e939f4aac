"""Watch a model's operations on its weights, without touching the model.

A torch-function mode sees every torch call while it is active and nothing afterwards. A weight's use is run with
the weight detached, so autograd computes no weight gradient, and a tap behind it hands the output gradient to the
use's vote rule during the backward pass. Whatever the mode cannot see still reaches the weight through autograd,
where `reach` finds it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from gradfix.votes import kernels
from gradfix.votes.forms import Dense, Form, combine, densify
from gradfix.votes.layout import support
from gradfix.votes.plan import Key, Operation, Plan, PlanMismatch, Step, read_call
from gradfix.votes.replay import overwrites
from gradfix.votes.rules import Call, Rule, Samples, rule_for
from gradfix.votes.tally import Tally

Receiver = Callable[[Sequence[Tensor], Tensor], None]
_CASTS = {Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type_as, Tensor.contiguous}


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


@dataclass
class Tracked:
    """A tensor made of weights alone. `votes` is the part of the tally with the same entries, if there is one."""

    tensor: Tensor
    roots: tuple[str, ...]
    made_by: int | None = None
    live: bool = True
    votes: Tensor | None = None
    detached: Tensor | None = None


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

    def track(self, output: Any, weights: list[Tracked], step: int | None, live: bool) -> None:
        roots = tuple(dict.fromkeys(name for weight in weights for name in weight.roots))
        for tensor in _tensors(output):
            if tensor.requires_grad and id(tensor) not in self.tracked:
                self.tracked[id(tensor)] = Tracked(tensor, roots, step, live)


class Probe(Watch):
    """Record every operation on a weight, and which entries of its output each probed sample reaches."""

    def __init__(self, parameters: dict[str, nn.Parameter], batch: Any, device: torch.device) -> None:
        super().__init__(parameters, device)
        self.batch = {id(leaf): leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)}
        self.operations: list[Operation] = []
        self.sample: int | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = self.weights_in(args, kwargs)
        on_samples = any(self._depends_on_samples(t) for t in _tensors((args, kwargs)))
        if not weights or not torch.is_grad_enabled():
            output = func(*args, **kwargs)
        elif on_samples and _is_composite(func):
            with self:
                return _inside(func)(*args, **kwargs)
        else:
            output = self._record(func, args, kwargs, weights, on_samples)
        if on_samples:
            for tensor in _tensors(output):
                if id(tensor) not in self.tracked:
                    tensor.__dict__["_gradfix_sample"] = self.anchor
        return output

    def _depends_on_samples(self, tensor: Tensor) -> bool:
        return id(tensor) in self.batch or tensor.__dict__.get("_gradfix_sample") is self.anchor

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked], on_samples: bool
    ) -> Any:
        output = func(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in _tensors(output)):
            return output
        inputs = [(t.tensor, frozenset(t.roots), t.made_by) for t in weights]
        operation = Operation(_key(func, weights), args, kwargs, inputs, on_samples)
        if isinstance(output, Tensor) and not (overwrites(func) and output._is_view()):

            def receive(_: Sequence[Tensor], gradient: Tensor) -> None:
                if self.sample is not None:
                    operation.seen.append((self.sample, support(gradient)))

            output = Tap.apply(output, self.anchor, receive, _may_overwrite(func, output))
            operation.output, operation.node = output.detach(), output.grad_fn
            if rule_for(func) is None:
                operation.output = operation.output.clone()  # compared later, when the model may have changed it
        if not on_samples:
            self.track(output, weights, len(self.operations), True)
        self.operations.append(operation)
        return output


class Use:
    """One use of weights, from its call in the forward pass to its output gradient in the backward pass."""

    __slots__ = ("call", "inputs", "step", "versions", "votes")

    def __init__(self, votes: Votes, step: Step, call: Call) -> None:
        self.votes, self.step, self.call = votes, step, call
        self.inputs: dict[str, Tensor] | None = call.inputs
        self.versions = [tensor._version for tensor in call.inputs.values()]

    def release(self) -> dict[str, Tensor]:
        """Hand the inputs over, so that they live no longer than the tap that saves them."""
        inputs = self.call.inputs
        self.inputs, self.call.inputs = None, dict.fromkeys(inputs)  # type: ignore[arg-type]
        return inputs

    def receive(self, saved: Sequence[Tensor], gradient: Tensor) -> None:
        if self.votes.replaying:
            call = self.call.keep(dict(zip(self.call.inputs, saved)))
            self.votes.fold_use(self.step, call, gradient)

    def see(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The same from a hook on the operation itself, which costs the forward pass less than a tap."""
        inputs, self.inputs, self.call.inputs = self.inputs, None, {}
        if gradients[0] is None or inputs is None or not self.votes.replaying:
            return
        if [tensor._version for tensor in inputs.values()] != self.versions:
            raise RuntimeError(f"an input of {self.step.key[0]} was modified in place after it was used.")
        with torch._C.DisableTorchFunction():
            self.votes.fold_use(self.step, self.call.keep(inputs), gradients[0])


class Votes(Watch):
    """Run a plan: every use of a weight is tapped, and its votes are folded during the backward pass."""

    def __init__(self, plan: Plan, tally: Tally, samples: int, device: torch.device) -> None:
        super().__init__(tally.parameters, device)
        self.plan, self.tally, self.samples = plan, tally, samples
        self.position, self.replaying = 0, False
        self.uses = plan.uses()
        self.waiting: dict[str, list[tuple[Form, Tensor]]] = {name: [] for name in self.uses}
        self.small: list[tuple[Dense, Tensor]] = []
        for name, parameter in tally.parameters.items():
            self.tracked[id(parameter)].votes = tally[name]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every torch call of the forward pass comes through here, so the way out for those without a weight is short.
        tracked = self.tracked
        for value in args:
            if id(value) in tracked or value.__class__ is list or value.__class__ is tuple:
                break
        else:
            if not kwargs:
                return func(*args)
        kwargs = {} if kwargs is None else kwargs
        weights = self.weights_in(args, kwargs)
        if not weights or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        key = _key(func, weights)
        step = self._next(key)
        if step is None and _is_composite(func):
            with self:
                return _inside(func)(*args, **kwargs)
        if step is None or step.role != "vote":
            output = func(*args, **kwargs)
            if step is None and any(tensor.requires_grad for tensor in _tensors(output)):
                raise PlanMismatch(f"{getattr(func, '__name__', func)} on {key[1]}")
        else:
            output = self._tapped(step, func, args, kwargs)
        if step is not None and not step.on_samples:
            self.track(output, weights, None, step.role == "derive")
            self._follow_views(func, args, kwargs, weights, output)
        return output

    def _next(self, key: Key) -> Step | None:
        if self.replaying:
            return next((step for step in self.plan.steps if step.key == key), None)
        if self.position < len(self.plan.steps) and self.plan.steps[self.position].key == key:
            self.position += 1
            return self.plan.steps[self.position - 1]
        return None

    def _tapped(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        assert step.rule is not None and step.layout is not None
        call = read_call(step.rule, func, args, kwargs, self._is_live)
        if call is None:
            raise PlanMismatch(str(step.key))
        if overwrites(func):
            call.inputs = {role: tensor.clone() for role, tensor in call.inputs.items()}
        output = func(*self._detached(args), **(self._detached(kwargs) if kwargs else kwargs))
        if not step.layout.fits(output.shape, self.samples):
            raise PlanMismatch(f"{step.key} gives {tuple(output.shape)}")
        use = Use(self, step, call)
        if self.plan.light and step.on_samples and output.requires_grad and not _saving_is_redirected():
            output.grad_fn.register_prehook(use.see)
            return output
        inputs = [tensor.detach() for tensor in use.release().values()]
        in_place = step.rule.owns_output and _is_own(output)
        return Tap.apply(output, self.anchor, use.receive, in_place, *inputs)

    def fold_use(self, step: Step, call: Call, gradient: Tensor) -> None:
        assert step.rule is not None and step.layout is not None
        forms = step.rule.gradients(call, gradient, Samples(self.samples, step.layout))
        for role, form in forms.items():
            self._deliver(self.tracked[id(call.weights[role])], form)

    def _detached(self, value: Any) -> Any:
        if value.__class__ in (tuple, list):
            return value.__class__([self._detached(item) for item in value])
        if value.__class__ is dict:
            return {name: self._detached(item) for name, item in value.items()}
        found = self.tracked.get(id(value))
        if found is None or not found.live:
            return value
        if found.detached is None:
            found.detached = found.tensor.detach()
        return found.detached

    def _is_live(self, tensor: Tensor) -> bool:
        found = self.tracked.get(id(tensor))
        return found is not None and found.live

    def _follow_views(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked], output: Any
    ) -> None:
        """Where a derived weight is a view or a cast of another, its votes are the same view of the tally."""
        source = weights[0]
        if source.votes is None or len(weights) > 1:
            return
        outputs = list(_tensors(output))
        if func in _CASTS:
            views: list[Tensor] = [source.votes]
        elif all(_same_storage(tensor, source.tensor) for tensor in outputs):
            views = list(_tensors(func(*_swapped(args, source), **_swapped(kwargs, source))))
        else:
            return
        for tensor, view in zip(outputs, views):
            if view.shape == tensor.shape and id(tensor) in self.tracked and _same_storage(view, source.votes):
                self.tracked[id(tensor)].votes = view

    def _deliver(self, weight: Tracked, form: Form) -> None:
        if weight.votes is not None:
            self._add(weight.roots[0], form, weight.votes)
            return
        roots = weight.roots
        found = torch.autograd.grad(
            weight.tensor,
            [self.tally.parameters[name] for name in roots],
            densify(form).values.to(weight.tensor.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        for name, gradients in zip(roots, found):
            if gradients is not None:
                self._add(name, Dense(gradients), self.tally[name])
            else:
                self.uses[name] -= 1

    def _add(self, name: str, form: Form, votes: Tensor) -> None:
        if self.uses[name] == 1:
            self._fold(form, votes)
            return
        self.waiting[name].append((form, votes))
        if len(self.waiting[name]) == self.uses[name]:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """All uses of a weight are in: entries used more than once are summed before the sign."""
        uses, self.waiting[name] = self.waiting[name], []
        groups: list[list[tuple[Form, Tensor]]] = []
        for use in uses:
            touching = [group for group in groups if any(_overlap(use[1], votes) for _, votes in group)]
            groups = [group for group in groups if group not in touching]
            groups.append([use, *(member for group in touching for member in group)])
        for group in groups:
            first = group[0][1]
            if all(_geometry(votes) == _geometry(first) for _, votes in group):
                parts = [(form, lambda out: out) for form, _ in group]
                self._fold(combine(parts, first.shape), first)
            else:
                whole = self.tally[name]
                parts = [(form, functools.partial(_region, like=votes)) for form, votes in group]
                self._fold(combine(parts, whole.shape), whole)

    def _fold(self, form: Form, votes: Tensor) -> None:
        if isinstance(form, Dense) and kernels.sees(form.values) and votes.is_contiguous():
            self.small.append((form, votes))
        else:
            form.fold(votes)

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass and fold the votes of all uses."""
        self.replaying = True
        ones = torch.ones_like(losses)
        with self:  # a checkpointed forward that runs again must repeat its taps
            _inside(torch.autograd.backward)(losses, ones, inputs=[self.anchor])
        self._finish()

    def _finish(self) -> None:
        """Fold weights of which some use reached no loss, and all the small ones at once."""
        with torch.no_grad():
            for name, uses in self.waiting.items():
                if uses:
                    self._settle(name)
            if self.small:
                kernels.fold_rows([form.values for form, _ in self.small], [votes for _, votes in self.small])


def _key(func: Any, weights: list[Tracked]) -> Key:
    return func, tuple(weight.roots for weight in weights)


@dataclass(frozen=True)
class Reach:
    """What a backward pass could still reach: named parameters, other leaves, reentrant checkpoints."""

    parameters: frozenset[str]
    others: bool
    hidden: bool


def reach(losses: Tensor, parameters: dict[str, nn.Parameter], anchor: Tensor) -> Reach:
    names = {id(p): name for name, p in parameters.items()}
    found: set[str] = set()
    hidden = others = False
    for node in _nodes(losses):
        if not node.next_functions:
            variable = getattr(node, "variable", anchor)
            if id(variable) in names:
                found.add(names[id(variable)])
            others = others or variable is not anchor
        elif isinstance(node, BackwardCFunction):
            hidden = hidden or "CheckpointFunctionBackward" in node.name()
    return Reach(frozenset(found), others, hidden)


def picked_rows(losses: Tensor) -> set[Any]:
    """Graph nodes behind which rows are picked by an index.

    Two batches of one shape may then differ in whose row is whose, so a flattened layout must be found anew."""
    words = ("Index", "Gather", "Scatter", "MaskedSelect", "Take")
    nodes = list(_nodes(losses))
    parents: dict[Any, list[Any]] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    found: set[Any] = set()
    waiting = [node for node in nodes if any(word in node.name() for word in words)]
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _nodes(losses: Tensor) -> Iterator[Any]:
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(child for child, _ in node.next_functions)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _swapped(value: Any, source: Tracked) -> Any:
    if value is source.tensor:
        return source.votes
    if isinstance(value, dict):
        return {name: _swapped(item, source) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_swapped(item, source) for item in value)
    return value


def _saving_is_redirected() -> bool:
    """Inside activation checkpointing or offloading, only tensors saved through autograd are recomputed or moved."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _may_overwrite(func: Any, output: Tensor) -> bool:
    """Whether the tap may take over the output itself, so that later in-place changes stay legal."""
    return rule_for(func) is not None and _is_own(output)


def _is_own(output: Tensor) -> bool:
    return not output._is_view() and not (output.is_leaf and output.requires_grad)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _geometry(view: Tensor) -> tuple[Any, ...]:
    return view.shape, view.stride(), view.storage_offset()


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, last = _extent(a)
    other_first, other_last = _extent(b)
    return first <= other_last and other_first <= last


def _extent(view: Tensor) -> tuple[int, int]:
    start = view.storage_offset()
    return start, start + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))


def _region(out: Tensor, like: Tensor) -> Tensor:
    return out.as_strided(like.shape, like.stride(), like.storage_offset())


def _is_composite(func: Any) -> bool:
    """Written in Python over other torch functions, with no rule of its own: multi-head attention, say."""
    return isinstance(func, types.FunctionType) and func.__module__ == F.__name__ and rule_for(func) is None


@functools.cache
def _inside(func: types.FunctionType) -> Callable[..., Any]:
    """The same function without its first question whether a mode wants it, so that the mode sees its inside."""
    scope = {**func.__globals__, "has_torch_function": _no, "has_torch_function_unary": _no}
    scope |= {"has_torch_function_variadic": _no}
    bare = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    bare.__kwdefaults__ = func.__kwdefaults__
    return bare


def _no(*_: Any) -> bool:
    return False
