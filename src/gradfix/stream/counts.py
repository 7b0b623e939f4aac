"""What happened to each tensor of a stream, counted while it passed by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradfix.vectors.transported import share


@dataclass
class Fate:
    """The counts of one transported tensor."""

    nonzero: int = 0
    kept: int = 0
    survived: int = 0  # kept entries whose weight really changed after rounding to the output's dtype
    tau_square: float = 0.0
    base_square: float = 0.0

    def add(self, other: Fate) -> None:
        self.nonzero += other.nonzero
        self.kept += other.kept
        self.survived += other.survived
        self.tau_square += other.tau_square
        self.base_square += other.base_square

    def norm_ratio(self) -> float:
        """Size of the change beside the size of what was changed."""
        return (self.tau_square / self.base_square) ** 0.5 if self.base_square else 0.0

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
