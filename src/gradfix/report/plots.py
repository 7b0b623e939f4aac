"""Charts as inline SVG, coloured by the page's own style sheet.

Every text goes through markupsafe, so a name can never become markup. Sizes are chosen for a phone's width;
wider screens show charts side by side instead of larger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 30, 12, 26, 34

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: a thick mean, thin runs behind it, and a mark where the choice fell."""

    name: str
    style: str  # "main", "second" or "third": a class of the style sheet
    runs: list[list[Point]]
    chosen: list[float]

    def mean(self) -> list[Point]:
        """The mean over runs where all of them were measured."""
        common = sorted(set.intersection(*({x for x, _ in run} for run in self.runs)))
        return [(x, sum(dict(run)[x] for run in self.runs) / len(self.runs)) for x in common]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    span = max(high - low, 1e-9)
    raw = span / wanted
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * number, 10) for number in range(first, last + 1)]


def curves(series: Sequence[Series], x_name: str, y_name: str) -> Markup:
    """Lines over alpha with a light grid."""
    points = [point for one in series for run in one.runs for point in run]
    x_ticks = ticks(0, max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))
    x_range, y_range = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        return x, y

    parts = [_grid(x_ticks, y_ticks, place)]
    for one in reversed(series):
        parts += [_line(run, f"run {one.style}", place) for run in one.runs if len(one.runs) > 1]
        mean = one.mean()
        parts.append(_line(mean, f"mean {one.style}", place))
        known = dict(mean)
        for alpha in sorted(set(one.chosen)):
            values = [
                dict(run)[alpha] for run, best in zip(one.runs, one.chosen) if best == alpha and alpha in dict(run)
            ]
            if values:
                x, y = place((alpha, known.get(alpha, sum(values) / len(values))))
                parts.append(Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3.4"/>').format(one.style, x, y))
    labels = Markup(
        '<text class="axis" x="{:.0f}" y="{}" text-anchor="middle">{}</text><text class="axis" x="2" y="9">{}</text>'
    ).format((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, x_name, y_name)
    title = ", ".join(one.name for one in series)
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{} over {}: {}">{}{}</svg>').format(
        WIDTH, HEIGHT + 4, y_name, x_name, title, Markup("").join(parts), labels
    )


def _grid(x_ticks: Sequence[float], y_ticks: Sequence[float], place: object) -> Markup:
    assert callable(place)
    parts = []
    for y in y_ticks:
        _, at = place((x_ticks[0], y))
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, at, at)
            + Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{:g}</text>').format(LEFT - 6, at + 3.5, y)
        )
    for x in x_ticks:
        at, bottom = place((x, y_ticks[0]))
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{:g}</text>').format(
                at, bottom + 14, x
            )
        )
    return Markup("").join(parts)


def _line(points: Sequence[Point], style: str, place: object) -> Markup:
    assert callable(place)
    path = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in points)
    return Markup('<polyline class="{}" points="{}"/>').format(style, path)
