"""Run a plan: votes are folded during one ordinary forward and backward.

A weight's use is run with the weight detached, so autograd computes no weight gradient, and a tap behind it (or a hook,
once the plan is proven) hands the output gradient to the use's vote rule. Whatever the mode cannot see still reaches
the weight through autograd, where `sample_rows.reach` finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradfix.votes.batched import kernels
from gradfix.votes.batched.forms import Dense, Form, densify, overlaps_itself, settle
from gradfix.votes.batched.layers import Call, Samples
from gradfix.votes.batched.passplan import (
    CallPlaces,
    Key,
    NeedsLoop,
    PassPlan,
    PlanMismatch,
    Step,
    note_places,
    read_call,
)
from gradfix.votes.batched.recorded import BatchVote
from gradfix.votes.batched.replay import aligned, overwrites, pulled_back, run
from gradfix.votes.batched.sample_rows import lasting_node
from gradfix.votes.batched.watch import (
    Spread,
    Tap,
    Tracked,
    Watch,
    around_forward,
    inside,
    is_own,
    key_of,
    made_by,
    opened_up,
    refuse_inner,
    same_storage,
    tensors_in,
)

Given = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function and its arguments
_PLACED = {torch.as_strided, Tensor.as_strided}  # in a weight's memory, which is not laid out as the tally's
_CASTS = {getattr(Tensor, name) for name in ["to", "float", "half", "bfloat16", "double", "type_as", "contiguous"]}


class Use:
    """One use of weights, from its call in the forward pass to its output gradient in the backward pass."""

    __slots__ = ("call", "inputs", "shape", "step", "versions", "votes")

    def __init__(self, votes: VotingWatch, step: Step, call: Call) -> None:
        self.votes, self.step, self.call = votes, step, call
        self.inputs: dict[str, Tensor] | None = call.inputs
        self.shape: Sequence[int] = ()
        self.versions = [tensor._version for tensor in call.inputs.values()]

    def release(self) -> dict[str, Tensor]:
        """Hand the inputs over, so that they live no longer than the tap that saves them."""
        inputs = self.call.inputs
        self.inputs, self.call.inputs = None, dict.fromkeys(inputs)  # type: ignore[assignment]
        return inputs

    def receive(self, saved: Sequence[Tensor], gradient: Tensor) -> None:
        if self.votes.replaying:
            call = self.call.keep(dict(zip(self.call.inputs, saved)))
            self.votes.fold_use(self.step, call, gradient)

    def see(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The same from a hook on the operation itself."""
        if not self.votes.replaying:  # an inner torch.autograd.grad of the loss itself
            return
        inputs, self.inputs, self.call.inputs = self.inputs, None, {}
        if gradients[0] is None or inputs is None:
            return
        with torch._C.DisableTorchFunction():
            if [tensor._version for tensor in inputs.values()] != self.versions:
                raise RuntimeError(f"an input of {self.step.key[0]} was modified in place after it was used.")
            gradient = gradients[0] if gradients[0].shape == self.shape else gradients[0].reshape(self.shape)
            self.votes.fold_use(self.step, self.call.keep(inputs), gradient)


