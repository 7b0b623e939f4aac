"""The first batch voted on without a plan: what is done to each weight is noted on the way, and becomes the plan.

Samples are taken to lie first, as they nearly always do, and the pass itself shows whether they do: all losses but those of
the first and the last sample are scaled up by powers of two, which changes no sign. Rows of these two then have gradients that
are tiny beside the others'; rows that anybody else reaches have not. A model that does anything unusual gets no votes here but a plan of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfix.votes.batched.engine import MIXED, differ, garbage_later, keep_plan, uncompiled
from gradfix.votes.batched.layers import Call, Samples, rule_for
from gradfix.votes.batched.passplan import PassPlan, Step
from gradfix.votes.batched.recorded import BatchVote, repeats_of
from gradfix.votes.batched.replay import COPIES, REPEAT, overwrites
from gradfix.votes.batched.sample_rows import INDEXING, SampleLayout, keeps_rows, reach
from gradfix.votes.batched.trace import VotingWatch
from gradfix.votes.batched.watch import Tracked, key_of, made_by, opened_up, refuse_inner, tensors_in
from gradfix.votes.engines.loop import refuse_detached
from gradfix.votes.engines.passes import every_second

LEAST_SAMPLES = 4  # two at the ends, and some to compare them with
ENOUGH = 32  # samples to look at every second one of
_USUAL = SampleLayout(0, 1)
_NUMBERING = INDEXING | {torch.arange}
# Exponents by which losses are scaled: the last not at all, the first once, all others twice. float16 has no room for them.
_SCALES = {torch.float64: 256, torch.float32: 32, torch.bfloat16: 32}


class Unusual(Exception):
    """The pass does what only a plan made beforehand can tell apart."""


class Mixed(Exception):
    """Samples have other losses in other company."""


def learn(asked: BatchVote) -> LearningWatch:
    """Fold one micro-batch; what was folded counts only if nothing is raised, here or when the pass is confirmed."""
    if any(parameter._backward_hooks for parameter in asked.tally.parameters.values()):
        raise Unusual("a weight has a hook on its gradient")
    asked.tally.reserve(asked.count)
    repeats_of(asked)
    watch = LearningWatch(PassPlan([], set(), hoped=True), asked)
    try:
        with garbage_later():
            watch.run(asked)
    finally:
        watch.forget()
    return watch


class LearningWatch(VotingWatch):
    """Vote and note the steps of the plan as they come, each by its usual rule."""

    def __init__(self, plan: PassPlan, asked: BatchVote) -> None:
        super().__init__(plan, asked, hooks=True)
        self.derives = True
        self.computed: set[torch.dtype] = set()
        self.heights: list[tuple[Step, Tensor]] = []  # by sample, the largest output gradient of a use
        self.in_place: set[Any] = set()  # graph nodes that index, and leave every row with its sample
        self.numbers: list[Tensor] = []  # that come from no batch
        self.losses = torch.empty(0)

    def run(self, asked: BatchVote) -> None:
        """Without a look at the losses: the device is not waited for before everything else is launched, too."""
        with uncompiled(), self.watching(asked.model), torch.enable_grad():
            losses = asked.losses()
        self.ready(losses)
        self.losses = losses.detach()
        self.backward(losses)

    def forget(self) -> None:
        super().forget()
        self.in_place.clear()
        self.numbers.clear()
        self.small.clear()  # its views would keep counts that a wider tally has left behind

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        refuse_inner(func)
        held = self._may_hold_weights(args) or (kwargs and self._may_hold_weights(kwargs.values()))
        weights = self.weights_in(func, args, kwargs) if held and torch.is_grad_enabled() else []
        if not weights:
            output = func(*args, **kwargs)
            if func in _NUMBERING:
                self._note_picking(func, args, output)
        elif (step := self._voting_step(func, args, kwargs, weights)) is not None:
            self.plan.steps.append(step)
            output = self._tapped(self._advance(), func, args, kwargs)
            if not step.on_samples:
                self.follow(step, (func, args, kwargs), weights, output)
        elif self._holds_samples(args, kwargs) and any(weight.live for weight in weights):
            opened = opened_up(func, args, kwargs)
            if opened is None:
                raise Unusual(f"no rule for {getattr(func, '__name__', func)}")
            with self:
                return opened()
        else:
            output = self._noted_step(func, args, kwargs, weights)
        if output.__class__ is not torch.Size:  # models ask for shapes all the time
            for tensor in (output,) if output.__class__ is Tensor else tensors_in(output):
                if tensor.requires_grad and tensor.is_floating_point():
                    self.computed.add(tensor.dtype)
        return output

    def _note_picking(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        if func is torch.arange:
            self.numbers.append(output)
        elif keeps_rows(func, args, self.samples, lambda index: all(index is not own for own in self.numbers)):
            self.in_place.add((args[0] if func is Tensor.__setitem__ else output).grad_fn)

    def _voting_step(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked]
    ) -> Step | None:
        """The step of a weight that meets samples; of copies that have voted, nothing is asked any more."""
        if not any(weight.live for weight in weights) or overwrites(func):
            return None
        if not all(weight.live for weight in weights):
            raise Unusual("a copy of a weight meets another weight")
        layout, rule = self._holds_samples(args, kwargs), rule_for(func)
        if layout is None and self._copies(func, args, kwargs, weights):
            layout, rule = _USUAL, REPEAT
        if layout is None or rule is None or rule.spreads:
            return None
        roots = tuple(name for weight in weights for name in weight.roots)
        own = (key_of(func, weights), "vote", rule, layout, frozenset(roots))
        return Step(*own, on_samples=rule is not REPEAT, votes=roots)

    def _holds_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleLayout | None:
        """Where samples seem to lie in what an operation is given besides weights, if they are in it."""
        first = args[0] if args else None
        if (
            first.__class__ is Tensor
            and id(first) not in self.tracked
            and first.ndim
            and first.shape[0] == self.samples
        ):
            return _USUAL  # most calls, found as below
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self.tracked and tensor.ndim and tensor.shape[0]:
                rows, rest = divmod(tensor.shape[0], self.samples)
                if not rest:
                    return _USUAL if rows == 1 else SampleLayout(0, rows)
        return None

    def _copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked]) -> bool:
        """Whether a weight is copied once for every sample."""
        if func not in COPIES or args[0] is not weights[0].tensor:
            return False
        weight = weights[0].without_grad()
        shape = func(weight, *args[1:], **kwargs).shape
        return shape[0] == self.samples and (weight.ndim < len(shape) or weight.shape[0] == 1)

    def _noted_step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tracked]) -> Any:
        """A weight made of others, or what is done to copies that have voted."""
        if overwrites(func) or func is Tensor.__setitem__:
            raise Unusual("a weight is written over")
        output = func(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_in(made_by(func, args, output))):
            return output
        live = all(weight.live for weight in weights)
        if live and any(t.requires_grad and id(t) not in self.tracked for t in tensors_in((args, kwargs))):
            raise Unusual("samples do not lie first")  # a gradient on its way to them would end here
        roots = frozenset(name for weight in weights for name in weight.roots) if live else frozenset[str]()
        step = Step(key_of(func, weights), "derive" if live else "pass", roots=roots, on_samples=not live)
        self.plan.steps.append(step)
        self._advance()
        if live:
            self.follow(step, (func, args, kwargs), weights, output)
        return output

    def _watched(self, step: Step, call: Call, output: Tensor, redirected: bool) -> Tensor:
        assert step.rule is not None and step.layout is not None
        if not step.rule.allows(call, step.layout, output.shape):
            raise Unusual(f"samples cannot lie first in {step.key}")
        return super()._watched(step, call, output, redirected)

    def ready(self, losses: Tensor) -> None:
        """What the forward pass was must be known before anything is counted."""
        if losses.shape != (self.samples,):
            raise Unusual("one loss per sample is needed")
        refuse_detached(losses)
        self.plan.dtype = min(self.computed | {losses.dtype}, key=lambda dtype: dtype.itemsize)
        if self.recomputes or not self.computed | {losses.dtype} <= set(_SCALES):
            raise Unusual("activations are not kept, or not in a usual dtype")
        seen = reach(losses, self.tally.parameters, self.anchor, self.in_place)
        if seen.others or seen.hidden or seen.picks:
            raise Unusual("weights are reached past the votes, or rows are picked")
        self.uses = self.plan.uses()
        self.waiting = {name: [] for name in self.uses}

    def scales(self, losses: Tensor) -> Tensor:
        """Up for most, not down for few: gradients are small, and would underflow."""
        exponent = _SCALES[self.plan.dtype]
        scales = torch.full_like(losses, 2.0 ** (2 * exponent))
        scales[:1] *= 2.0**-exponent
        scales[-1:] *= 2.0 ** (-2 * exponent)
        return scales

    def fold_use(self, step: Step, call: Call, gradient: Tensor) -> None:
        assert step.layout is not None
        usual = step.layout is _USUAL or step.layout == _USUAL
        rows = gradient if usual else Samples(self.samples, step.layout).split(gradient)
        dims = list(range(1, rows.ndim))
        heights = torch.linalg.vector_norm(rows, torch.inf, dims) if dims else rows.abs()
        self.heights.append((step, heights))
        super().fold_use(step, call, gradient)

    def questions(self, again: Tensor) -> list[Tensor]:
        """What the device is to tell of the pass: whether its losses are odd, and of every use whether its rows are clear.

        `again` are losses of some samples in other company, in the order of `in_other_company`."""
        odd = ~torch.isfinite(self.losses).all()
        mixed = differ(in_other_company(self.losses), again, self.plan.dtype)
        return [torch.stack([odd, mixed]), *(self._clear(torch.stack(heights)) for _, heights in self._by_kind())]

    def refuse_mixing(self, told: Sequence[list[Any]]) -> None:
        """By the answers to `questions`."""
        odd, mixed = told[0]
        if odd or mixed:
            raise Unusual("losses are not finite") if odd else Mixed(MIXED)

    def confirm(self, asked: BatchVote, told: Sequence[list[Any]], heard: Mapping[str, float]) -> None:
        """Keep the plan, if every use was seen with the rows at the ends as small as their losses.

        `heard` tells how far the loop's gradients of the last sample reach: it must say something where others do."""
        if len(self.heights) != sum(step.role == "vote" for step in self.plan.steps):
            raise Unusual("some uses reach no loss")
        for (steps, _), answers in zip(self._by_kind(), told[1:]):
            for step, clear, speaks, loud in zip(steps, *(answers[turn::3] for turn in range(3))):
                if not clear or not (speaks or step.layout == _USUAL):
                    raise Unusual(
                        f"samples do not lie first in {step.key}, or gradients are too small or large to tell"
                    )
                if loud and not any(heard.get(name) for name in step.votes):
                    raise Unusual(f"the sample that was compared says nothing in {step.key}")
        self.plan.proven = True
        keep_plan(asked, self.plan)

    def _by_kind(self) -> list[tuple[list[Step], list[Tensor]]]:
        """Uses and their heights, those of a dtype together."""
        kinds: dict[torch.dtype, tuple[list[Step], list[Tensor]]] = {}
        for step, height in self.heights:
            steps, heights = kinds.setdefault(height.dtype, ([], []))
            steps.append(step)
            heights.append(height)
        return list(kinds.values())

    def _clear(self, heights: Tensor) -> Tensor:
        """Of every use: its rows are clear, some sample in between reaches it, and that by more than rounding."""
        exponent = _SCALES[self.plan.dtype]
        others = heights[:, 1:-1].amax(1)
        small = heights[:, 0] <= others * 2.0 ** (-0.5 * exponent)
        smaller = heights[:, -1] <= others * 2.0 ** (-1.5 * exponent)
        # Gradients that one sample alone would lose at the end of the range, or many at the other, have other votes when scaled.
        inside = (others == 0) | ((others >= 16.0) & (others <= 2.0 ** (3 * exponent)))
        rounding = min(0.01, 1e3 * torch.finfo(self.plan.dtype).eps)
        return torch.stack([small & smaller & inside, others > 0, others > rounding * others.max()], 1)


def in_other_company(losses: Tensor) -> Tensor:
    """Those of every second sample, and of the first and the last."""
    return torch.cat([*(every_second(losses, start) for start in turns(len(losses))), losses[:1], losses[-1:]])


def turns(size: int) -> list[int]:
    """With which sample to begin, where every second is taken. Of many samples half are enough, the last among them."""
    return [(size - 1) % 2] if size >= ENOUGH else [0, 1]
