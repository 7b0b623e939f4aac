"""What the batched engine has found out about a model: which operation votes for which weight, and how.

A plan is made once per model and kind of batch, from a few samples, and holds for every later batch whose
operations come in the same order; an operation that does not match raises `PlanMismatch` and a new plan is made.
A batched pass is launched call by call, and on a fast device the launching is what takes time: so a proven plan keeps,
for each operation, where its tensors stand among the arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradfix.votes.batched import experts, norms  # noqa: F401  their rules
from gradfix.votes.batched.layers import Call, Rule, Samples, rule_for
from gradfix.votes.batched.replay import COPIES, LOCAL, REPEAT, Local, out_of_place
from gradfix.votes.batched.sample_rows import (
    Along,
    Layout,
    RowSums,
    candidates,
    digit_base,
    explain,
    explain_owned,
    owners,
    speaks,
)

_PLAIN = (int, float, bool, str, type(None))

Key = tuple[Callable[..., Any], tuple[tuple[str, ...], ...]]


class PlanMismatch(Exception):
    """The model did not repeat the operations its plan was made from."""


class NeedsLoop(Exception):
    """The model or its loss does what one pass for all samples cannot: it runs backward passes of its own."""


@dataclass
class Operation:
    """One operation on a weight, as seen while planning."""

    key: Key
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[tuple[Tensor, frozenset[str], int | None]]  # tensor, root names, operation that made it
    on_samples: bool
    output: Tensor | None = None
    node: Any = None
    reached: bool = True  # by the loss of some sample
    picked: bool = False  # behind rows that were picked by an index, whose owners another batch may change
    seen: list[tuple[Sequence[int], Along]] = field(default_factory=list)
    beside: list[Operation] = field(default_factory=list)  # those on the same input
    sums: list[RowSums] = field(default_factory=list)
    base: int = 0  # of the digits that tell samples apart in `sums`


@dataclass(frozen=True)
class Step:
    """What to do when the operation comes again: `vote` by a rule, `derive` a weight, or `pass` it on."""

    key: Key
    role: str
    rule: Rule | None = None
    layout: Layout | None = None
    roots: frozenset[str] = frozenset()
    on_samples: bool = True
    shared: frozenset[str] = frozenset()  # inputs of a replayed operation that are the same for all samples
    votes: tuple[str, ...] = ()  # roots, once for every weight of the call


@dataclass(frozen=True)
class Trust:
    """A plan whose votes were compared with the loop's: under which loss, and what a sample takes of the memory."""

    loss: Callable[[], Any]  # gives the loss, if it is still there
    bytes_per_sample: float


@dataclass
class PassPlan:
    steps: list[Step]
    left_out: set[str]
    ragged: bool = False
    proven: bool = False  # a run has shown that autograd reaches no weight past the votes, so hooks are enough
    hoped: bool = False  # that it will be
    places: dict[int, CallPlaces] = field(default_factory=dict)  # by the number of the step
    dtype: torch.dtype = torch.float32  # the narrowest that gradients come about in
    silent: bool = False  # some operations reach no loss: heads that are not asked
    rooms: Sequence[ref[nn.Module]] | None = None  # modules in which all steps come; empty where some come elsewhere
    trust: Trust | None = None

    @property
    def flat(self) -> bool:
        """Whether some layout depends on the sequence length, so that the plan holds for one length only."""
        return any(step.layout is not None and step.layout.rows > 1 for step in self.steps)

    def without_hooks(self) -> None:
        self.hoped, self.rooms = False, None
        self.places.clear()

    @property
    def derives(self) -> bool:
        """Whether some weight is made of others before it meets a sample."""
        return any(step.role == "derive" for step in self.steps)

    def uses(self) -> Counter[str]:
        return Counter(name for step in self.steps if step.role == "vote" for name in step.votes)


Scales = Callable[[int, Layout], bool]


