"""The verdict: which method to ship, in words a person can act on.

The choice is made by validation (or fold) answers alone. Methods that these cannot tell apart are a tie, which is said
with its interval and goes to the method that did best elsewhere. Test accuracy then checks the choice: one that is
below the target as it is there is not shipped. Headline, text and command all come from the method that is named.

Open answers are hardly ever right to the letter: of them the loss per token is the measure throughout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from gradfix.methods.leads import Lead, is_open, lead
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


def _worth(row: Row) -> float:
    """What a row is compared by on test: the accuracy, or of open answers how low the loss is."""
    if row.get("gain") != "loss":
        return float(row["accuracy"])
    return -math.inf if row.get("test_loss") is None else -float(row["test_loss"])


@dataclass(frozen=True)
class Chosen:
    """The method the held-out answers and the methods' standing lead to, and what it cannot be told from."""

    method: str
    tied: tuple[str, ...]
    refused: str | None = None  # chosen, but below the target as it is on test


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
    tested = all(row["accuracy"] is not None for row in rows)
    accuracy = {name: fmean(row["accuracy"] for row in group) for name, group in groups.items() if tested}
    worth = {name: fmean(map(_worth, group)) for name, group in groups.items() if tested}
    chosen = _settled(ranking, worth, groups, known)
    winner = chosen.method
    others = [name for name in ranking if name != winner and not known[name].control]
    following = next((name for name in others if name != chosen.refused), others[0] if others else None)
    over_next = worth[winner] - worth[following] if following and tested else None
    noise = _noise(groups, winner, following) if tested else None
    by_test = max(ranking, key=lambda name: worth[name]) if tested else None
    ahead = lead(groups[winner], groups[following]) if following else None
    tied = list(chosen.tied)
    if following and ahead is None and noise is not None and over_next is not None and abs(over_next) <= noise:
        tied = [following]  # the answers are not known: the seeds' spread on test must do
    verdict: dict[str, Any] = {
        "method": winner,
        "accuracy": accuracy.get(winner),
        "measure": str(rows[0].get("measure") or "accuracy"),
        **(
            {"gain": "loss", "loss": -worth[winner], "loss_before": -worth[FLOOR] if FLOOR in worth else None}
            if tested and is_open(rows)
            else {}
        ),
        "held_out": mean([row.get("validation_accuracy") for row in groups[winner]]),
        "recovered": mean([row.get("recovered") for row in groups[winner]]),
        "next": following,
        "lead": asdict(ahead) if ahead is not None else None,
        "tie": bool(tied),
        "tied": tied,
        "refused": chosen.refused,
        "margin_over_next": over_next,
        "over_zero_shot": accuracy[winner] - accuracy[FLOOR] if FLOOR in accuracy else None,
        "spread": noise,
        "test_error": None if is_open(rows) else _test_error(accuracy.get(winner), rows[0].get("test_samples")),
        "exceeds_spread": over_next is not None and noise is not None and over_next > noise,
        "cost_seconds": fmean(row["seconds"] for row in groups[winner]),
        "cost_flops": mean([row.get("flops") for row in groups[winner]]),
        "transport": not known[winner].stays and any(row["alpha"] != 0 for row in groups[winner]),
        "best_on_test": by_test,
        "test_agrees": worth[winner] >= worth[by_test] - 1e-9 if by_test else None,
        "regime": rows[0].get("regime"),
        "shots": rows[0].get("shots"),
        "pair": rows[0].get("pair"),
        "seeds": len(groups[winner]),
    }
    verdict["advice"] = _advice(verdict, titles, known)
    verdict["text"] = _words(verdict, worth, groups, titles, known)
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


def _choose(ranking: Sequence[str], groups: Mapping[str, Sequence[Row]], known: Mapping[str, Traits]) -> Chosen:
    """The leader, or of all that cannot be told from it a method that is favoured and not below the target."""
    leader = ranking[0]
    close = [name for name in ranking[1:] if not known[name].control and _tied(groups[leader], groups[name])]
    floor = _held(groups[FLOOR]) if FLOOR in groups else -math.inf
    able = [name for name in (leader, *close) if known[name].favoured and _held(groups[name]) >= floor]
    winner = able[0] if able else leader
    tied = [name for name in (leader, *close) if name != winner and _tied(groups[winner], groups[name])]
    return Chosen(winner, tuple(sorted(tied, key=lambda name: not known[name].favoured)))


