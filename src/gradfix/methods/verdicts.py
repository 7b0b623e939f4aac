"""The verdict: which method to ship, in words a person can act on.

The choice is made by validation (or fold) score alone. Test accuracy then checks it, and the verdict says
when the two disagree. References are never candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from gradfix.methods.method import FLOOR, Traits
from gradfix.methods.methods import traits_of
from gradfix.training.costs import readable

Row = Mapping[str, Any]


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None for a single one, which has none."""
    return stdev(values) if len(values) > 1 else None


def judge(
    rows: Sequence[Row], titles: Mapping[str, str] | None = None, traits: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The verdict on the rows of one pair and one budget."""
    titles = titles or {}
    known = {row["method"]: traits_of(row["method"], (traits or {}).get(row["method"])) for row in rows}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["method"], []).append(row)
    ranking = _ranking({name: group for name, group in groups.items() if not known[name].reference})
    winner = ranking[0]
    tested = all(row["accuracy"] is not None for row in rows)
    accuracy = {name: fmean(row["accuracy"] for row in group) for name, group in groups.items() if tested}
    following = next((name for name in ranking[1:] if not known[name].control), None)
    over_next = accuracy[winner] - accuracy[following] if following and tested else None
    noise = _noise(groups, winner, following) if tested else None
    stays = known[winner].stays or all(row["alpha"] == 0 for row in groups[winner])
    by_test = max(ranking, key=lambda name: accuracy[name]) if tested else None
    verdict: dict[str, Any] = {
        "method": winner,
        "accuracy": accuracy.get(winner),
        "measure": str(rows[0].get("measure") or "accuracy"),
        "held_out": mean([row.get("validation_accuracy") for row in groups[winner]]),
        "recovered": mean([row.get("recovered") for row in groups[winner]]),
        "next": following,
        "margin_over_next": over_next,
        "over_zero_shot": accuracy[winner] - accuracy[FLOOR] if FLOOR in accuracy else None,
        "spread": noise,
        "test_error": _test_error(accuracy.get(winner), rows[0].get("test_samples")),
        "exceeds_spread": over_next is not None and noise is not None and over_next > noise,
        "cost_seconds": fmean(row["seconds"] for row in groups[winner]),
        "cost_flops": mean([row.get("flops") for row in groups[winner]]),
        "transport": not stays,
        "best_on_test": by_test,
        "test_agrees": accuracy[winner] >= accuracy[by_test] - 1e-9 if by_test else None,
        "regime": rows[0].get("regime"),
        "shots": rows[0].get("shots"),
        "pair": rows[0].get("pair"),
        "seeds": len(groups[winner]),
    }
    verdict["advice"] = _advice(verdict, titles, known)
    verdict["text"] = _words(verdict, accuracy, groups, titles)
    return verdict


def _ranking(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Best validation score first; equal scores go to doing nothing, then to the cheaper method.

    Cheaper by FLOPs, which are counted: the same inputs give the same verdict on a busy machine. Measured
    seconds decide only where nobody counted."""

    def key(name: str) -> tuple[float, bool, float, float]:
        group = groups[name]
        value = fmean(row["validation_score"] for row in group)
        flops = mean([row.get("flops") for row in group])
        cost = (math.inf, fmean(row["seconds"] for row in group)) if flops is None else (flops, 0.0)
        return (-round(value, 9), name != FLOOR, *cost)

    return sorted(groups, key=key)


def _noise(groups: Mapping[str, Sequence[Row]], first: str, second: str | None) -> float | None:
    """The seeds' spread of the difference, paired by seed; None where there is one seed."""
    if second is None:
        return None
    theirs = {row["seed"]: row["accuracy"] for row in groups[second]}
    return spread([row["accuracy"] - theirs[row["seed"]] for row in groups[first] if row["seed"] in theirs])


def inline(title: str) -> str:
    """A title in the middle of a sentence; names with inner capitals keep theirs."""
    first, space, rest = title.partition(" ")
    return title if first[1:] != first[1:].lower() else f"{first.lower()}{space}{rest}"


def _test_error(accuracy: float | None, samples: int | None) -> float | None:
    """One standard error of an accuracy measured on so many examples."""
    return (accuracy * (100 - accuracy) / samples) ** 0.5 if samples and accuracy is not None else None


def chosen_on(verdict: Mapping[str, Any]) -> str:
    places = {
        "validation": "Chosen on the validation split",
        "few_shot": "Chosen on held-out folds of the few-shot set",
        "answers": "Chosen by the old fine-tune's answers to the unlabelled inputs",
    }
    return places.get(verdict["regime"], "Nothing was held out to choose it")


def _words(
    verdict: Mapping[str, Any],
    accuracy: Mapping[str, float],
    groups: Mapping[str, Sequence[Row]],
    titles: Mapping[str, str],
) -> str:
    def name(method: str) -> str:
        return inline(titles.get(method, method))

    winner, following = verdict["method"], verdict["next"]
    text = [verdict["advice"]]
    if verdict["accuracy"] is None:
        there = "" if verdict["held_out"] is None else f", where it scores {verdict['held_out']:.1f}%"
        text.append(f"{chosen_on(verdict)}{there}. There is no test split: nothing has checked this choice.")
    else:
        text.append(f"{chosen_on(verdict)}; test {verdict['measure']} {verdict['accuracy']:.1f}%{_gain(verdict)}.")
        if following is not None:
            text.append(_against(verdict, name(following)))
        text.append(_check(verdict, accuracy, name))
    cost = f"It cost {_seconds(verdict['cost_seconds'])}"
    flops = verdict["cost_flops"]
    samples = groups[winner][0].get("samples")
    if flops:
        cost += f" and {readable(flops)}FLOPs" + (f" with N = {samples} labelled examples" if samples else "")
    text.append(cost + ".")
    return " ".join(text)


def _advice(verdict: Mapping[str, Any], titles: Mapping[str, str], known: Mapping[str, Traits]) -> str:
    """What to do, in one sentence; a lead within the seeds' spread is not called a win."""
    winner, following = verdict["method"], verdict["next"]
    name, other = inline(titles.get(winner, winner)), inline(titles.get(following, str(following)))
    tied = following is not None and _tied(verdict)
    stays = known[winner].stays
    if winner == FLOOR or (not stays and not verdict["transport"]):
        return "Do not transport: keep the target as it is."
    if stays and tied and not known[following].stays:
        return f"No need to transport: {name} on the same examples does as well as {other}."
    if stays and _behind(verdict):
        return f"Do not transport: {name} on the same examples scored best where the choice is made."
    if stays:
        return f"Do not transport: {name} on the same examples does better than moving the old fine-tune."
    return f"Ship {name}; {other} does as well." if tied else f"Ship {name}."


def _tied(verdict: Mapping[str, Any]) -> bool:
    """Whether the seeds' spread covers the difference to the next, whichever of the two is ahead."""
    gap, noise = verdict["margin_over_next"], verdict["spread"]
    return gap is not None and noise is not None and abs(gap) <= noise


def _behind(verdict: Mapping[str, Any]) -> bool:
    """Whether test puts the chosen method below the next by more than the seeds' spread."""
    gap = verdict["margin_over_next"]
    return gap is not None and verdict["spread"] is not None and gap < 0 and not _tied(verdict)


def _gain(verdict: Mapping[str, Any]) -> str:
    parts = []
    if verdict["over_zero_shot"] is not None and verdict["method"] != FLOOR:
        parts.append(f"{verdict['over_zero_shot']:+.1f} points over the target as it is")
    if verdict["recovered"] is not None and verdict["method"] != FLOOR:
        parts.append(f"{100 * verdict['recovered']:.0f}% of the fine-tuning gain")
    return f" ({', '.join(parts)})" if parts else ""


def _against(verdict: Mapping[str, Any], following: str) -> str:
    gap, noise = verdict["margin_over_next"], verdict["spread"]
    sense = f"On test that is {gap:+.1f} points against the next, {following}"
    if noise is None:
        return f"{sense}; one seed, so the spread is unknown: add seeds before trusting the order."
    if _tied(verdict):
        return f"{sense}, within the seeds' spread of {noise:.1f}: the two are not told apart."
    if _behind(verdict):
        return f"{sense}: behind it by more than the seeds' spread of {noise:.1f}."
    error = verdict["test_error"]
    if error is not None and gap < error:
        return f"{sense}, more than the seeds' spread of {noise:.1f} but less than the test set's own error of {error:.1f}."
    return f"{sense}, more than the seeds' spread of {noise:.1f}."


def _check(verdict: Mapping[str, Any], accuracy: Mapping[str, float], name: Any) -> str:
    lost = verdict["over_zero_shot"]
    if lost is not None and lost < 0 and verdict["method"] != FLOOR:
        return (
            f"Test disagrees: it is {-lost:.1f} points below the target as it is. Do not ship it without more labels."
        )
    if verdict["test_agrees"]:
        return "Test agrees: nothing else scored higher there."
    top = verdict["best_on_test"]
    return f"On test {name(top)} was {accuracy[top] - verdict['accuracy']:.1f} points higher, which nobody could know."


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
