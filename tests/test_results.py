"""Results: aggregation, the verdict's words, and files that come back as they were."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gradfix.errors import CorruptInput, UsageError
from gradfix.methods.leads import lead, packed, unpacked
from gradfix.methods.results import Results, recovered
from gradfix.methods.search import Score, of_the_choice
from gradfix.methods.verdicts import judge


def row(method: str, accuracy: float, validation: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "pair": None, "task": "toy", "method": method, "shots": 5, "seed": seed, "accuracy": accuracy,
        "recovered": None, "alpha": 0.0 if method == "zero_shot" else 1.0, "margin": None, "seconds": 1.0,
        "regime": "validation", "validation_accuracy": validation, "validation_score": validation, "flops": 1e9,
        "samples": 10, "test_samples": 500, "notes": [], **more,
    }  # fmt: skip


def both(method: str, accuracies: tuple[float, float], validation: float, **more: Any) -> list[dict[str, Any]]:
    return [row(method, accuracy, validation, seed, **more) for seed, accuracy in enumerate(accuracies)]


BASE = [*both("zero_shot", (40.0, 40.0), 41.0), *both("fine_tuned", (90.0, 90.0), 91.0)]
CASES = {
    "a transport wins": (
        [*BASE, *both("gradfix", (70, 72), 70), *both("naive", (50, 50), 51)],
        {"method": "gradfix", "transport": True, "exceeds_spread": True, "test_agrees": True},
        ["Ship gradfix", "+31.0 points over", "62% of the fine-tuning gain", "more than the seeds' spread"],
    ),
    "within the spread": (
        [*BASE, *both("gradfix", (70, 72), 70), *both("naive", (72, 66), 69)],
        {"method": "gradfix", "exceeds_spread": False},
        ["Ship gradfix (a tie with naive).", "within the seeds' spread", "not told apart"],
    ),
    "few-shot wins": (
        [*BASE, *both("gradfix", (60, 60), 60), *both("few_shot", (75, 75), 74)],
        {"method": "few_shot", "transport": False},
        ["Ship few_shot: on the same examples it does better than moving"],
    ),
    "few-shot ties with a transport": (
        [*BASE, *both("gradfix", (70, 78), 73), *both("few_shot", (75, 74), 74)],
        {"method": "few_shot", "transport": False, "exceeds_spread": False},
        ["Ship few_shot (a tie with gradfix)."],
    ),
    "nothing helps": (
        [*BASE, *both("gradfix", (40, 40), 41, alpha=0.0), *both("naive", (39, 39), 40)],
        {"method": "zero_shot", "transport": False, "over_zero_shot": 0.0},
        ["Do not transport: keep the target"],
    ),
    "references are no candidates": (
        [*BASE, *both("oracle", (95, 95), 95), *both("gradfix", (50, 50), 55)],
        {"method": "gradfix", "test_agrees": True},
        ["Ship gradfix"],
    ),
    "test disagrees": (
        [*BASE, *both("gradfix", (50, 50), 60), *both("naive", (55, 55), 58)],
        {"method": "gradfix", "best_on_test": "naive", "test_agrees": False},
        ["On test naive was 5.0 points higher"],
    ),
    "a choice that hurts on test": (
        [*BASE, *both("gradfix", (35, 35), 60)],
        {"method": "zero_shot", "refused": "gradfix", "transport": False, "over_zero_shot": 0.0},
        ["keep the target as it is", "Test disagrees", "gradfix is 5.0 points below"],
    ),
    "one seed": (
        [row("zero_shot", 40, 40), row("gradfix", 60, 60)],
        {"method": "gradfix", "exceeds_spread": False, "spread": None, "recovered": None},
        ["one seed"],
    ),
    "folds": (
        [{**entry, "regime": "few_shot"} for entry in [*BASE, *both("veto", (60, 60), 60)]],
        {"method": "veto", "regime": "few_shot"},
        ["held-out folds"],
    ),
    "nothing held out": (
        [{**entry, "regime": "given"} for entry in [*BASE, *both("best", (60, 60), 60)]],
        {"method": "best", "regime": "given"},
        ["Nothing was held out to choose it"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case):
    rows, expected, words = CASES[case]
    verdict = Results.build(rows, versions={}).verdict
    assert {key: verdict[key] for key in expected} == expected
    for phrase in words:
        assert phrase in verdict["text"]


def test_verdict_has_the_contract_keys():
    verdict = judge(BASE)
    keys = {
        "method",
        "text",
        "recovered",
        "accuracy",
        "margin_over_next",
        "exceeds_spread",
        "cost_seconds",
        "transport",
    }
    assert keys <= set(verdict)


@pytest.mark.parametrize(
    ("accuracy", "zero", "tuned", "share"),
    [
        (70, 40, 90, 0.6),
        (40, 40, 90, 0.0),
        (30, 40, 90, -0.2),
        (95, 40, 90, 1.1),
        (50, 40, 40, None),
        (50, 40, None, None),
    ],
)
def test_recovered(accuracy, zero, tuned, share):
    assert recovered(accuracy, zero, tuned) == (None if share is None else pytest.approx(share))


def test_the_headline_is_the_largest_budget():
    rows = [*BASE, *both("gradfix", (60, 60), 60)]
    more = [{**entry, "shots": 50} for entry in [*BASE, *both("gradfix", (60, 60), 60), *both("veto", (80, 80), 80)]]
    results = Results.build([*rows, *more], versions={})
    assert results.verdict["method"] == "veto"
    assert [verdict["method"] for verdict in results.verdicts] == ["gradfix", "veto"]


def test_merge_keeps_pairs_apart():
    parts = [
        Results.build([{**entry, "pair": pair} for entry in [*BASE, *both("veto", (60, 70), score)]], versions={})
        for pair, score in (("unrelated", 60), ("related", 30))
    ]
    merged = Results.merge(parts)
    assert merged.pairs() == ["unrelated", "related"]
    assert merged.verdict["pairs"]["related"]["method"] == "zero_shot"
    assert merged.baselines["unrelated"]["zero_shot"] == 40
    assert "Unrelated: Ship veto" in merged.verdict["text"]
    with pytest.raises(UsageError, match="pair name"):
        Results.merge([parts[0], parts[0]])


def test_summary_has_mean_and_spread():
    results = Results.build([*BASE, *both("veto", (60, 70), 60)], versions={}, titles={"veto": "V", "zero_shot": "Z"})
    summary = {entry["method"]: entry for entry in results.summary_rows()}
    assert summary["veto"]["accuracy"] == 65
    assert summary["veto"]["spread"] == pytest.approx(7.0710678)
    assert summary["veto"]["recovered"] == pytest.approx(0.5)
    assert results.summary_rows()[0]["method"] == "veto"  # in the order of the titles


def test_saved_results_come_back(tmp_path):
    results = Results.build(BASE, versions={"gradfix": "0"}, notes=["<b>"])
    results.save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json") == results
    assert {"rows", "baselines", "verdict", "versions"} <= set(json.loads((tmp_path / "r.json").read_text()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": 3}', '{"rows": [], "odd": 1}', "\x00"])
def test_a_file_that_is_no_results_file_is_named(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CorruptInput, match="not a results file"):
        Results.load(tmp_path / "r.json")


def test_notebook_view_escapes():
    hostile = [*BASE, *both("<script>alert(1)</script>", (60, 60), 60)]
    assert "<script>" not in Results.build(hostile, versions={})._repr_html_()


def test_equal_scores_go_to_fewer_flops_however_busy_the_machine_was():
    dear = both("veto", (70, 70), 70, flops=2e9, seconds=1.0)
    cheap = both("gradfix", (70, 70), 70, flops=1e9, seconds=9.0)
    assert judge([*BASE, *dear, *cheap])["method"] == "gradfix"
    uncounted = [{**row, "flops": None} for row in (*dear, *cheap)]
    assert judge([*BASE, *uncounted])["method"] == "veto"


def answered(method: str, right: int, test: float, answers: int = 20, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A row whose first `right` of so many fold answers are right."""
    share = 100 * right / answers
    held = packed("1" * right + "0" * (answers - right))
    return row(method, test, share, seed, **{"held_right": held, "regime": "few_shot", **more})