def _settled(
    ranking: Sequence[str],
    accuracy: Mapping[str, float],
    groups: Mapping[str, Sequence[Row]],
    known: Mapping[str, Traits],
) -> Chosen:
    """The choice, or the target as it is where the choice moves nothing; one that scores below the target on test is
    refused, and the others are chosen among as if it had not been there."""
    chosen = _choose(ranking, groups, known)
    name = chosen.method
    if name == FLOOR or FLOOR not in groups:
        return chosen
    if not known[name].stays and all(row["alpha"] == 0 for row in groups[name]):
        return Chosen(FLOOR, tuple(other for other in chosen.tied if other != FLOOR))
    if name in accuracy and accuracy[name] < accuracy[FLOOR]:
        others = [other for other in ranking if other != name]
        return replace(_settled(others, accuracy, groups, known), refused=name)
    return chosen


def _held(group: Sequence[Row]) -> float:
    found = mean([row.get("validation_score" if is_open(group) else "validation_accuracy") for row in group])
    return -math.inf if found is None else round(found, 9)


def _tied(ours: Sequence[Row], theirs: Sequence[Row]) -> bool:
    found = lead(ours, theirs)
    return found is not None and found.tied


def _noise(groups: Mapping[str, Sequence[Row]], first: str, second: str | None) -> float | None:
    """The seeds' spread of the difference, paired by seed; None where there is one seed."""
    if second is None:
        return None
    theirs = {row["seed"]: _worth(row) for row in groups[second]}
    return spread([_worth(row) - theirs[row["seed"]] for row in groups[first] if row["seed"] in theirs])


def inline(title: str) -> str:
    """A title in the middle of a sentence; names with inner capitals keep theirs."""
    first, space, rest = title.partition(" ")
    return title if first[1:] != first[1:].lower() else f"{first.lower()}{space}{rest}"


def _test_error(accuracy: float | None, samples: int | None) -> float | None:
    """One standard error of an accuracy measured on so many examples."""
    return max(accuracy * (100 - accuracy) / samples, 0.0) ** 0.5 if samples and accuracy is not None else None


def chosen_on(verdict: Mapping[str, Any]) -> str:
    places = {
        "validation": "Chosen on the validation split",
        "few_shot": "Chosen on held-out folds of the few-shot set",
        "answers": "Chosen by the old fine-tune's answers to the unlabelled inputs",
    }
    return places.get(verdict["regime"], "Nothing was held out to choose it")


def _advice(verdict: Mapping[str, Any], titles: Mapping[str, str], known: Mapping[str, Traits]) -> str:
    """What to do, in one sentence; a lead that the examples do not bear out is called a tie."""
    winner = verdict["method"]
    if winner == FLOOR or (not known[winner].stays and not verdict["transport"]):
        return f"Do not transport: keep the target as it is{_tie(verdict, titles)}."
    name = inline(titles.get(winner, winner))
    if verdict["tie"]:
        return f"Ship {name}{_tie(verdict, titles)}."
    if known[winner].stays:
        return f"Ship {name}: on the same examples it does better than moving the old fine-tune."
    return f"Ship {name}."


