"""The batched engine: the votes of a whole micro-batch for about the price of one backward pass.

One forward and one backward run as usual, except that no weight gradient is computed: each layer's rule turns the
layer's inputs and output gradients into votes during the backward pass, sample by sample, and the per-sample
gradient is never stored. Weights whose use no rule covers are voted on one sample at a time, with a note."""

from __future__ import annotations

import functools
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradfix.errors import DataError, UnsafeResult
from gradfix.votes.batched.graph import picked_rows, reach
from gradfix.votes.batched.plan import NeedsLoop, Plan, PlanMismatch, leave_out, resolve
from gradfix.votes.batched.recorded import (
    Repeats,
    all_finite,
    record_pass,
    repeats_of,
    tensors_of,
    watch_pass,
)
from gradfix.votes.batched.rows import probes, proofs
from gradfix.votes.batched.trace import Votes
from gradfix.votes.batched.watch import Probe
from gradfix.votes.engines.loop import (
    Batch,
    Loss,
    NotFinite,
    batch_size,
    fold_each,
    refuse_detached,
    samples,
    take,
)
from gradfix.votes.tally import Tally

PLANNING_SAMPLES = 3
LOOP_SHARE = 0.25  # with more of the weights left out, one pass plus a loop costs more than the loop
WATCHED = 2  # the first pass of a kind makes a plan and compiles kernels; the second is like all later ones

_PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def batched(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, *, record: bool = True) -> None:
    """Fold one micro-batch in one forward and one backward.

    A loss that is not finite raises `NotFinite` before anything is folded. On a GPU that waits for its host, batches
    that look the same are recorded and played again; `record=False` launches every pass anew."""
    count = batch_size(batch)
    tally.reserve(count)
    try:
        known = repeats_of(model, loss, batch, tally) if record and count > 1 else None
        if known is None:
            _run(model, loss, batch, tally, count)
        else:
            _run_again(known, model, loss, batch, tally, count)
    except NotFinite:
        tally.count -= count
        raise


def _run(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, count: int) -> None:
    votes, losses = None, None
    with _garbage_later():
        if count > 1:
            votes, losses = _forward_or_none(model, loss, batch, tally, count)
        if votes is not None and losses is not None:
            if not all_finite(losses):
                raise NotFinite
            votes.backward(losses)
    if votes is None or losses is None:
        _check_losses(model, loss, batch)
        fold_each(model, loss, batch, tally)
        return
    _check_reach(votes, losses, tally)
    _vote_one_by_one(model, loss, batch, tally, votes.plan.left_out)


def _run_again(known: Repeats, model: nn.Module, loss: Loss, batch: Batch, tally: Tally, count: int) -> None:
    """The pass of a batch like the last one: watched, then recorded, then played."""
    if known.recording is None and known.example is not None:
        plan = _known_plan(model, loss, batch, tally)
        if plan is None or not plan.light or plan.left_out or plan.ragged:
            known.refuse("some weights are voted on in other ways")
        else:
            record_pass(known, tally, count, functools.partial(_pass, plan, model, loss, count))
    if known.recording is not None:
        known.recording.fold(tensors_of(batch), tally)
    elif known.seen == WATCHED and not known.reason:
        watch_pass(known, batch, tally, count, lambda trial: _run(model, loss, batch, trial, count))
    else:
        _run(model, loss, batch, tally, count)


def _pass(plan: Plan, model: nn.Module, loss: Loss, count: int, batch: Batch, tally: Tally) -> Tensor:
    """A forward and backward that never waits for the device; gives whether all losses are finite."""
    with _garbage_later():
        votes, losses = _trace(plan, model, loss, batch, tally, count)
        finite = torch.isfinite(losses).all()
        votes.backward(losses)
    _check_reach(votes, losses, tally)
    return finite


def _check_reach(votes: Votes, losses: Tensor, tally: Tally) -> None:
    if votes.plan.light and reach(losses, tally.parameters, votes.anchor).others:
        raise UnsafeResult(
            'a batch used weights in a way earlier ones did not; vote again with engine="loop".'
        )


def _check_losses(model: nn.Module, loss: Loss, batch: Batch) -> None:
    with torch.no_grad():
        if not bool(torch.isfinite(loss(model, batch)).all()):
            raise NotFinite


@contextmanager
def _garbage_later() -> Iterator[None]:
    """No cycle collection in the middle of a pass: a device would wait for it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _uncompiled() -> AbstractContextManager[Any]:
    """A compiled model hides its operations; what it was compiled from runs instead."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _forward_or_none(
    model: nn.Module, loss: Loss, batch: Batch, tally: Tally, count: int
) -> tuple[Votes | None, Tensor | None]:
    try:
        return _forward(model, loss, batch, tally, count)
    except NeedsLoop as reason:
        warnings.warn(f"{reason}; samples are voted on one at a time.", stacklevel=2)
        return None, None