FEW = [answered("zero_shot", 14, 69.0), answered("few_shot", 18, 61.5), answered("best", 17, 78.0)]


def test_one_example_is_a_tie_and_goes_to_the_favoured_method():
    """The wrong verdict that was seen: few-shot fine-tuning by 90 to 85 on 20 fold answers, 61.5 to 78.0 on test."""
    verdict = judge(FEW)
    assert verdict["method"] == "best" and verdict["tie"] and verdict["tied"] == ["few_shot", "zero_shot"]
    assert verdict["lead"]["points"] == pytest.approx(-5) and verdict["lead"]["low"] < 0 < verdict["lead"]["high"]
    assert "20 answers are too few to tell it from few_shot (-5.0 points, 95% interval" in verdict["text"]
    assert verdict["advice"].startswith("Ship best (a tie with few_shot")


def test_nothing_below_the_target_is_named():
    below = [answered("zero_shot", 14, 69.0), answered("few_shot", 16, 61.5), answered("best", 13, 78.0)]
    verdict = judge(below)
    assert verdict["method"] == "zero_shot" and verdict["refused"] == "few_shot"
    assert verdict["advice"] == "Do not transport: keep the target as it is (a tie with best)."
    assert "few_shot is 7.5 points below" in verdict["text"] and "Ship" not in verdict["text"]


