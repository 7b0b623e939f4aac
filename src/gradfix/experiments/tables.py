"""What an experiment yields: a table of numbers, the claims it tests, and what a figure draws.

Cells are numbers or names, never formatted text; formatting happens where a person reads it. A claim holds,
holds partly or does not hold, by a rule that is part of the experiment and not of the reader's mood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

Cell = str | int | float | None

HOLDS, PARTLY, FAILS = "holds", "holds partly", "does not hold"
CLEAR = 1.0  # points of accuracy: a smaller difference is called equal


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, what was found about it, and the figures that say so."""

    text: str
    holds: str | None
    evidence: str


@dataclass(frozen=True)
class Figure:
    """Data of a picture: `kind` is "lines" or "heat", one panel per task or pair."""

    kind: str
    x: str
    y: str
    panels: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper, measured."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    paper: Mapping[str, Any]
    claims: Sequence[Claim] = ()
    figure: Figure | None = None
    notes: Sequence[str] = field(default=())

    def as_json(self, seconds: float) -> dict[str, Any]:
        drawn = vars(self.figure) if self.figure is not None else None
        return {
            "title": self.title,
            "header": list(self.header),
            "rows": [list(row) for row in self.rows],
            "paper": dict(self.paper),
            "claim": " ".join(claim.text for claim in self.claims),
            "holds": overall(self.claims),
            "claims": [vars(claim) for claim in self.claims],
            "notes": list(self.notes),
            "figure": drawn,
            "seconds": round(seconds, 2),
        }


def overall(claims: Sequence[Claim]) -> str | None:
    found = {claim.holds for claim in claims if claim.holds is not None}
    if not found:
        return None
    return found.pop() if len(found) == 1 else PARTLY


def verdict(wins: Sequence[bool]) -> str | None:
    """All, some or none; nothing measured is no verdict."""
    if not wins:
        return None
    return HOLDS if all(wins) else PARTLY if any(wins) else FAILS


def better(left: float, right: float) -> bool:
    return left - right > CLEAR


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) > 1 else None


def text(cell: Cell) -> str:
    """A cell as a person reads it."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if 0 < abs(cell) < 1 or abs(cell) >= 1e6 else f"{cell:.1f}"
    return str(cell)


def text_rows(rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    return [[text(cell) for cell in row] for row in rows]


def points(left: float | None, right: float | None) -> str:
    """ "58.4 against 22.2": the way evidence quotes two accuracies."""
    return f"{text(left)} against {text(right)}"
