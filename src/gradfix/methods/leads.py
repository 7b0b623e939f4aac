"""How far one method is ahead of another, answer against answer: in points, or of open answers in loss per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

Row = Mapping[str, Any]
WIDTH = 1.96  # standard errors on either side: 95%


def packed(marks: str) -> str | None:
    """Right and wrong answers ("1" and "0") as hexadecimal digits behind a leading one, for a results file."""
    return f"{int(f'1{marks}', 2):x}" if marks else None


def unpacked(held: str) -> list[int]:
    return [int(mark) for mark in f"{int(held, 16):b}"[1:]]


@dataclass(frozen=True)
class Lead:
    """How far one method is ahead of another on the held-out answers, with a 95% interval: in points, or of open answers by
    how much lower the loss per token is."""

    over: str
    points: float
    low: float
    high: float
    answers: int
    by_loss: bool = False

    @property
    def tied(self) -> bool:
        return self.low <= 0 <= self.high

    def words(self) -> str:
        if self.by_loss:
            interval = f"{-self.high:+.3f} to {-self.low:+.3f}"
            return f"{-self.points:+.3f} in loss per token, 95% interval {interval}, {self.answers} answers"
        return f"{self.points:+.1f} points, 95% interval {self.low:+.1f} to {self.high:+.1f}, {self.answers} answers"


def lead(ours: Sequence[Row], theirs: Sequence[Row]) -> Lead | None:
    """Answer against answer, seed by seed; None where a row does not know its answers.

    One pseudo-answer either way keeps the interval honest for a handful of answers (Agresti and Min 2005). On a
    validation split all seeds answer the same examples; of folds every seed has its own."""
    if is_open(ours):
        return _lead_by_loss(ours, theirs)
    other = {row["seed"]: row.get("held_right") for row in theirs}
    pairs = [(row.get("held_right"), other.get(row["seed"])) for row in ours]
    if not pairs or not all(isinstance(held, str) for pair in pairs for held in pair):
        return None
    gaps = [[a - b for a, b in zip(unpacked(str(one)), unpacked(str(two)))] for one, two in pairs]
    if len({len(unpacked(str(held))) for pair in pairs for held in pair}) > 1 and ours[0].get("regime") == "validation":
        return None
    by_seed = [fmean(gap) for gap in gaps]
    if ours[0].get("regime") == "validation":
        single, draws = [fmean(each) for each in zip(*gaps)], variance(by_seed) / len(gaps) if len(gaps) > 1 else 0.0
    else:
        single, draws = [gap for seed in gaps for gap in seed], 0.0
    size, total = len(single) + 2, sum(single)
    error = math.sqrt((sum(gap * gap for gap in single) + 1 - total * total / size) / size**2 + draws)
    middle = total / size
    return Lead(
        theirs[0]["method"], 100 * fmean(by_seed), 100 * (middle - WIDTH * error), 100 * (middle + WIDTH * error),
        len(single),
    )  # fmt: skip


def _lead_by_loss(ours: Sequence[Row], theirs: Sequence[Row]) -> Lead | None:
    """The same of losses: seeds on one validation split answer the same examples, and count as one answer each."""
    other = {row["seed"]: row.get("held_losses") or [] for row in theirs}
    pairs = [(row.get("held_losses") or [], other.get(row["seed"], [])) for row in ours]
    if any(not one or len(one) != len(two) or None in (*one, *two) for one, two in pairs):
        return None
    gaps = [[b - a for a, b in zip(one, two)] for one, two in pairs]
    alike = ours[0].get("regime") == "validation" and len({len(gap) for gap in gaps}) == 1
    single = [fmean(each) for each in zip(*gaps)] if alike else [gap for seed in gaps for gap in seed]
    if len(single) < 2:
        return None
    middle, error = fmean(single), WIDTH * stdev(single) / math.sqrt(len(single))
    return Lead(theirs[0]["method"], middle, middle - error, middle + error, len(single), by_loss=True)


def is_open(rows: Sequence[Row]) -> bool:
    """Whether these are rows of open answers."""
    return rows[0].get("gain") == "loss"
