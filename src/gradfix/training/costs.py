"""What a method costs in floating-point operations, with the number of samples stated.

The usual estimates: 2P for a sample's forward pass, 4P for its backward pass, 10P for an AdamW step and 2P for
masking and adding a vector, P being the number of weights. Passes count per token: a picture of 50 patches
costs 50 times its share. A figure without the number of samples says nothing, so there is no default for it."""

from __future__ import annotations

from dataclasses import dataclass

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
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def samples(self) -> int:
        """What the passes cost, in samples read forward."""
        return self.forward + BACKWARD // FORWARD * self.backward

    def flops(self, parameters: int, tokens: float = 1.0) -> float:
        passes = FORWARD * self.forward + BACKWARD * self.backward
        return parameters * (passes * tokens + STEP * self.steps + MASK * self.vectors)


def readable(value: float) -> str:
    """1.2e9 as "1.2 G": put the unit's name behind it."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} "
