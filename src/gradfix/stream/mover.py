"""One block of the output: target + alpha * mask(update), counted, checked and rounded once.

Every pass over the numbers costs as much as the next, so sums that are taken anyway stand for checks of all
entries: they are finite only if the entries are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradfix.stream.ballot import Ballot
from gradfix.stream.counts import Fate
from gradfix.stream.pieces import Buffers, all_finite, differing, nonzeros
from gradfix.vectors.transported import mask_piece

WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)
SMALL = 1e9  # times a change whose squares add up, this moves no number of a wide range over its end


class NotFiniteError(Exception):
    """A NaN or Inf came in, or came out."""


@dataclass(frozen=True)
class Mover:
    """The arithmetic of one stream."""

    ballot: Ballot
    alpha: float
    buffers: Buffers = field(default_factory=Buffers)

    def move(self, into: Tensor, delta: Tensor, target: Tensor, seen: Tensor | None) -> Fate:
        """Fill `into`; `delta` does not survive it."""
        goal = self.buffers.wide("target", target, torch.promote_types(target.dtype, torch.float32))
        masked = mask_piece(self.ballot.rule, delta, seen, self.ballot.options)
        fate = Fate(nonzero=nonzeros(delta), tau_square=float(torch.dot(delta, delta)))
        fate.kept = fate.nonzero if masked is delta else nonzeros(masked)
        sound = math.isfinite(fate.tau_square)
        whole = sound or all_finite(delta)
        moved = masked.to(goal.dtype)
        if self.alpha != 1:
            moved.mul_(self.alpha)
        moved.add_(goal)
        into.copy_(moved)
        # What rounding alone does to the target is no part of the update.
        fate.survived = differing(into, self.buffers.wide("rounded", target, into.dtype))
        if sound and abs(self.alpha) < SMALL and into.dtype is target.dtype and target.dtype in WIDE_RANGE:
            whole = math.isfinite(float(moved.sum())) or all_finite(into)
        elif whole:
            whole = all_finite(into)
        if not whole:
            raise NotFiniteError
        return fate