def resolve(operations: Sequence[Operation], samples: int, extra: set[str], scales: Scales) -> PassPlan:
    """Decide, in the order of the calls, where each weight meets the samples.

    `scales` tells, of an operation on weights alone, whether its rows are as many as there are samples by more than chance."""
    steps: list[Step] = []
    left_out = set(extra)
    kinds = {o.output.dtype for o in operations if o.output is not None and o.output.is_floating_point()}
    by_input: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.args and isinstance(operation.args[0], Tensor):
            operation.beside = by_input.setdefault(id(operation.args[0]), [])
            operation.beside.append(operation)
    for number, operation in enumerate(operations):
        live = [w for w in operation.weights if w[2] is None or steps[w[2]].role == "derive"]
        roots = frozenset().union(*(names for _, names, _ in live))
        step = Step(operation.key, "pass", roots=roots, on_samples=operation.on_samples)
        if live and operation.reached:
            operation.base = digit_base(kinds)
            found = _voting_step(operation, {id(tensor) for tensor, _, _ in live}, roots, samples)
            copied = any(w[2] is not None and steps[w[2]].role == "vote" for w in operation.weights)
            if found is not None and (found.on_samples or copied or _copies(found, operation, number, scales)):
                step = found
            elif not operation.on_samples:
                step = Step(operation.key, "derive", roots=roots, on_samples=False)
            else:
                left_out |= roots
        steps.append(step)
    narrowest = min(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
    silent = any(not operation.reached for operation in operations)
    ragged = any(o.picked and step.role != "derive" for o, step in zip(operations, steps) if o.reached and step.roots)
    steps = leave_out(steps, left_out)
    return PassPlan(steps, left_out, ragged, hoped=not left_out, dtype=narrowest, silent=silent)


def _copies(step: Step, operation: Operation, number: int, scales: Scales) -> bool:
    """Whether an operation on weights alone makes a row for every sample."""
    assert step.layout is not None
    return (step.rule is REPEAT and operation.key[0] in COPIES) or scales(number, step.layout)


def leave_out(steps: list[Step], left_out: set[str]) -> list[Step]:
    """Stop voting for some weights, and for those that share an operation with them."""
    while True:
        shared = [step for step in steps if step.role == "vote" and step.roots & left_out]
        if not shared:
            return steps
        for step in shared:
            left_out |= step.roots
        steps = [replace(s, role="pass") if s in shared else s for s in steps]


def _voting_step(operation: Operation, live: set[int], roots: frozenset[str], samples: int) -> Step | None:
    function, output = operation.key[0], operation.output
    if output is None or any(tensor.is_sparse for tensor, _, _ in operation.weights):
        return None
    for rule in (rule_for(function), LOCAL if operation.on_samples else REPEAT):
        if rule is None:
            continue
        call = read_call(rule, function, operation.args, operation.kwargs, lambda t: id(t) in live)
        if call is None or not call.weights:
            continue
        layout = _layout(operation, rule, call, samples)
        if layout is None:
            continue
        if isinstance(rule, Local) and not rule.agrees(call, output, Samples(samples, layout)):
            continue
        shared = rule.shared(call, Samples(samples, layout)) if isinstance(rule, Local) else frozenset()
        named = tuple(n for tensor, names, _ in operation.weights if id(tensor) in live for n in names)
        return Step(operation.key, "vote", rule, layout, roots, operation.on_samples, shared, named)
    return None


def _layout(operation: Operation, rule: Rule, call: Call, samples: int) -> Layout | None:
    """Where the samples lie in an operation's output, if that is clear and the rule can do with it."""
    assert operation.output is not None
    shape, seen = operation.output.shape, operation.seen
    allowed = [c for c in candidates(shape, samples) if rule.allows(call, c, shape)]
    if not operation.sums:
        if not any(speaks(along) for _, along in seen):  # attention over one token asks queries and keys for nothing
            seen = next((other.seen for other in operation.beside if _alike(other, shape)), seen)
        return explain(allowed, samples, seen)
    found = owners(operation.sums, samples, operation.base)
    return explain_owned(
        allowed, samples, found, lambda layout: rule is not REPEAT and rule.allows(call, layout, shape)
    )


def _alike(other: Operation, shape: torch.Size) -> bool:
    """Whether the rows of another operation's output lie as those of an output of this shape."""
    output = other.output
    return output is not None and output.shape[:-1] == shape[:-1] and any(speaks(along) for _, along in other.seen)


def read_call(
    rule: Rule,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_weight: Callable[[Tensor], bool],
) -> Call | None:
    call = rule.read(args, kwargs, is_weight)
    if call is not None:
        call.options["function"] = out_of_place(function)
        rule.prepare(call, function)
    return call


@dataclass(frozen=True, slots=True)
class CallPlaces:
    """How to read an operation again without asking its rule. Places count the positional arguments first, then the named ones in the order they are given."""

    function: Callable[..., Any]
    positional: int
    names: tuple[str, ...]
    weights: tuple[tuple[str, int, tuple[str, ...], Any], ...]  # role, place, names of the parameters, shape
    inputs: tuple[tuple[str, int, int], ...]  # role, place, dimensions
    rest: tuple[tuple[int, Any], ...]  # values that must be the same again
    options: dict[str, Any]

    def read(self, values: list[Any], tracked: Mapping[int, Any]) -> Call | None:
        """The call's parts, its weights detached among `values`; None unless all stands where it stood."""
        for place, value in self.rest:
            again = values[place]
            if again is not value and (again.__class__ is not value.__class__ or again != value):
                return None
        inputs = {}
        for role, place, dimensions in self.inputs:
            tensor = values[place]
            if not isinstance(tensor, Tensor) or tensor.ndim != dimensions or id(tensor) in tracked:
                return None
            inputs[role] = tensor
        weights = {}
        for role, place, roots, shape in self.weights:
            found = tracked.get(id(values[place]))
            if found is None or not found.live or found.roots != roots or found.tensor.shape != shape:
                return None
            weights[role] = found.tensor
            values[place] = found.without_grad()
        return Call(weights, inputs, self.options)


def note_places(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], call: Call, tracked: Mapping[int, Any]
) -> CallPlaces | None:
    """Where the tensors of this call stand, if its tensors are arguments themselves and the other arguments plain values."""
    values = [*args, *kwargs.values()]
    places = {id(value): place for place, value in enumerate(values)}
    if len(places) < len(values) and any(
        places[id(value)] != place for place, value in enumerate(values) if isinstance(value, Tensor)
    ):
        return None
    tensors = [*call.weights.values(), *call.inputs.values()]
    used = {places.get(id(tensor)) for tensor in tensors}
    rest = [(place, value) for place, value in enumerate(values) if place not in used]
    if None in used or len(used) < len(tensors) or not all(_is_plain(value) for _, value in rest):
        return None
    return CallPlaces(
        function,
        len(args),
        tuple(kwargs),
        tuple((role, places[id(t)], tracked[id(t)].roots, t.shape) for role, t in call.weights.items()),
        tuple((role, places[id(tensor)], tensor.ndim) for role, tensor in call.inputs.items()),
        tuple(rest),
        call.options,
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)
