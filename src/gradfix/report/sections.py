"""What the page shows, as plain values: one section per pair, one block per label budget.

The template only lays out; every number and every sentence is made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from gradfix.methods.method import FLOOR
from gradfix.methods.results import Results, measure_of
from gradfix.methods.verdicts import inline
from gradfix.report.plots import Series, curves
from gradfix.training.costs import readable

Entry = Mapping[str, Any]
CHOSEN = {
    "validation": "chosen on a validation split",
    "few_shot": "chosen on folds of the few-shot set",
    "answers": "chosen by the old fine-tune's answers",
    "given": "alpha given",
}


def sections(results: Results) -> list[dict[str, Any]]:
    return [_section(results, pair) for pair in results.pairs()]


def _section(results: Results, pair: str | None) -> dict[str, Any]:
    verdicts = [verdict for verdict in results.verdicts if verdict["pair"] == pair]
    main = max(verdicts, key=lambda verdict: verdict["shots"])
    rows = [row for row in results.rows if row.get("pair") == pair]
    return {
        "pair": pair,
        "task": rows[0].get("task"),
        "headline": headline(main),
        "reasons": reasons(main),
        "verdict": main,
        "compared": compared(main),
        "figures": figures(main, [entry for entry in results.changed if entry["pair"] == pair]),
        "costs": [(name, seconds(spent)) for name, spent in main.get("cost_parts", {}).items()],
        "others": [verdict for verdict in verdicts if verdict is not main],
        "caution": baseline_wins(main, results),
        "budgets": [_budget(results, pair, verdict) for verdict in verdicts],
        "agreement": _agreement([e for e in results.agreement if e["pair"] == pair]),
        "kept": _kept([e for e in results.kept if e["pair"] == pair and e["shots"] == main["shots"]], results.title),
        "changed": [entry for entry in results.changed if entry["pair"] == pair],
        "spoken": _spoken(results, pair, main),
        "provenance": [entry for entry in results.provenance if entry.get("pair") == pair],
        "regime": main["regime"],
        "chosen": CHOSEN.get(main["regime"], "nothing held out"),
        "seeds": main["seeds"],
    }


def compared(verdict: Entry) -> bool:
    """Whether methods stood side by side; the page of one transport only says what was done."""
    return bool(verdict.get("compared", True))


def headline(verdict: Entry) -> str:
    """The verdict's advice as a title."""
    return str(verdict["advice"]).rstrip(".")


def reasons(verdict: Entry) -> str:
    """The verdict's text without the advice, which the title gives."""
    return str(verdict["text"]).removeprefix(verdict["advice"]).strip()


def figures(verdict: Entry, changed: Sequence[Entry] = ()) -> list[tuple[str, str]]:
    found = []
    if not compared(verdict):
        before = verdict["accuracy"] - verdict["over_zero_shot"]
        if verdict.get("had") is not None:
            found.append(("what you had, on the old base", f"{verdict['had']:.1f}%"))
        found += [("the target before", f"{before:.1f}%"), ("and after", f"{verdict['accuracy']:.1f}%")]
        for entry in changed:
            found.append(("answers repaired, broken", f"{entry['counts']['repaired']}, {entry['counts']['broken']}"))
        return [*found, ("time", seconds(verdict["cost_seconds"]))]
    if verdict["accuracy"] is not None:
        found.append((f"test {measure_of(verdict)}", f"{verdict['accuracy']:.1f}%"))
    elif verdict.get("held_out") is not None:
        found.append((f"held-out {measure_of(verdict)}, not checked on test", f"{verdict['held_out']:.1f}%"))
    if verdict["over_zero_shot"] is not None:
        found.append(("over the target as it is", f"{verdict['over_zero_shot']:+.1f}"))
    if verdict["recovered"] is not None:
        found.append(("of the fine-tuning gain", f"{100 * verdict['recovered']:.0f}%"))
    found.append(("time per seed", seconds(verdict["cost_seconds"])))
    return found


def baseline_wins(verdict: Entry, results: Results) -> str | None:
    """Said plainly where something simpler than a mask is best."""
    best, title = verdict["best_on_test"], results.title
    if not compared(verdict) or best is None or not results.traits_of(best).baseline:
        return None
    if best == verdict["method"]:
        return f"A baseline wins here: nothing that looks at votes scored above {inline(title(best))} on test."
    return f"On test a baseline, {inline(title(best))}, scored highest; the choice was made on other data and is kept."


def seconds(value: float) -> str:
    if value < 0.05:
        return "under 0.1 s"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def flops(value: float | None) -> str:
    return "" if value is None else readable(value).strip()


