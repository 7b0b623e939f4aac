"""What happened to each tensor of a stream, counted while it passed by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfix.descent import cosine_after
from gradfix.pieces import nonzeros
from gradfix.transported import share


@dataclass
class Fate:
    """The counts of one transported tensor."""

    nonzero: int = 0
    kept: int = 0
    survived: int = 0  # kept entries whose weight really changed after rounding to the output's dtype
    tau_square: float = 0.0
    base_square: float = 0.0
    target_square: float = 0.0
    base_tau: float = 0.0
    base_target: float = 0.0

    def count(self, before: Tensor, delta: Tensor, masked: Tensor, goal: Tensor) -> None:
        """One piece, all in the dtype of the arithmetic; what survives rounding is counted by the caller."""
        self.nonzero += nonzeros(delta)
        self.kept += nonzeros(masked)
        self.tau_square += float(torch.dot(delta, delta))
        self.base_square += float(torch.dot(before, before))
        self.target_square += float(torch.dot(goal, goal))
        self.base_tau += float(torch.dot(before, delta))
        self.base_target += float(torch.dot(before, goal))

    def add(self, other: Fate) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_json(self) -> dict[str, Any]:
        return {
            "fate": "transported",
            "kept": round(share(self.kept, self.nonzero), 6),
            "survived_rounding": round(share(self.survived, self.kept), 6),
        }


def total(fates: Iterable[Fate]) -> Fate:
    whole = Fate()
    for fate in fates:
        whole.add(fate)
    return whole


def cosines(whole: Fate) -> tuple[float, float]:
    """Of base and fine-tune, of base and target."""
    scale = (whole.base_square * whole.target_square) ** 0.5
    return (
        cosine_after(whole.base_square, whole.base_tau, whole.tau_square),
        whole.base_target / scale if scale else 0.0,
    )
