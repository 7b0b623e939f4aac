"""What a reproduction leaves to read: a table as Markdown, and its figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradfix.experiments.experiment import text_rows

PANEL = 3.4  # inches
COLOURS = ("#2f6f9f", "#c2571a", "#3d8b4f", "#7d4f9e")
MARKERS = "os^D"


def markdown(table: Mapping[str, Any]) -> str:
    """A table with its claims, as Markdown."""
    header = list(table["header"])
    lines = [f"## {table['paper'].get('label', '')}: {table['title']}", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in text_rows(table["rows"])]
    lines += ["", *(f"{note}\n" for note in table["notes"])]
    lines += [f"- {c['text']} **{c['holds'] or 'not measured'}** ({c['evidence']})" for c in table["claims"]]
    return "\n".join(lines) + "\n"


def draw(figure: Mapping[str, Any], title: str, out: Path) -> None:
    """Write `<out>.svg` and `<out>.png`; the data come from the experiment's JSON."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = figure["panels"]
    tall = 2.6 if figure["kind"] == "lines" else max(2.6, 0.22 * max(len(p["rows"]) for p in panels) + 1)
    sheet = Figure(figsize=(PANEL * len(panels) + 0.6, tall + 0.5), layout="constrained")
    FigureCanvasAgg(sheet)
    axes = sheet.subplots(1, len(panels), squeeze=False)[0]
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        (_lines if figure["kind"] == "lines" else _heat)(sheet, axis, panel, number == 0)
        axis.set_title(panel["title"], fontsize=10)
        axis.set_xlabel(figure["x"])
    axes[0].set_ylabel(figure["y"])
    sheet.suptitle(title, fontsize=11)
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, metadata in ((".svg", {"Date": None}), (".png", None)):
        sheet.savefig(out.with_suffix(suffix), dpi=150, metadata=metadata)


def _lines(sheet: Any, axis: Any, panel: Mapping[str, Any], first: bool) -> None:
    for number, series in enumerate(panel["series"]):
        xs, ys = zip(*series["points"], strict=True) if series["points"] else ((), ())
        axis.plot(xs, ys, color=COLOURS[number % 4], marker=MARKERS[number % 4], markersize=4, label=series["name"])
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if first:
        axis.legend(frameon=False, fontsize=8)


def _heat(sheet: Any, axis: Any, panel: Mapping[str, Any], first: bool) -> None:
    values = [[float("nan") if value is None else value for value in row] for row in panel["values"]]
    image = axis.imshow(values, cmap="viridis", aspect="auto", vmin=45, vmax=75)
    axis.set_xticks(range(len(panel["columns"])), panel["columns"])
    axis.set_yticks(range(len(panel["rows"])), panel["rows"] if first else [], fontsize=7)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            shade = "white" if value < 62 else "black"
            axis.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=6, color=shade)
    sheet.colorbar(image, ax=axis, shrink=0.8)
