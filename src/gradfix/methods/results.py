"""Results of a comparison: rows, verdict and what the report draws, as one JSON file.

Rows are per method, budget and seed; everything else is derived from them or describes how they came about.
Accuracies are in percent, recovered is a share: (accuracy - zero-shot) / (fine-tuned - zero-shot), and for open
answers the same share of the loss per token."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from gradfix.errors import CorruptInput, UsageError
from gradfix.methods.method import CEILING, FLOOR, Traits
from gradfix.methods.methods import traits_of
from gradfix.methods.verdicts import judge, mean, spread

Row = dict[str, Any]
SPOKEN = ("test_loss", "token_f1", "general_loss", "divergence")  # shown for open answers
AVERAGED = (
    *("accuracy", "recovered", "margin", "seconds", "flops", "validation_accuracy", "loss_before", "loss_after"),
    *("kept", *SPOKEN),
)
PLAIN = ("pair", "measure", "accuracy", "loss", "samples")  # what every score has
HAD, HAD_TITLE = "what_you_had", "What you had (on the old base)"
FIELDS = ("method", "shots", "seed", "accuracy", "recovered", "alpha", "seconds")


@dataclass(frozen=True)
class Results:
    """What `compare` returns. `verdict` speaks for the largest budget of each pair; `verdicts` has them all."""

    rows: list[Row]
    baselines: dict[str, Any]
    verdict: dict[str, Any]
    versions: dict[str, Any]
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    titles: dict[str, str] = field(default_factory=dict)
    traits: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    had: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    provenance: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def build(cls, rows: Iterable[Mapping[str, Any]], **details: Any) -> Results:
        """Fill in what follows from the rows: recovered shares, baselines and verdicts."""
        filled = with_recovered(rows)
        pairs = list(dict.fromkeys(row.get("pair") for row in filled))
        titles, traits = details.get("titles", {}), details.get("traits", {})
        verdicts = []
        for pair in pairs:
            mine = [row for row in filled if row.get("pair") == pair]
            if len({row["regime"] for row in mine if row["shots"]}) > 1:
                raise UsageError("rows chosen on validation data and rows chosen on folds cannot be compared.")
            for shots in dict.fromkeys(row["shots"] for row in mine):
                verdicts.append(judge([row for row in mine if row["shots"] == shots], titles, traits))
        baselines = {pair: _baselines([r for r in filled if r.get("pair") == pair], traits) for pair in pairs}
        return cls(
            rows=filled,
            baselines=baselines[pairs[0]] if len(pairs) == 1 else {str(pair): b for pair, b in baselines.items()},
            verdict=_headline(verdicts),
            verdicts=verdicts,
            **details,
        )

    @classmethod
    def merge(cls, parts: Sequence[Results]) -> Results:
        """Several pairs side by side; each part must have its own pair name."""
        names = [pair for part in parts for pair in part.pairs()]
        if len(set(names)) != len(names):
            raise UsageError(f"two comparisons share a pair name: {', '.join(map(str, names))}. Give each its own.")
        joined: dict[str, Any] = {"titles": {}, "traits": {}, "versions": parts[0].versions}
        for part in parts:
            joined["titles"].update(part.titles)
            joined["traits"].update(part.traits)
        for key in ("curves", "agreement", "kept", "changed", "had", "samples", "provenance"):
            joined[key] = [entry for part in parts for entry in getattr(part, key)]
        joined["notes"] = list(dict.fromkeys(note for part in parts for note in part.notes))
        return cls.build([row for part in parts for row in part.rows], **joined)

    def pairs(self) -> list[str | None]:
        return list(dict.fromkeys(row.get("pair") for row in self.rows))

    def title(self, method: str) -> str:
        return self.titles.get(method, method)

    def traits_of(self, method: str) -> Traits:
        return traits_of(method, self.traits.get(method))

    def shown_alpha(self, row: Mapping[str, Any]) -> float | None:
        """How far along the vector, where the method goes along it: what is trained has no alpha, only 0 for nothing."""
        return (
            row["alpha"] if row["method"] == HAD or self.traits_of(row["method"]).scaled or not row["alpha"] else None
        )

    def summary_rows(self, pair: str | None = None) -> list[dict[str, Any]]:
        """One row per pair, budget and method: means over seeds, with the spread of the accuracy."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            if pair is None or row.get("pair") == pair:
                groups.setdefault((row.get("pair"), row["shots"], row["method"]), []).append(row)
        order = {name: index for index, name in enumerate(self.titles)}
        budgets = list(dict.fromkeys((key[0], key[1]) for key in groups))
        ranked = sorted(groups, key=lambda k: (budgets.index(k[:2]), order.get(k[2], len(order))))
        return [_summary(key, groups[key], self.title(key[2])) for key in ranked]

    def had_row(self, pair: str | None) -> dict[str, Any] | None:
        """The old fine-tune on its own base, as a summary row; None where nobody measured it."""
        found = next((entry for entry in self.had if entry["pair"] == pair), None)
        if found is None:
            return None
        blank = dict.fromkeys((*AVERAGED, "spread", "alpha", "shots", "margin"))
        return {**blank, "pair": pair, "method": HAD, "title": HAD_TITLE, "seeds": 1, "measure": measure_of(found), "test_loss": found.get("loss"),
                "measures": {name: found[name] for name in found if name not in PLAIN}, "accuracy": found["accuracy"]}  # fmt: skip

    def table(self) -> list[list[str]]:
        """Header and cells as text, for any printer."""
        rows = self.summary_rows()
        for pair in reversed(self.pairs()):
            own = self.had_row(pair)
            if own is not None:
                rows.insert(next(n for n, row in enumerate(rows) if row["pair"] == pair), own)
        several, untested = len(self.pairs()) > 1, any(row["accuracy"] is None for row in rows)
        measures = " / ".join(dict.fromkeys(measure_of(row) for row in rows)) or "accuracy"
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "pair": lambda row: str(row["pair"]),
            "shots": lambda row: number_text(row["shots"]),
            "method": lambda row: str(row["method"]),
            "held out": lambda row: number_text(row["validation_accuracy"], ".1f"),
            measures: accuracy_text,
            **{name: _besides(name) for name in dict.fromkeys(name for row in rows for name in row["measures"])},
            "loss per token": lambda row: number_text(row["test_loss"], ".3f"),
            "token F1": lambda row: number_text(row["token_f1"], ".2f"),
            "recovered": lambda row: share_text(row["recovered"]),
            "general loss": lambda row: number_text(row["general_loss"], ".3f"),
            "divergence": lambda row: number_text(row["divergence"], ".3f"),
            "alpha": lambda row: number_text(self.shown_alpha(row)),
            "seconds": lambda row: number_text(row["seconds"], ".1f"),
        }
        closed = not any(is_spoken(row) for row in rows)
        left_out = {"pair": not several, "held out": not untested}
        left_out |= dict.fromkeys(("loss per token", "token F1", "general loss", "divergence"), closed)
        header = [name for name in columns if not left_out.get(name)]
        return [header, *([columns[name](row) for name in header] for row in rows)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        from gradfix.checkpoints.write import write_text

        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        from pydantic import TypeAdapter

        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            missing = [name for row in content["rows"] for name in FIELDS if name not in row]
            if missing:
                raise KeyError(missing[0])
            if not content["rows"]:
                raise ValueError("no rows")
            return TypeAdapter(cls).validate_python(content)
        except FileNotFoundError:
            raise CorruptInput(f"{path} does not exist; write one with `gradfix compare --json`.") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = " ".join(repr(error).split())[:80]
            raise CorruptInput(f"{path} is not a results file of gradfix compare ({why}).") from None

    def _repr_html_(self) -> str:
        from gradfix.vectors.diagnostics import notebook_table

        header, *cells = self.table()
        table = notebook_table("Comparison", header, cells)
        return f"<p>{html.escape(self.verdict.get('text', ''))}</p>{table}"


def recovered(accuracy: float | None, zero_shot: float | None, fine_tuned: float | None) -> float | None:
    """Share of the fine-tuning gain; None where full fine-tuning gains nothing or is unknown."""
    if accuracy is None or zero_shot is None or fine_tuned is None or fine_tuned <= zero_shot:
        return None
    return (accuracy - zero_shot) / (fine_tuned - zero_shot)


def with_recovered(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    filled = [dict(row) for row in rows]
    for pair in {row.get("pair") for row in filled}:
        mine = [row for row in filled if row.get("pair") == pair]
        ends = [mean([_gained(r) for r in mine if r["method"] == name]) for name in (FLOOR, CEILING)]
        for row in mine:
            row["recovered"] = recovered(_gained(row), *ends)
    return filled


def _gained(row: Row) -> float | None:
    """What a share is a share of: the accuracy, or for open answers the loss, which is better the lower it is."""
    if row.get("gain") != "loss":
        return row["accuracy"]  # type: ignore[no-any-return]
    return None if row.get("test_loss") is None else -row["test_loss"]


def _baselines(rows: Sequence[Row], traits: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = traits_of(name, traits.get(name))
        if not mine.baseline and not mine.reference:
            continue
        values = [row["accuracy"] for row in rows if row["method"] == name]
        if None not in values:
            found[name] = fmean(values)
    return found


def _headline(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict at the largest budget; with several pairs the first speaks and the text names all."""
    last: dict[Any, Mapping[str, Any]] = {}
    for verdict in verdicts:
        known = last.get(verdict["pair"])
        if known is None or verdict["shots"] >= known["shots"]:
            last[verdict["pair"]] = verdict
    first, *others = last.values()
    if not others:
        return dict(first)
    text = " ".join(f"{str(v['pair']).capitalize()}: {v['text']}" for v in last.values())
    return {**first, "text": text, "pairs": {str(pair): dict(v) for pair, v in last.items()}}


def _summary(key: tuple[Any, ...], rows: Sequence[Row], title: str) -> dict[str, Any]:
    pair, shots, method = key
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    alphas = sorted(row["alpha"] for row in rows)
    return {
        **{"pair": pair, "shots": shots, "method": method, "title": title, "seeds": len(rows)},
        "measure": measure_of(rows[0]),
        **{name: mean([row.get(name) for row in rows]) for name in AVERAGED},
        "measures": measures_of(rows),
        "spread": spread(accuracies),
        "alpha": alphas[len(alphas) // 2],
    }


def measures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was measured besides, in percent: means over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row.get("measures") or {})
    return {name: fmean(row["measures"][name] for row in rows if name in (row.get("measures") or {})) for name in names}


def is_spoken(row: Mapping[str, Any]) -> bool:
    """Whether a summary row has figures that only open answers have."""
    return row["token_f1"] is not None or row["divergence"] is not None


def measure_of(row: Mapping[str, Any]) -> str:
    """What the share of right answers is called: of free answers it is the exact match."""
    return str(row.get("measure") or "accuracy")


def _besides(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: number_text(row["measures"].get(name), ".1f")


def accuracy_text(row: Mapping[str, Any]) -> str:
    if row["accuracy"] is None:
        return "-"
    wide = f" +/- {row['spread']:.1f}" if row["spread"] is not None else ""
    return f"{row['accuracy']:.1f}{wide}"


def share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def number_text(value: float | None, form: str = "g") -> str:
    return "-" if value is None else f"{value:{form}}"