def _forward(
    model: nn.Module, loss: Loss, batch: Batch, tally: Tally, count: int
) -> tuple[Votes | None, Tensor | None]:
    """A traced forward under a plan that fits; None where the loop is the better engine for this batch."""
    plan = _known_plan(model, loss, batch, tally)
    whole = plan is not None and plan.ragged
    if plan is None or whole:
        plan = _make_plan(model, loss, batch, tally, whole)
        if plan.ragged and not whole:
            plan = _make_plan(model, loss, batch, tally, whole=True)
    for _ in range(3):
        if _share(plan.left_out, tally) > LOOP_SHARE:
            return None, None
        try:
            votes, losses = _trace(plan, model, loss, batch, tally, count)
        except PlanMismatch:
            plan = _make_plan(model, loss, batch, tally, whole=True)
            continue
        if plan.light:
            return votes, losses
        seen = reach(losses, tally.parameters, votes.anchor)
        if seen.hidden:
            return None, None
        if seen.parameters <= plan.left_out:
            plan.light = not seen.others
            return votes, losses
        plan.left_out |= seen.parameters
        plan.steps = leave_out(plan.steps, plan.left_out)
        _note(plan.left_out)
    return None, None


def _trace(
    plan: Plan, model: nn.Module, loss: Loss, batch: Batch, tally: Tally, count: int
) -> tuple[Votes, Tensor]:
    votes = Votes(plan, tally, count, _device(tally))
    with _uncompiled(), votes, torch.enable_grad():
        losses = loss(model, batch)
    if votes.position != len(plan.steps):
        raise PlanMismatch("fewer operations than planned")
    return votes, losses


def _make_plan(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, whole: bool) -> Plan:
    """Find out, from a few samples, where each weight meets the samples and how they lie."""
    small = batch if whole else take(batch, slice(0, PLANNING_SAMPLES))
    count = batch_size(small)
    probe = Probe(tally.parameters, small, count, _device(tally))
    with _uncompiled(), probe, torch.enable_grad():
        losses = loss(model, small)
    if losses.shape != (count,):
        raise DataError(
            f"loss(model, batch) must return one loss per sample, shape ({count},); got {tuple(losses.shape)}."
        )
    if not bool(torch.isfinite(losses).all()):
        raise NotFinite
    refuse_detached(losses)
    if reach(losses, tally.parameters, probe.anchor).hidden:
        raise NeedsLoop("a reentrant checkpoint hides its operations")
    picked = picked_rows(losses, probe.in_place)
    for group in proofs(count) if whole and picked else probes(count):
        probe.group = group
        only = torch.zeros_like(losses)
        only[group] = 1
        torch.autograd.grad(losses, [probe.anchor], only, retain_graph=True, allow_unused=True)
    hooked = {name for name, p in tally.parameters.items() if p._backward_hooks}
    plan = resolve(probe.operations, count, hooked)
    plan.ragged = any(
        step.layout is not None and operation.node in picked
        for step, operation in zip(plan.steps, probe.operations)
    )
    probe.forget()
    if plan.left_out:
        _note(plan.left_out)
    plans = _PLANS.setdefault(model, {})
    for key in _keys(loss, batch, tally)[: 1 if plan.flat else 2]:
        plans[key] = plan
    return plan


def _known_plan(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> Plan | None:
    plans = _PLANS.get(model, {})
    return next((plans[key] for key in _keys(loss, batch, tally) if key in plans), None)


def _keys(loss: Loss, batch: Batch, tally: Tally) -> list[Any]:
    """Plans are kept for the exact shapes and, where lengths do not matter, for any length."""
    code = getattr(loss, "__code__", None) or type(loss)
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    shared = (code, torch.is_autocast_enabled(), tuple(tally.parameters))
    exact = (*shared, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))
    return [exact, (*shared, tuple((leaf.ndim, leaf.dtype) for leaf in leaves))]


def left_out_share(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> float:
    """The share of the weights that the known plan for this kind of batch leaves to the loop."""
    plan = _known_plan(model, loss, batch, tally)
    return 0.0 if plan is None else _share(plan.left_out, tally)


def _vote_one_by_one(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, names: set[str]) -> None:
    chosen = [(name, tally.parameters[name]) for name in sorted(names)]
    if not chosen:
        return
    for sample in samples(batch):
        with torch.enable_grad():
            value = loss(model, sample).sum()
        gradients = torch.autograd.grad(value, [p for _, p in chosen], allow_unused=True)
        for (name, _), gradient in zip(chosen, gradients):
            if gradient is not None:
                tally[name].sub_(gradient.sign().to(tally[name].dtype))


def _share(names: set[str], tally: Tally) -> float:
    total = sum(p.numel() for p in tally.parameters.values())
    return sum(tally.parameters[name].numel() for name in names) / max(total, 1)


def _note(names: set[str]) -> None:
    first = min(names)
    warnings.warn(
        f"no vote rule covers {len(names)} tensors, first {first!r}; they are voted on one sample at a time.",
        stacklevel=2,
    )


def _device(tally: Tally) -> torch.device:
    return next(iter(tally.parameters.values())).device
