"""The batched engine: the votes of a whole micro-batch for about the price of one backward pass.

One forward and one backward run as usual, except that no weight gradient is computed: each layer's rule turns the
layer's inputs and output gradients into votes during the backward pass, sample by sample, and the per-sample
gradient is never stored. Weights whose use no rule covers are voted on one sample at a time, with a note."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import values_later
from gradfix.errors import DataError
from gradfix.votes.batched.passplan import Key, NeedsLoop, Operation, PassPlan, PlanMismatch, leave_out, resolve
from gradfix.votes.batched.recorded import (
    BatchVote,
    Repeats,
    all_finite,
    drop,
    record_pass,
    repeats_of,
    stays_put,
    watch_pass,
)
from gradfix.votes.batched.sample_rows import (
    Layout,
    OwnedRows,
    RowSums,
    behind,
    digit_base,
    lone_samples,
    picked_rows,
    reach,
    silence,
    speech,
    tags,
)
from gradfix.votes.batched.trace import VotingWatch
from gradfix.votes.batched.watch import PlanningWatch
from gradfix.votes.engines.loop import NotFinite, fold_each, refuse_detached
from gradfix.votes.engines.passes import Batch, Loss, batch_size, losses_of, one_sample, samples, take
from gradfix.votes.tally import SpotCheck, Tally

PLANNING_SAMPLES = 3
LOOP_SHARE = 0.25  # with more of the weights left out, one pass plus a loop costs more than the loop
MIXED = "samples of a batch depend on each other"
HIDDEN = "a reentrant checkpoint hides its operations"
# Of a loss, that rounding explains when the same sample is computed with others.
ALLOWED_CHANGE, ALLOWED_CHANGE_16 = {torch.float64: 1e-6, torch.float32: 1e-3}, 0.1
WATCHED = 9  # passes of a kind: a recording costs two or three of them, and saves a tenth to a half of each

_PLANS: WeakKeyDictionary[nn.Module, dict[Any, PassPlan]] = WeakKeyDictionary()


def batched(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    tally: Tally,
    *,
    record: bool = True,
    expected: Tensor | None = None,
    spot: SpotCheck | None = None,
) -> None:
    """Fold one micro-batch in one forward and one backward.

    A loss that is not finite raises `NotFinite` before anything is folded. Other losses than `expected` mean that samples
    mix, and are looped. The samples of `spot` are counted once more. On a GPU that waits for its host, batches that look the
    same are recorded and played again; `record=False` launches every pass anew."""
    asked = BatchVote(model, loss, batch, tally, batch_size(batch), expected, spot)
    tally.reserve(asked.count)
    try:
        known = repeats_of(asked) if record and asked.count > 1 else None
        if known is None:
            _run(asked)
        else:
            _run_again(known, asked)
    except NotFinite:
        tally.count -= asked.count
        raise


def computed_in(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> torch.dtype:
    """The narrowest dtype that the known plan for this kind of batch computes in."""
    plan = plan_for(model, loss, batch, tally)
    return torch.float32 if plan is None else plan.dtype


def plan_for(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> PassPlan | None:
    """What is known about this kind of batch, if anything."""
    return _known_plan(BatchVote(model, loss, batch, tally, batch_size(batch)))


def prepare(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> None:
    """Make a plan. Counts nothing."""
    with garbage_later():
        plan = _make_plan(BatchVote(model, loss, batch, tally, batch_size(batch)), whole=False)
    if not plan.ragged:
        _refuse_most(plan, tally)


def _run(asked: BatchVote) -> None:
    if asked.count > 1:
        try:
            _run_together(asked)
            return
        except NeedsLoop as reason:
            warnings.warn(f"{reason}; samples are voted on one at a time.", stacklevel=2)
            asked.tally.looped[str(reason)] += asked.count
    with torch.no_grad():
        if not bool(torch.isfinite(asked.losses()).all()):
            raise NotFinite
    fold_each(asked.model, asked.loss, asked.batch, asked.tally)


def _run_together(asked: BatchVote) -> None:
    with garbage_later():
        votes, losses = _forward(asked)
        if not all_finite(losses):
            raise NotFinite
        if asked.expected is not None and differ(losses, asked.expected, votes.plan.dtype):
            votes.forget()
            raise NeedsLoop(MIXED)
        votes.backward(losses)
    _vote_one_by_one(asked, votes.plan.left_out)
    if asked.spot is not None:
        some = take(asked.batch, asked.spot.rows)
        _vote_one_by_one(replace(asked, batch=some, tally=asked.spot.tally), votes.plan.left_out)


def differ(losses: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the same samples have other losses in other company, beyond rounding."""
    allowed = ALLOWED_CHANGE.get(dtype, ALLOWED_CHANGE_16) * (expected.abs() + expected.abs().mean())
    return ((losses.detach().to(expected) - expected).abs() > allowed).any()