class VotingWatch(Watch):
    """Run a plan: every use of a weight is tapped, and its votes are folded during the backward pass."""

    def __init__(self, plan: PassPlan, asked: BatchVote, hooks: bool) -> None:
        tally = asked.tally
        super().__init__(tally.parameters, tally.device)
        self.plan, self.tally, self.samples, self.spot = plan, tally, asked.count, asked.spot
        self.hooks = hooks  # on operations, which cost less than taps behind them
        self.position, self.replaying = 0, False
        self.recomputes = False  # activations of some use are not kept, and its forward may run again
        self.uses, self.derives = plan.uses(), plan.derives
        self.waiting: dict[str, list[tuple[Form, Tensor]]] = {name: [] for name in self.uses}
        self.small: list[tuple[Dense, Tensor]] = []
        self.within: list[nn.Module | None] = [None]  # modules that run, the innermost last
        self.rooms: dict[nn.Module | None, None] = {}
        for name, parameter in tally.parameters.items():
            self.tracked[id(parameter)].votes = tally[name]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every torch call of the forward pass comes through here, so the way out for those without a weight is short.
        kwargs = {} if kwargs is None else kwargs
        refuse_inner(func)
        if not self._may_hold_weights(args) and not (kwargs and self._may_hold_weights(kwargs.values())):
            return func(*args, **kwargs)
        places = self.plan.places.get(self.position)
        if places is not None and places.function is func and not self.replaying and torch.is_grad_enabled():
            output = self._by_places(places, func, args, kwargs)
            if output is not None:
                return output
        weights = self.weights_in(func, args, kwargs)
        if not weights or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        key = key_of(func, weights)
        step = self._next(key)
        if step is None and (opened := opened_up(func, args, kwargs)) is not None:
            with self:
                return opened()
        if step is None or step.role != "vote":
            output = func(*args, **kwargs)
            if step is None and any(tensor.requires_grad for tensor in tensors_in(output)):
                raise PlanMismatch(f"{getattr(func, '__name__', func)} on {key[1]}")
        else:
            output = self._tapped(step, func, args, kwargs)
        if step is not None and not step.on_samples:
            self.follow(step, (func, args, kwargs), weights, output)
        return output

    def follow(self, step: Step, given: Given, weights: list[Tracked], output: Any) -> None:
        """What an operation on weights alone gives is a weight, too."""
        made = made_by(*given[:2], output)
        if made is not output and any(weight.uses for weight in weights if weight.tensor is made):
            raise NeedsLoop("a weight is changed after it was used")
        self.track(made, weights, None, step.role == "derive")
        self._follow_views(*given, weights, output)
        if step.role == "derive" and _saving_is_redirected():
            self._refuse_recomputed(made)

    def _may_hold_weights(self, values: Iterable[Any]) -> bool:
        tracked = self.tracked
        for value in values:
            if id(value) in tracked:
                return True
            kind = value.__class__
            if ((kind is tuple or kind is list) and value and value[0].__class__ is not int) or kind is dict:
                return True
        return False

    def _by_places(self, places: CallPlaces, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if len(args) != places.positional or len(kwargs) != len(places.names) or _saving_is_redirected():
            return None
        values = [*args, *kwargs.values()]
        call = places.read(values, self.tracked) if not kwargs or tuple(kwargs) == places.names else None
        if call is None:
            return None
        step = self._advance()
        named = dict(zip(places.names, values[len(args) :])) if kwargs else {}
        output = func(*values[: len(args)], **named)
        return self._watched(step, call, output, redirected=False)

    def _next(self, key: Key) -> Step | None:
        if self.replaying:
            return next((step for step in self.plan.steps if step.key == key), None)
        if self.position < len(self.plan.steps) and self.plan.steps[self.position].key == key:
            return self._advance()
        return None

    def _advance(self) -> Step:
        self.rooms[self.within[-1]] = None
        self.position += 1
        return self.plan.steps[self.position - 1]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the whole pass; once it is known where weights are used, only there."""
        rooms = [found for room in self.plan.rooms or () if (found := room()) is not None]
        unknown = self.hooks and self.plan.rooms is None
        users = [module for module in model.modules() if module._parameters or module._modules] if unknown else ()
        noting = around_forward(users, self._noted)
        with self.only_inside(rooms) if rooms else self, noting:
            yield
        if unknown:
            elsewhere = None in self.rooms or self.recomputes
            self.plan.rooms = () if elsewhere else [ref(room) for room in self.rooms if room is not None]

    def _noted(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.within.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self.within.pop()

        return run

    def _tapped(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        assert step.rule is not None
        call = read_call(step.rule, func, args, kwargs, self._is_live)
        if call is None:
            raise PlanMismatch(str(step.key))
        call.options["shared"] = step.shared
        if step.rule.spreads:
            return self._spread(step, call, func)
        if overwrites(func):
            call.inputs = {role: tensor.clone() for role, tensor in call.inputs.items()}
        elif self.hooks and step.on_samples and not self.replaying:
            places = note_places(func, args, kwargs, call, self.tracked)
            if places is not None:
                self.plan.places[self.position - 1] = places
        output = func(*self._detached(args), **(self._detached(kwargs) if kwargs else {}))
        return self._watched(step, call, output, _saving_is_redirected())

    def _spread(self, step: Step, call: Call, func: Any) -> Tensor:
        """Run an operation with a weight per sample; its own backward gives their gradients."""
        inputs, call.inputs = call.inputs, {}
        use = self._use(step, call)
        ((place, weight),) = call.weights.items()
        data = inputs["0"]
        shape = (self.samples, *aligned(weight, data.ndim).shape[1:])
        own = Spread.apply(self.tracked[id(weight)].without_grad(), self.anchor, use.receive, shape)
        if not data.requires_grad:
            # Fused kernels keep what the weight's gradient needs only where the data asks for one, too.
            inputs["0"] = Tap.apply(data, self.anchor, _ignore, False)
        self.recomputes = self.recomputes or _saving_is_redirected()
        return run(call, func, {place: own}, inputs)

    def _use(self, step: Step, call: Call) -> Use:
        if self.derives and not self.replaying:
            for weight in call.weights.values():
                self.tracked[id(weight)].uses += 1
        return Use(self, step, call)

    def _watched(self, step: Step, call: Call, output: Tensor, redirected: bool) -> Tensor:
        """The output, once its gradient is sure to reach the use's rule."""
        assert step.rule is not None and step.layout is not None
        if not step.layout.fits(output.shape, self.samples):
            raise PlanMismatch(f"{step.key} gives {tuple(output.shape)}")
        use = self._use(step, call)
        self.recomputes = self.recomputes or redirected
        if self.hooks and step.on_samples and output.requires_grad and not redirected:
            node = lasting_node(output)
            if node is not None:
                use.shape = output.shape
                node.register_prehook(use.see)
                return output
        inputs = [tensor.detach() for tensor in use.release().values()]
        return Tap.apply(output, self.anchor, use.receive, step.rule.owns_output and is_own(output), *inputs)

    def fold_use(self, step: Step, call: Call, gradient: Tensor) -> None:
        assert step.rule is not None and step.layout is not None
        forms = step.rule.gradients(call, gradient, Samples(self.samples, step.layout))
        for role, form in forms.items():
            self._deliver(self.tracked[id(call.weights[role])], form)

    def _detached(self, value: Any) -> Any:
        found = self.tracked.get(id(value))
        if found is None:
            if value.__class__ is tuple or value.__class__ is list:
                return value.__class__([self._detached(item) for item in value])
            if value.__class__ is dict:
                return {name: self._detached(item) for name, item in value.items()}
            return value
        if not found.live:
            return value
        return found.without_grad()

    def _is_live(self, tensor: Tensor) -> bool:
        return (found := self.tracked.get(id(tensor))) is not None and found.live

    def _follow_views(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked], output: Any
    ) -> None:
        """Where a derived weight is a view or a cast of another, its votes are the same view of the tally."""
        source = weights[0]
        if source.votes is None or len(weights) > 1 or func in _PLACED:
            return
        outputs = list(tensors_in(output))
        if func in _CASTS:
            views: list[Tensor] = [source.votes]
        elif all(same_storage(tensor, source.tensor) for tensor in outputs):
            try:
                views = list(tensors_in(func(*_swapped(args, source), **_swapped(kwargs, source))))
            except RuntimeError:  # a view that the weight's strides allow, and the tally's do not
                return
            if any(overlaps_itself(view) for view in views):
                return
        else:
            return
        for tensor, view in zip(outputs, views):
            if view.shape == tensor.shape and id(tensor) in self.tracked and same_storage(view, source.votes):
                self.tracked[id(tensor)].votes = view

    def _refuse_recomputed(self, output: Any) -> None:
        """Gradients cannot be sent back through a weight that a checkpoint makes again, unless it is a view."""
        made = [self.tracked[id(tensor)] for tensor in tensors_in(output) if id(tensor) in self.tracked]
        if any(weight.votes is None for weight in made):
            raise NeedsLoop("a weight is made of others inside a checkpoint")

    def _deliver(self, weight: Tracked, form: Form) -> None:
        if weight.votes is not None:
            self._add(weight.roots[0], form, weight.votes)
            return
        values = densify(form).values
        if weight.gradients is None:
            weight.gradients = values.to(torch.promote_types(values.dtype, torch.float32))
        else:
            weight.gradients += values
            self.uses.subtract(weight.roots)
        weight.uses -= 1
        if weight.uses == 0:
            self._send_back(weight)

    def _send_back(self, weight: Tracked) -> None:
        """From a derived weight's gradients to those of the parameters it was made of."""
        assert weight.gradients is not None
        gradients, weight.gradients = weight.gradients.to(weight.tensor.dtype), None
        parameters = [self.tally.parameters[name] for name in weight.roots]
        for name, found in zip(weight.roots, pulled_back(weight.tensor, parameters, gradients)):
            if found is not None:
                self._add(name, Dense(found), self.tally[name])
            else:
                self.uses[name] -= 1

    def _add(self, name: str, form: Form, votes: Tensor) -> None:
        if self.uses[name] == 1:
            self._fold(name, form, votes)
            return
        self.waiting[name].append((form, votes))
        if len(self.waiting[name]) == self.uses[name]:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """All uses of a weight are in."""
        uses, self.waiting[name] = self.waiting[name], []
        for form, votes in settle(uses, self.tally[name]):
            self._fold(name, form, votes)

    def _fold(self, name: str, form: Form, votes: Tensor) -> None:
        if self.spot is not None:
            self._count(form.only(self.spot.rows), self.spot.view(votes, name, self.tally[name]))
        self._count(form, votes)

    def _count(self, form: Form, votes: Tensor) -> None:
        if isinstance(form, Dense) and kernels.sees(form.values) and votes.is_contiguous():
            self.small.append((form, votes))
        else:
            form.fold(votes)

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass and fold the votes of all uses."""
        self.replaying = True
        scales = self.scales(losses)
        with self if self.recomputes else nullcontext():  # a forward that runs again must repeat its taps
            inside(torch.autograd.backward)(losses, scales, inputs=[self.anchor])
        self._finish()
        self.forget()

    def scales(self, losses: Tensor) -> Tensor:
        return torch.ones_like(losses)

    def _finish(self) -> None:
        """Fold weights of which some use reached no loss, and all the small ones at once."""
        for weight in self.tracked.values():
            if weight.gradients is not None:
                self._send_back(weight)
        with torch.no_grad():
            for name, uses in self.waiting.items():
                if uses:
                    self._settle(name)
            if self.small:
                kernels.fold_rows([form.values for form, _ in self.small], [votes for _, votes in self.small])


def _ignore(_: Sequence[Tensor], gradient: Tensor) -> None:
    """A tap that is there for its gradient to be asked for, not seen."""


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