def _tie(verdict: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    if not verdict["tie"]:
        return ""
    others = [inline(titles.get(other, other)) for other in verdict["tied"]]
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f" (a tie with {others[0]}{more})"


def _words(
    verdict: Mapping[str, Any],
    accuracy: Mapping[str, float],
    groups: Mapping[str, Sequence[Row]],
    titles: Mapping[str, str],
    known: Mapping[str, Traits],
) -> str:
    def name(method: str) -> str:
        return inline(titles.get(method, method))

    winner, following = verdict["method"], verdict["next"]
    text, how = [verdict["advice"]], f"{chosen_on(verdict)}{_ahead(verdict, known, name)}"
    if verdict["accuracy"] is None:
        there = "" if verdict["held_out"] is None else f"; it scores {verdict['held_out']:.1f}% there"
        text.append(f"{how}{there}. There is no test split: nothing has checked this choice.")
    else:
        score = f"{verdict['measure']} {verdict['accuracy']:.1f}%"
        if "loss" in verdict:
            score = f"loss per token {verdict['loss']:.3f}"
        text.append(f"{how}; test {score}{_gain(verdict)}.")
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


def _ahead(verdict: Mapping[str, Any], known: Mapping[str, Traits], name: Any) -> str:
    """The held-out lead in words: clear, or too small for so few answers."""
    if verdict["refused"] is not None:
        left = "; so few answers cannot tell the others apart" if verdict["tie"] else ""
        return f" was {name(verdict['refused'])}, and test refused it{left}"
    if verdict["lead"] is None:
        return ""
    ahead = Lead(**verdict["lead"])
    if not ahead.tied:
        return f", where it leads {name(ahead.over)} by {ahead.words()}"
    why = "the one that scored higher"
    if known[verdict["method"]].favoured:
        why = "what did better elsewhere"
    return (
        f", where {ahead.answers} answers are too few to tell it from {name(ahead.over)} ({ahead.words()}): "
        f"of the two it is {why}"
    )


def _gain(verdict: Mapping[str, Any]) -> str:
    parts = []
    if verdict.get("loss_before") is not None and verdict["method"] != FLOOR:
        parts.append(f"{verdict['loss_before']:.3f} as the target is")
    elif verdict["over_zero_shot"] is not None and verdict["method"] != FLOOR:
        parts.append(f"{verdict['over_zero_shot']:+.1f} points over the target as it is")
    if verdict["recovered"] is not None and verdict["method"] != FLOOR:
        parts.append(f"{100 * verdict['recovered']:.0f}% of the fine-tuning gain")
    return f" ({', '.join(parts)})" if parts else ""


def _against(verdict: Mapping[str, Any], following: str) -> str:
    gap, noise = verdict["margin_over_next"], verdict["spread"]
    sense = f"On test that is {_apart(verdict, gap)} against the next, {following}"
    if noise is None:
        return f"{sense}; one seed, so the spread is unknown: add seeds before trusting the order."
    if abs(gap) <= noise:
        return f"{sense}, within the seeds' spread of {_wide(verdict, noise)}: the two are not told apart."
    if gap < 0:
        return f"{sense}: behind it by more than the seeds' spread of {_wide(verdict, noise)}."
    error = verdict["test_error"]
    if error is not None and gap < error:
        return f"{sense}, more than the seeds' spread of {_wide(verdict, noise)} but less than the test set's own error of {error:.1f}."
    return f"{sense}, more than the seeds' spread of {_wide(verdict, noise)}."


def _apart(verdict: Mapping[str, Any], gap: float) -> str:
    return f"{-gap:+.3f} in loss per token" if "loss" in verdict else f"{gap:+.1f} points"


def _wide(verdict: Mapping[str, Any], noise: float) -> str:
    return f"{noise:.3f}" if "loss" in verdict else f"{noise:.1f}"


def _check(verdict: Mapping[str, Any], accuracy: Mapping[str, float], name: Any) -> str:
    refused = verdict["refused"]
    if "loss" in verdict:
        return _checked_loss(verdict, accuracy, name)
    if refused is not None:
        lost = accuracy[FLOOR] - accuracy[refused]
        return f"Test disagrees with the choice: {name(refused)} is {lost:.1f} points below the target as it is there."
    if verdict["test_agrees"]:
        return "Test agrees: nothing else scored higher there."
    top = verdict["best_on_test"]
    return f"On test {name(top)} was {accuracy[top] - verdict['accuracy']:.1f} points higher, which nobody could know."


def _checked_loss(verdict: Mapping[str, Any], worth: Mapping[str, float], name: Any) -> str:
    refused, top = verdict["refused"], verdict["best_on_test"]
    if refused is not None:
        more = worth[FLOOR] - worth[refused]
        return (
            f"Test disagrees with the choice: {name(refused)} has {more:.3f} more loss than the target as it is there."
        )
    if verdict["test_agrees"]:
        return "Test agrees: nothing else has a lower loss there."
    return f"On test the loss of {name(top)} was {worth[top] + verdict['loss']:.3f} lower, which nobody could know."


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