def _run_again(known: Repeats, asked: BatchVote) -> None:
    """The pass of a batch like the last one: watched, then recorded, then played."""
    if known.seen < WATCHED or known.reason:
        _run(asked)
        return
    if not stays_put(known, asked):
        drop(asked.model)
        _run(asked)
        return
    if known.recording is None and known.example is not None:
        plan = _known_plan(asked)
        if plan is None or not plan.proven or plan.left_out or plan.ragged:
            known.refuse("some weights are voted on in other ways")
        else:
            record_pass(known, asked, lambda again: _run_proven(plan, again))
    if known.recording is not None:
        known.recording.fold(asked)
    elif known.seen == WATCHED:
        watch_pass(known, asked, _run)
    else:
        _run(asked)


def _run_proven(plan: PassPlan, asked: BatchVote, look: Callable[[Tensor], object] = lambda _: None) -> Tensor:
    """A forward and backward that never waits for the device; gives whether all losses are finite, and lets `look` know in between."""
    with garbage_later():
        votes, losses = _trace(plan, asked)
        finite = torch.isfinite(losses).all()
        look(finite)
        if reach(losses, asked.tally.parameters, votes.anchor).others:
            raise PlanMismatch("weights are used in another place")
        votes.backward(losses)
    return finite


def run_alike(plan: PassPlan, asked: BatchVote, first: BatchVote) -> Callable[[], list[list[Any]]] | None:
    """Fold a batch of the same kind as the first by the plan of that, without waiting; None for another kind.

    Gives a function that waits, and tells whether all losses are finite; only then do the votes mean anything."""
    if asked.count < 2 or _keys(asked)[0] != _keys(first)[0]:
        return None
    asked.tally.reserve(asked.count)
    repeats_of(asked)
    found = list[Callable[[], list[list[Any]]]]()
    _run_proven(plan, asked, lambda finite: found.append(values_later([finite])))
    return found[0]


@contextmanager
def garbage_later() -> Iterator[None]:
    """No cycle collection in the middle of a pass: a device would wait for it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def uncompiled() -> AbstractContextManager[Any]:
    """A compiled model hides its operations; what it was compiled from runs instead."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _forward(asked: BatchVote) -> tuple[VotingWatch, Tensor]:
    """A traced forward under a plan that fits."""
    tally, plan = asked.tally, _known_plan(asked)
    whole = plan is not None and plan.ragged
    if plan is None or whole:
        plan = _make_plan(asked, whole)
        if plan.ragged and not whole:
            plan = _make_plan(asked, whole=True)
    for _ in range(4):
        _refuse_most(plan, tally)
        hooks = plan.proven or plan.hoped
        try:
            votes, losses = _trace(plan, asked, hooks)
        except PlanMismatch:
            plan = _make_plan(asked, whole=True)
            continue
        seen = reach(losses, tally.parameters, votes.anchor)
        if seen.hidden and not plan.proven:
            raise NeedsLoop(HIDDEN)
        if hooks and not seen.others:
            plan.proven = True
            return votes, losses
        if plan.proven:  # what was silent before speaks now, or weights are used in another place
            plan = _make_plan(asked, whole=True)
            continue
        if hooks:  # a hook is only sure to be called where all gradients go the same way
            plan.without_hooks()
            continue
        if seen.parameters <= plan.left_out:
            return votes, losses
        plan.left_out |= seen.parameters
        plan.steps = leave_out(plan.steps, plan.left_out)
        _note(plan.left_out)
    raise NeedsLoop("the model does not repeat its operations")


def _refuse_most(plan: PassPlan, tally: Tally) -> None:
    if plan.left_out and _share(plan.left_out, tally) > LOOP_SHARE:
        raise NeedsLoop("most weights are used in ways the batched engine has no rule for")


def _trace(plan: PassPlan, asked: BatchVote, hooks: bool = True) -> tuple[VotingWatch, Tensor]:
    votes = VotingWatch(plan, asked, hooks)
    with uncompiled(), votes.watching(asked.model), torch.enable_grad():
        losses = asked.losses()
    if votes.position != len(plan.steps):
        raise PlanMismatch("fewer operations than planned")
    return votes, losses


def _make_plan(asked: BatchVote, whole: bool) -> PassPlan:
    """Find out, from a few samples, where each weight meets the samples and how they lie."""
    small = asked.batch if whole else take(asked.batch, slice(0, PLANNING_SAMPLES))
    few = replace(asked, batch=small, count=batch_size(small))
    count, parameters = few.count, asked.tally.parameters
    watch = PlanningWatch(parameters, small, count, asked.tally.device)
    with uncompiled(), watch, torch.enable_grad():
        losses = few.losses()
    if losses.shape != (count,):
        raise DataError(
            f"loss(model, batch) must return one loss per sample, shape ({count},); got {tuple(losses.shape)}."
        )
    if not bool(torch.isfinite(losses).all()):
        raise NotFinite
    refuse_detached(losses)
    if reach(losses, parameters, watch.anchor).hidden:
        raise NeedsLoop(HIDDEN)
    picked, nodes = picked_rows(losses, watch.in_place), behind(losses)
    for operation in watch.operations:
        operation.reached = operation.node is None or operation.node in nodes
        operation.picked = operation.node in picked
    _see_rows(watch, losses, owned=whole and bool(picked))
    hooked = {name for name, p in parameters.items() if p._backward_hooks}
    plan = resolve(watch.operations, count, hooked, _Scaling(few, watch, certain=asked.count != count))
    plan.dtype = min(watch.computed | {plan.dtype}, key=lambda dtype: dtype.itemsize)
    watch.forget()
    if plan.left_out and (whole or not plan.ragged):
        _note(plan.left_out)
    keep_plan(asked, plan)
    return plan


