"""Mask rules: which coordinates of a task vector survive the move.

A rule sees one tensor (or a flat piece of it) and what the target says about it, never the model,
so every rule works on every architecture and in a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradfix.registry import Registry

Sees = Literal["direction", "votes", "reference", "chance", "nothing"]


@dataclass(frozen=True)
class Mask:
    """A rule and what it must be shown.

    `direction`: -1, 0, 1 per entry. `votes`: the integer votes, with their `count`. `reference`: the
    real-valued vector (minus the mean gradient, or the oracle's task vector). `chance`: a random direction.
    `nothing`: the rule needs no votes at all."""

    rule: Callable[..., Tensor]
    sees: Sees

    def __call__(self, delta: Tensor, shown: Tensor | None, **options: float) -> Tensor:
        return self.rule(delta, shown, **options)


MASKS: Registry[Mask] = Registry("mask")
USUAL_MASK = "agree"


def mask(name: str, sees: Sees = "direction") -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a rule: `@mask("agree")` over a pure function of (delta, what it sees)."""

    def add(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
        MASKS.register(name)(Mask(rule, sees))
        return rule

    return add


@mask("agree")
def keep_agreeing(delta: Tensor, direction: Tensor) -> Tensor:
    """Keep the entries that already point downhill (eq. mask_grad). Direction 0 keeps nothing."""
    towards = direction.to(delta.dtype)
    return (delta * towards).clamp_min_(0).mul_(towards)


@mask("force")
def force_signs(delta: Tensor, direction: Tensor) -> Tensor:
    """Turn every entry downhill: its size from the task vector, its sign from the vote."""
    return delta.abs() * direction.to(delta.dtype)


@mask("magnitude", sees="reference")
def weigh_by_magnitude(delta: Tensor, reference: Tensor) -> Tensor:
    """Soft agreement: max(0, tanh(tau * rho)) * tau, rho real-valued, never a sign."""
    return torch.tanh(delta * reference.to(delta.dtype)).clamp_min(0) * delta


@mask("random", sees="chance")
def keep_at_random(delta: Tensor, direction: Tensor) -> Tensor:
    """Agreement with a coin: what masking alone is worth."""
    return keep_agreeing(delta, direction)


@mask("random_force", sees="chance")
def force_random_signs(delta: Tensor, direction: Tensor) -> Tensor:
    """The task vector's sizes under random signs."""
    return force_signs(delta, direction)


@mask("veto", sees="votes")
def drop_opposed(delta: Tensor, votes: Tensor, *, count: int = 1, margin: float = 0.0) -> Tensor:
    """Drop an entry only where the vote is against it and confident: |votes| > margin * count.

    Margin 0 is `agree` that also keeps ties; margin 1 is plain addition."""
    confident = votes.abs().double() > margin * count
    opposed = delta.sign().mul_(votes.sign()).clamp_max_(0).mul_(confident)  # -1 where dropped, else 0
    return opposed.add_(1).mul_(delta)


@mask("none", sees="nothing")
def keep_everything(delta: Tensor, direction: Tensor | None = None) -> Tensor:
    """Plain addition: the naive transport, for comparison and for related releases."""
    return delta
