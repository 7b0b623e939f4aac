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
    built = [row for row in rows if row["built"]]
    kinds = sorted({_kind(row) for row in rows})
    lines = [
        "| registry | models | built | dtype | one pass | partly | looped | wrong | crashed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in [*kinds, "all"]:
        some = [row for row in rows if kind in (_kind(row), "all")]
        for dtype in COUNTED:
            head = (
                f"| {kind} | {len(some)} | {sum(row['built'] for row in some)} |" if dtype == COUNTED[0] else "| | | |"
            )
            lines.append(f"{head} {dtype} | {' | '.join(map(str, counts(some, dtype)))} |")
    return "\n".join(
        [*lines, "", *_not_in_one_pass(built), "", *_close(built), "", *_not_built(rows), "", _versions(results)]
    )


def counts(rows: Iterable[Row], dtype: str) -> list[int]:
    """In one pass, partly, looped, wrong, crashed."""
    found = [row["dtypes"][dtype] for row in rows if row["built"]]
    ways = Counter(one.get("way") for one in found)
    return [*(ways[way] for way in (ONE_PASS, PARTLY, LOOPED)), sum(bool(one.get("wrong")) for one in found),
            sum("crashed" in one for one in found)]  # fmt: skip


def _kind(row: Row) -> str:
    library, task, _ = row["model"].split("/", 2)
    return f"{library}, {task}"


def _name(row: Row) -> str:
    return f"`{row['model'].split('/', 2)[2]}`"


def _not_in_one_pass(built: list[Row]) -> list[str]:
    """Which models are not voted on in one pass, and why."""
    reasons: dict[str, list[str]] = {}
    for row in built:
        for dtype in COUNTED:
            found = row["dtypes"][dtype]
            if found.get("way") != ONE_PASS:
                why = found.get("crashed") or " ".join(found["notes"])
                reasons.setdefault(why, []).append(f"{_name(row)} ({_kind(row)}, {dtype})")
    if not reasons:
        return ["Every model that was built votes in one pass."]
    return ["Not in one pass:", "", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items())]


def _close(built: list[Row]) -> list[str]:
    """In bfloat16: the least agreement, and where it is low, how far either engine is from exact votes."""
    found = [(row["dtypes"]["bfloat16"], row) for row in built if "agreement" in row["dtypes"].get("bfloat16", {})]
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


def _not_built(rows: list[Row]) -> list[str]:
    missing = [f"{_name(row)} ({_kind(row)})" for row in rows if not row["built"]]
    if not missing:
        return []
    return [f"Not built as tiny models ({len(missing)}; reasons in the file): {', '.join(missing)}."]


def _versions(results: Row) -> str:
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."