def keep_plan(asked: BatchVote, plan: PassPlan) -> None:
    """For batches of this kind."""
    plans = _PLANS.setdefault(asked.model, {})
    for key in _keys(asked)[: 1 if plan.flat else 2]:
        plans[key] = plan


class _Scaling:
    """Whether an operation's rows grow with the samples: asked of a pass with one sample less, once it is needed.

    `certain` where the pass to come has another number of samples, and does not fit by chance either."""

    def __init__(self, few: BatchVote, watch: PlanningWatch, certain: bool) -> None:
        self.few, self.watch, self.certain = few, watch, certain
        self.shapes: dict[tuple[Key, int], torch.Size] | None = None

    def __call__(self, number: int, layout: Layout) -> bool:
        if isinstance(layout, OwnedRows):  # a row of a weight that one sample asks for is still the weight's
            return False
        if self.certain:
            return True
        if self.shapes is None:
            less = take(self.few.batch, slice(0, self.few.count - 1))
            again = PlanningWatch(self.watch.parameters, less, self.few.count - 1, self.few.tally.device)
            with uncompiled(), again, torch.enable_grad():
                losses_of(self.few.model, self.few.loss, less)
            self.shapes = dict(again.shapes())
            again.forget()
        name = self.watch.shapes()[number][0]
        shape = self.shapes.get(name)
        return shape is not None and layout.fits(shape, self.few.count - 1)


def _see_rows(watch: PlanningWatch, losses: Tensor, owned: bool) -> None:
    """Backward passes without weights that show whose rows are whose: by single samples, or (`owned`) by scaled losses."""
    count, turns = watch.samples, list[tuple[Tensor, Callable[[Operation, Tensor], None]]]()
    if owned:
        scales = losses.new_tensor(tags(count, digit_base(watch.dtypes()))).exp2()
        turns = [(scale, lambda operation, gradient: operation.sums.append(RowSums(gradient))) for scale in scales]
    else:
        for group in lone_samples(count):
            only = torch.zeros_like(losses)
            only[group] = 1
            turns.append((only, partial(_keep_silence, group, count)))
    for scale, look in turns:
        watch.look = look
        torch.autograd.grad(losses, [watch.anchor], scale, retain_graph=True, allow_unused=True)
    spoke = iter(speech([along for operation in watch.operations for _, along in operation.seen]))
    for operation in watch.operations:
        operation.seen = [(group, next(spoke)) for group, _ in operation.seen]


def _keep_silence(group: Sequence[int], samples: int, operation: Operation, gradient: Tensor) -> None:
    operation.seen.append((group, silence(gradient, samples)))


def _known_plan(asked: BatchVote) -> PassPlan | None:
    plans = _PLANS.get(asked.model, {})
    return next((plans[key] for key in _keys(asked) if key in plans), None)


def _keys(asked: BatchVote) -> list[Any]:
    """Plans are kept for the exact shapes and, where lengths do not matter, for any length."""
    code = getattr(asked.loss, "__code__", None) or type(asked.loss)
    parameters = asked.tally.parameters
    dtypes = frozenset(parameter.dtype for parameter in parameters.values())
    shared = (code, torch.is_autocast_enabled(), dtypes, tuple(parameters))
    leaves = asked.tensors()
    exact = (*shared, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))
    return [exact, (*shared, tuple((leaf.ndim, leaf.dtype) for leaf in leaves))]


def _vote_one_by_one(asked: BatchVote, names: set[str]) -> None:
    tally = asked.tally
    chosen = [(name, tally.parameters[name]) for name in sorted(names)]
    tally.apart |= names
    for sample in samples(asked.batch) if chosen else ():
        with one_sample(asked.model):
            with torch.enable_grad():
                value = losses_of(asked.model, asked.loss, sample).sum()
            gradients = torch.autograd.grad(value, [p for _, p in chosen], allow_unused=True)
        for (name, _), gradient in zip(chosen, gradients):
            if gradient is not None:
                tally[name].sub_(gradient.sign().to(tally[name].dtype))


def _share(names: set[str], tally: Tally) -> float:
    total = sum(p.numel() for p in tally.parameters.values())
    return sum(tally.parameters[name].numel() for name in names) / max(total, 1)


def _note(names: set[str]) -> None:
    warnings.warn(
        f"no vote rule covers {len(names)} tensors, first {min(names)!r}; they are voted on one sample at a time.",
        stacklevel=2,
    )