def test_after_a_refusal_the_others_are_chosen_among():
    """Seen on the field test: ten fold answers led to a method that fails on test, and the best of all was not named."""
    rows = [
        answered("zero_shot", 8, 69.1, 10), answered("few_shot", 9, 52.3, 10), answered("best", 7, 80.3, 10),
        answered("naive", 8, 69.7, 10),
    ]  # fmt: skip
    verdict = judge(rows)
    assert verdict["refused"] == "few_shot" and verdict["method"] == "zero_shot"
    assert verdict["tie"] and verdict["tied"][0] == "best" and verdict["next"] == "naive"
    assert "so few answers cannot tell the others apart" in verdict["text"]
    better = [*rows[:2], answered("best", 8, 80.3, 10), rows[3]]
    assert judge(better)["method"] == "best" and judge(better)["refused"] is None
    alone = judge(rows[:2])
    assert alone["method"] == "zero_shot" and not alone["tie"] and alone["next"] == "few_shot"


def test_a_clear_lead_is_no_tie():
    clear = [answered("zero_shot", 60, 50, 200), answered("few_shot", 190, 90, 200), answered("best", 150, 75, 200)]
    verdict = judge(clear)
    assert verdict["method"] == "few_shot" and not verdict["tie"]
    assert "leads best by +20.0 points, 95% interval +1" in verdict["text"]


def test_more_answers_make_the_interval_narrower_and_two_seeds_of_one_validation_split_are_not_twice_as_many():
    few, many = (
        lead([answered("best", 9 * n, 70, 10 * n)], [answered("few_shot", 8 * n, 70, 10 * n)]) for n in (1, 40)
    )
    assert few.tied and not many.tied and few.points == many.points == pytest.approx(10)
    validation = {"regime": "validation"}
    ours = [answered("best", 18, 70, seed=seed, **validation) for seed in (0, 1)]
    theirs = [answered("few_shot", 16, 70, seed=seed, **validation) for seed in (0, 1)]
    assert lead(ours, theirs) == lead(ours[:1], theirs[:1])
    assert lead(ours, [{**entry, "held_right": None} for entry in theirs]) is None


def test_answers_come_back_from_a_results_file():
    assert unpacked(packed("0011010")) == [0, 0, 1, 1, 0, 1, 0]
    assert packed("") is None


@pytest.mark.parametrize("case", ["one example", *CASES])
def test_headline_text_and_command_agree(case):
    rows = CASES[case][0] if case in CASES else FEW
    from gradfix.commands.configs import CompareConfig
    from gradfix.commands.verdict import ship_command
    from gradfix.report.sections import headline

    verdict = Results.build(rows, versions={}).verdict
    config = CompareConfig(base="a", tuned="b", target="c", data="d", task="causal")
    command, advice = ship_command(config, verdict), headline(verdict)
    assert verdict["text"].startswith(advice)
    if verdict["method"] == "zero_shot":
        assert command is None and advice.startswith("Do not transport")
    else:
        assert command.endswith(f"--method {verdict['method']}") and advice.startswith(f"Ship {verdict['method']}")
        assert "do not" not in verdict["text"].lower()


def test_a_choice_by_folds_is_scored_by_the_other_folds():
    """Ten settings of pure chance: their best looks good on the folds that chose it, and is not."""
    flips = random.Random(0)
    settings = []
    for _ in range(40):
        folds = [[flips.random() < 0.5 for _ in range(4)] for _ in range(5)]
        scores = [Score(sum(f), float(4 - sum(f)), 4, "".join("01"[hit] for hit in f)) for f in folds]
        settings.append(sum(scores[1:], scores[0]))
    best, worth = max(score.accuracy for score in settings), of_the_choice(settings)
    assert best >= 70 and worth.accuracy < best - 10 and worth.count == 20 == len(worth.marks)
    whole = [Score(score.right, score.loss_sum, score.count, score.marks) for score in settings]
    assert of_the_choice(whole).accuracy == best  # a validation split has no folds to choose by