def _budget(results: Results, pair: str | None, verdict: Entry) -> dict[str, Any]:
    shots = verdict["shots"]
    rows = [row for row in results.summary_rows() if row["pair"] == pair and row["shots"] == shots]
    for row in rows:
        row["winner"] = row["method"] == verdict["method"]
        row["best_on_test"] = row["method"] == verdict["best_on_test"]
        row["kind"] = results.traits_of(row["method"]).kind
        row["flops_text"] = flops(row["flops"])
        row["seconds_text"] = seconds(row["seconds"])
        row["alpha"] = results.shown_alpha(row)
    own = results.had_row(pair)
    if own is not None:
        nothing = {"winner": False, "best_on_test": False, "kind": "reference", "flops_text": "", "seconds_text": ""}
        rows.insert(0, {**own, **nothing})
    tested = all(row["accuracy"] is not None for row in rows)
    for row in rows:
        row["bar"] = (row["accuracy"] if tested else row["validation_accuracy"]) or 0.0
    zero = next((row["bar"] for row in rows if row["method"] == FLOOR), None)
    losses = [row for row in rows if row["loss_before"] is not None and row["loss_after"] is not None]
    top = max((max(row["loss_before"], row["loss_after"]) for row in losses), default=1.0)
    curve_entries = [e for e in results.curves if e["pair"] == pair and e["shots"] == shots]
    return {
        "shots": shots,
        "rows": rows,
        "shown": {name for name in OPTIONAL if any(row[name] is not None for row in rows)},
        "grey": _grey(rows),
        "bars": sorted(rows, key=lambda row: -row["bar"]),
        "measure": measure_of(verdict),
        "besides": list(dict.fromkeys(name for row in rows for name in row["measures"])),
        "measured": f"{'Test' if tested else 'Held-out'} {measure_of(verdict)}{'' if tested else ' (there is no test split)'}",
        "zero": zero,
        "samples": next((row["samples"] for row in results.rows if row.get("samples") and row["shots"] == shots), None),
        "losses": [row for row in losses if row["method"] != FLOOR],
        "loss_top": top * 1.05 or 1.0,
        "curves": _curves(results, curve_entries, verdict["regime"]),
    }


def _grey(rows: Sequence[Entry]) -> str:
    kinds = {row["kind"] for row in rows}
    named = [name for name, kind in (("references", "reference"), ("controls", "control")) if kind in kinds]
    return f". Grey: {' and '.join(named)}." if named else "."


OPTIONAL = ("validation_accuracy", "recovered", "margin", "flops")  # columns that a page may have nothing for
STYLES = ("main", "second", "third")


def _curves(results: Results, entries: Sequence[Entry], regime: str) -> dict[str, Any] | None:
    """One line per method that is drawn (or per line that an entry names), in the order of the styles."""
    drawn: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        line = entry.get("line") or results.traits_of(entry["method"]).drawn
        if line is not None and len(entry["points"]) > 1:
            drawn.setdefault((line[0], line[1]), []).append(entry)
    series = []
    for (style, legend), mine in sorted(drawn.items(), key=lambda item: _rank(item[0][0])):
        runs = [[(float(x), float(y)) for x, y in entry["points"]] for entry in mine]
        series.append(Series(legend, style, runs, [float(e["best"]) for e in mine if e["best"] is not None]))
    if not series:
        return None
    measure = entries[0].get("measure", "accuracy")
    where = entries[0].get("on", "validation" if regime == "validation" else "held-out folds")
    unit = "" if measure in ("score", "distance") else " (%)"
    return {
        "svg": curves(series, "alpha", f"{measure} {'' if measure == 'distance' else 'on '}{where}{unit}"),
        "measure": measure,
        "legend": [(s.name, s.style) for s in series],
        "several": any(len(s.runs) > 1 for s in series),
    }


def _spoken(results: Results, pair: str | None, verdict: Entry) -> dict[str, Any] | None:
    """Open answers: the figures of every method, and a few answers of the old fine-tune, the new base and the moved one."""
    rows = [row for row in results.summary_rows(pair) if row["shots"] == verdict["shots"]]
    if all(row["divergence"] is None for row in rows):
        return None
    entries = {e["method"]: e for e in results.samples if e["pair"] == pair and e["shots"] == verdict["shots"]}
    moved = [name for name in entries if name != FLOOR and not results.traits_of(name).reference]
    shipped = verdict["method"] if verdict["method"] in moved else next(iter(reversed(moved)), None)
    said: list[dict[str, Any]] = []
    if shipped is not None and FLOOR in entries:
        old: list[str] = next((entry["old_fine_tune"] for entry in entries.values() if entry["old_fine_tune"]), [])
        for place, row in enumerate(entries[shipped]["rows"]):
            said.append({
                "prompt": row["prompt"], "reference": row["reference"], "moved": row["said"],
                "new_base": entries[FLOOR]["rows"][place]["said"], "old": old[place] if place < len(old) else None,
            })  # fmt: skip
    return {"rows": rows, "said": said, "method": results.title(shipped) if shipped is not None else None}


def _rank(style: str) -> int:
    return STYLES.index(style) if style in STYLES else len(STYLES)


def _agreement(entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Per block, one column per budget and vote rule; means over seeds."""
    if not entries:
        return None
    columns = list(dict.fromkeys((entry["shots"], entry["rule"]) for entry in entries))
    heads = [f"{shots} {rule}" for shots, rule in columns]
    groups = [[e["blocks"] for e in entries if (e["shots"], e["rule"]) == column] for column in columns]
    return {"heads": heads, "rows": _grid(groups, chance=0.5), "with": entries[0]["with"]}


def _kept(entries: Sequence[Entry], title: Any) -> dict[str, Any] | None:
    names = list(dict.fromkeys(entry["method"] for entry in entries))
    if not names:
        return None
    groups = [[entry["blocks"] for entry in entries if entry["method"] == name] for name in names]
    return {"heads": [title(name) for name in names], "rows": _grid(groups, chance=0.0)}


def _grid(columns: Sequence[Sequence[Mapping[str, float]]], chance: float) -> list[dict[str, Any]]:
    blocks: Iterable[str] = dict.fromkeys(block for column in columns for run in column for block in run)
    rows = []
    for block in blocks:
        cells = []
        for column in columns:
            values = [run[block] for run in column if block in run]
            value = fmean(values) if values else None
            cells.append({"value": value, "shade": _shade(value, chance)})
        rows.append({"block": block, "cells": cells})
    return rows


def _shade(value: float | None, chance: float) -> int:
    """Strength of the cell's colour in percent: none at chance, full at 1."""
    if value is None:
        return 0
    return round(100 * min(max((value - chance) / (1 - chance), 0.0), 1.0))
