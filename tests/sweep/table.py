"""The sweep's results as a table for the docs: counted from the JSON, never written by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.sweep.measure import CLOSE, LOOPED, ONE_PASS, PARTLY

BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
COUNTED = ("float64", "float32")
Row = dict[str, Any]


def write_table(results: Path, page: Path) -> None:
    """Put the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(json.loads(results.read_text()))}\n{END}{after}", encoding="utf-8")


def table(results: Row) -> str:
    rows = results["rows"]
    lines = [
        "| registry | models | dtype | run | one pass | partly | looped | wrong | crashed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in [*sorted({_kind(row) for row in rows}), "all"]:
        some = [row for row in rows if kind in (_kind(row), "all")]
        for dtype in COUNTED:
            head = f"| {kind} | {len(some)} |" if dtype == COUNTED[0] else "| | |"
            run = sum(dtype in row["dtypes"] for row in some)
            lines.append(f"{head} {dtype} | {run} | {' | '.join(map(str, counts(some, dtype)))} |")
    parts = [lines, _not_in_one_pass(rows), _close(rows), _refused(rows), [_versions(results)]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def counts(rows: Iterable[Row], dtype: str) -> list[int]:
    """In one pass, partly, looped, wrong, crashed."""
    found = [row["dtypes"][dtype] for row in rows if dtype in row["dtypes"]]
    ways = Counter(one.get("way") for one in found)
    return [*(ways[way] for way in (ONE_PASS, PARTLY, LOOPED)), sum(bool(one.get("wrong")) for one in found),
            sum("crashed" in one for one in found)]  # fmt: skip


def _kind(row: Row) -> str:
    library, task, _ = row["model"].split("/", 2)
    return f"{library}, {task}"


def _name(row: Row) -> str:
    return f"`{row['model'].split('/', 2)[2]}`"


def _not_in_one_pass(rows: list[Row]) -> list[str]:
    """Which models are not voted on in one pass, and why."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for dtype, found in row["dtypes"].items():
            if dtype in COUNTED and found.get("way") != ONE_PASS:
                why = found.get("crashed") or " ".join(found["notes"])
                reasons.setdefault(why, []).append(f"{_name(row)} ({_kind(row)}, {dtype})")
    if not reasons:
        return ["Every model that ran votes in one pass."]
    return ["Not in one pass:", "", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items())]


def _close(rows: list[Row]) -> list[str]:
    """In bfloat16: the least agreement, and where it is low, how far either engine is from exact votes."""
    found = [(row["dtypes"]["bfloat16"], row) for row in rows if "agreement" in row["dtypes"].get("bfloat16", {})]
    low = [(one, row) for one, row in found if one["agreement"] < CLOSE]
    said = f"bfloat16: `auto` and the loop agree on at least {CLOSE} of the votes of {len(found) - len(low)} of {len(found)} models"
    if not low:
        return [f"{said}."]
    lines = [
        f"{said}. For the others, the share of votes shared by the two, and by each with float64 on the same weights:",
        "",
    ]
    lines += ["| model | both | `auto`, exact | loop, exact |", "|---|---|---|---|"]
    for one, row in sorted(low, key=lambda pair: pair[0]["agreement"]):
        lines.append(
            f"| {_name(row)} ({_kind(row)}) | {one['agreement']:.4f} | {one['batched_exact']:.4f} | {one['looped_exact']:.4f} |"
        )
    return lines


def _refused(rows: list[Row]) -> list[str]:
    """Models that the library itself does not run, and why: in no dtype, or not in some."""
    lines = []
    for row in rows:
        never = not row["dtypes"]
        for dtype, why in list(row["refused"].items())[: 1 if never else None]:
            lines.append(
                f"- {_name(row)} ({_kind(row)}{'' if never else f', {dtype}'}): {why.split('. ')[0].replace('|', '/')}"
            )
    return ["Not run by the library itself, in no dtype or not in the one named:", "", *lines] if lines else []


def _versions(results: Row) -> str:
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."
