"""What a method costs in floating-point operations, with the number of samples stated.

The usual estimates: 2P for a sample's forward pass, 4P for its backward pass, 10P for an AdamW step and 2P for
masking and adding a vector, P being the number of weights. Passes count per token: a picture of 50 patches
costs 50 times its share. A figure without the number of samples says nothing, so there is no default for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradfix.errors import UsageError
from gradfix.registry import unknown

FORWARD, BACKWARD, STEP, MASK = 2, 4, 10, 2


@dataclass(frozen=True)
class Work:
    """Passes over samples, optimiser steps and whole-vector operations; `seconds` is what they took."""

    forward: int = 0
    backward: int = 0
    steps: int = 0
    vectors: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward,
            self.backward + other.backward,
            self.steps + other.steps,
            self.vectors + other.vectors,
            self.seconds + other.seconds,
        )

    def flops(self, parameters: int, tokens: float = 1.0) -> float:
        passes = FORWARD * self.forward + BACKWARD * self.backward
        return parameters * (passes * tokens + STEP * self.steps + MASK * self.vectors)


@dataclass(frozen=True)
class Costed:
    """A method's cost as a formula for people and as work for the machine."""

    formula: str
    work: Callable[[int, int], Work]


_ADDED = Costed("2P", lambda samples, steps: Work(vectors=1))
_VOTED = Costed("6PN + 2P", lambda samples, steps: Work(forward=samples, backward=samples, vectors=1))
_TRAINED = Costed("(6PN + 10P) steps", lambda samples, steps: Work(samples * steps, samples * steps, steps))

COSTS: Mapping[str, Costed] = {
    "zero_shot": Costed("0", lambda samples, steps: Work()),
    "naive": _ADDED,
    "random": _ADDED,
    "gradfix": _VOTED,
    "gradfix_mean": _VOTED,
    "force": _VOTED,
    "magnitude": _VOTED,
    "veto": _VOTED,
    "align_mask": Costed("6PN + 2P, and the alignment", _VOTED.work),
    "one_step": Costed("6PN + 10P", lambda samples, steps: Work(samples, samples, 1)),
    "few_shot": _TRAINED,
    "fine_tuned": Costed("(6P batch + 10P) steps", _TRAINED.work),
}


def flops(
    method: str,
    parameters: int,
    samples: int,
    *,
    tokens: float = 1.0,
    steps: int = 1,
    scored: int = 0,
    settings: int = 1,
) -> float:
    """Operations of one run of `method` on `samples` labelled samples (per step, where it takes `steps`).

    `scored` validation samples times `settings` tried (alphas, margins) is the price of choosing, which
    the usual tables leave out; it is added when given."""
    if method not in COSTS:
        raise UsageError(unknown("costed method", method, list(COSTS)))
    work = COSTS[method].work(samples, steps) + Work(forward=scored * settings)
    return work.flops(parameters, tokens)


def readable(value: float) -> str:
    """1.2e9 as "1.2 G": put the unit's name behind it."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} "
