"""Which corruptions become tasks: a rule over measured figures, so that nobody picks by taste.

Ranking uses the held-out images that are not shipped ("dev"); the shipped test images must confirm."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

ZERO_SHOT = (20.0, 60.0)
FINE_TUNED = 75.0
NAIVE_WITHIN = 3.0
GRADFIX_ABOVE = 10.0
TARGETS = ("B_unrelated", "B_related")


@dataclass(frozen=True)
class Choice:
    """The tasks, the primary one first, their figures, and whether the primary keeps the contract."""

    tasks: tuple[str, ...]
    rows: list[dict[str, Any]]
    holds: bool


def in_range(zero_shot: dict[str, dict[str, float]]) -> bool:
    """Both targets know something about the task, and not too much."""
    low, high = ZERO_SHOT
    return all(low <= score <= high for name in TARGETS for score in _both(zero_shot[name]))


def learnable(figures: dict[str, Any]) -> bool:
    """Full fine-tuning solves the task on every base."""
    return all(score > FINE_TUNED for row in figures["fine_tuned"].values() for score in _both(row))


def keeps_contract(figures: dict[str, Any]) -> bool:
    """Unrelated pair: plain addition does nothing, the masked update does a lot, on both image sets."""
    zero, pair = figures["zero_shot"]["B_unrelated"], figures["unrelated"]
    for part in ("test", "dev"):
        if any(
            abs(pair[name][part] - zero[part]) > NAIVE_WITHIN
            for name in ("naive_at_1", "naive", "naive_wide")
        ):
            return False
        if min(row[part] for row in pair["gradfix"] + pair["gradfix_wide"]) < zero[part] + GRADFIX_ABOVE:
            return False
    return True


def gain(figures: dict[str, Any]) -> float:
    """Points of the masked update over zero-shot on the unrelated pair."""
    return (
        mean(row["dev"] for row in figures["unrelated"]["gradfix"])
        - figures["zero_shot"]["B_unrelated"]["dev"]
    )


def choose(candidates: list[dict[str, Any]], count: int = 3) -> Choice:
    """One recipe for all tasks: the one under which most tasks keep the contract, then the largest gain."""
    choices = [
        _choose_among([figures for figures in candidates if figures["lr"] == lr], count)
        for lr in sorted({figures["lr"] for figures in candidates})
    ]
    return max(choices, key=_merit)


def _choose_among(candidates: list[dict[str, Any]], count: int) -> Choice:
    ranked = sorted(candidates, key=lambda row: (learnable(row) and in_range(row["zero_shot"]),
                                                 keeps_contract(row), gain(row)), reverse=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for row in ranked:
        if len(rows) < count and _family(row) not in {_family(other) for other in rows}:
            rows.append(row)
    holds = learnable(rows[0]) and in_range(rows[0]["zero_shot"]) and keeps_contract(rows[0])
    return Choice(tuple(row["task"] for row in rows), rows, holds)


def _merit(choice: Choice) -> tuple[int, int, float]:
    fit = [learnable(row) and in_range(row["zero_shot"]) for row in choice.rows]
    return sum(fit), sum(keeps_contract(row) for row in choice.rows), mean(gain(row) for row in choice.rows)


def _family(figures: dict[str, Any]) -> str:
    return str(figures["task"]).split("_", maxsplit=1)[0]


def _both(row: dict[str, float]) -> tuple[float, float]:
    return row["test"], row["dev"]
