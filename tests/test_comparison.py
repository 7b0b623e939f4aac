"""compare: every method runs, choices never see test, and a killed run goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from arenas import LABELS, dataset, setting
from gradfix.data import load_data
from gradfix.errors import DataError, IncompatibleCheckpoints, UsageError
from gradfix.methods import comparison as running
from gradfix.methods.comparison import compare
from gradfix.methods.methods import METHODS
from gradfix.methods.results import Results
from gradfix.methods.search import Score, Search, Setting
from gradfix.methods.trial import Splits, Trial
from gradfix.report import write_report
from gradfix.training.costs import Work
from gradfix.vectors.taskvector import TaskVector

SMALL = Search(alphas=(0.5, 1.0), wider=(2.0,), probes=(1.0,), margins=(0.0, 0.5, 1.0), rates=(1e-3, 1e-2),
               steps=(2, 4), folds=3)  # fmt: skip
ALIGNED = {"transfusion", "rebasin", "align_mask"}  # an MLP has no permutation spec
SPOKEN = {name for name, method in METHODS.items() if method.traits.open_only}


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    return setting()


def run(given: dict[str, Any], **options: Any) -> Results:
    return compare(**{**given, "search": SMALL, "shots": (3,), "seeds": (0, 1), **options})


@pytest.fixture(scope="module")
def validated(given) -> Results:
    return run(given)


@pytest.fixture(scope="module")
def folded(given) -> Results:
    return run(given, validation="none")


@pytest.mark.parametrize("name", sorted(set(METHODS) - ALIGNED - SPOKEN))
@pytest.mark.parametrize("regime", ["validation", "few_shot"])
def test_every_method_runs_in_both_regimes(validated, folded, name, regime):
    results = validated if regime == "validation" else folded
    mine = [row for row in results.rows if row["method"] == name]
    assert len(mine) == 2
    assert {row["regime"] for row in mine} == {regime}
    for row in mine:
        assert 0 <= row["accuracy"] <= 100
        assert row["seconds"] >= 0
        assert row["loss_before"] > 0
        assert json.dumps(row, allow_nan=False)


def test_methods_that_cannot_run_are_left_out_aloud(validated):
    assert not ALIGNED & {row["method"] for row in validated.rows}
    for name in ALIGNED:
        assert any(note.startswith(f"{name} was left out") for note in validated.notes)


def test_a_method_asked_for_by_name_must_run(given):
    with pytest.raises(IncompatibleCheckpoints):
        run(given, methods=["transfusion"])


def test_unknown_method_names_the_nearest(given):
    with pytest.raises(UsageError, match="Did you mean 'gradfix'"):
        run(given, methods=["gradfx"])


def test_the_target_comes_back_bit_identical(given):
    before = {name: p.clone() for name, p in given["target"].model.named_parameters()}
    run(given, methods=["gradfix", "few_shot", "veto_polish"], seeds=(0,))
    assert all(torch.equal(before[name], p) for name, p in given["target"].model.named_parameters())


def test_recovered_is_the_share_of_the_fine_tuning_gain(validated):
    accuracy = {row["method"]: row["accuracy"] for row in validated.rows if row["seed"] == 0}
    row = next(row for row in validated.rows if row["method"] == "gradfix" and row["seed"] == 0)
    gain = accuracy["fine_tuned"] - accuracy["zero_shot"]
    assert row["recovered"] == pytest.approx((row["accuracy"] - accuracy["zero_shot"]) / gain)


def test_test_answers_change_no_choice(given):
    """Every choice is the same when the test labels are shuffled."""
    honest = run(given, methods=["naive", "veto", "few_shot"], seeds=(0,))
    data = given["data"]
    wrong = [dict(row, label=LABELS[(LABELS.index(row["label"]) + 1) % 3]) for row in data.splits["test"]]
    other = load_data({**data.splits, "test": wrong}, labels=dict(data.labels))
    shuffled = run(given, methods=["naive", "veto", "few_shot"], seeds=(0,), data=other)
    chosen = [(r["method"], r["alpha"], r["margin"], r.get("rate"), r["validation_score"]) for r in honest.rows]
    assert chosen == [
        (r["method"], r["alpha"], r["margin"], r.get("rate"), r["validation_score"]) for r in shuffled.rows
    ]
    assert honest.verdict["method"] == shuffled.verdict["method"]


def test_without_validation_only_folds_are_looked_at(given, folded):
    """The same rows come out when there is no validation split at all."""
    bare = run(given, validation="none", data=dataset(validation=False), methods=["gradfix", "few_shot"])
    for row in bare.rows:
        twin = next(other for other in folded.rows if all(other[k] == row[k] for k in ("method", "shots", "seed")))
        assert (twin["alpha"], twin["accuracy"], twin["validation_accuracy"]) == (
            row["alpha"],
            row["accuracy"],
            row["validation_accuracy"],
        )


def test_no_validation_split_means_folds(given):
    results = run(given, data=dataset(validation=False), methods=["naive"], seeds=(0,))
    assert {row["regime"] for row in results.rows} == {"few_shot"}


def test_regimes_are_never_mixed(validated, folded):
    with pytest.raises(UsageError, match="cannot be compared"):
        Results.build([*validated.rows, *folded.rows], versions={})


def test_an_example_on_two_sides_is_refused(given):
    data = given["data"]
    leaked = {**data.splits, "test": [*data.splits["test"], dict(data.splits["validation"][0])]}
    with pytest.raises(DataError, match="same example"):
        run(given, data=load_data(leaked, labels=dict(data.labels)))


def test_without_a_test_split_it_chooses_and_says_so(given, tmp_path):
    train = given["data"].splits["train"]
    results = run(given, data=load_data({"train": train}), methods=["naive", "gradfix"])
    assert all(row["accuracy"] is None and row["validation_accuracy"] is not None for row in results.rows)
    assert results.verdict["accuracy"] is None and "no test split" in results.verdict["text"]
    assert any("has no test split" in note for note in results.notes)
    header, *cells = results.table()
    column = header.index("held out")
    assert all(cell[column] != "-" and cell[column + 1] == "-" for cell in cells)
    results.save(tmp_path / "r.json")
    page = write_report(Results.load(tmp_path / "r.json"), tmp_path / "r.html").read_text()
    assert "Held-out accuracy (there is no test split)" in page


def test_missing_train_split_is_named(given):
    with pytest.raises(DataError, match="has no train split"):
        run(given, data=load_data({"test": given["data"].splits["test"]}))


def test_votes_of_folds_add_up_to_the_votes_of_the_set(given):
    splits = given["data"].splits
    tau = TaskVector.between(given["base"], given["tuned"])
    trial = Trial(given["target"], tau, Splits(splits["train"], None, splits["test"]), search=SMALL)
    support = trial.support(4, 0)
    whole = support.votes(support.whole)
    assert whole.count == 12
    views = support.views()
    assert [len(view.fit) for view in views] == [8, 8, 8]
    total = sum(support.votes(view)["0.weight"].int() for view in views)
    assert torch.equal(total, 2 * whole["0.weight"].int())  # each example is in all folds but one
    mean = support.gradient(support.whole)
    parts = [support.gradient(view) for view in views]
    assert torch.allclose(sum(part["0.weight"] for part in parts) / 3, mean["0.weight"], atol=1e-6)


def test_equal_accuracies_go_to_the_lower_loss():
    better, worse = Score(5, 2.0, 10), Score(5, 2.5, 10)
    assert better.value > worse.value
    assert Score(6, 1e9, 10).value > better.value
    assert Score(5, float("nan"), 10).value < worse.value


class Killed(BaseException):
    """Stands in for SIGKILL: nothing catches it."""


def test_a_killed_run_loses_one_unit_and_gives_the_same_json(given, tmp_path):
    names = ["naive", "gradfix", "gradfix_mean", "veto", "few_shot"]
    whole = run(given, methods=names, work=tmp_path / "whole")

    def dies_at(count: int):
        def progress(what: str, now: int, total: int) -> None:
            if now == count:
                raise Killed

        return progress

    for stop in (2, 5, 9):
        with pytest.raises(Killed):
            run(given, methods=names, work=tmp_path / "cut", progress=dies_at(stop))
    files = sorted((tmp_path / "cut" / "units").iterdir())
    finished = [path.read_bytes() for path in files]
    assert len(files) == 7  # of nine units, zero_shot and naive of the second seed are shared with the first
    resumed = run(given, methods=names, work=tmp_path / "cut")
    assert [path.read_bytes() for path in files] == finished
    assert without_seconds(resumed) == without_seconds(whole)
    again = run(given, methods=names, work=tmp_path / "cut")
    assert again.to_json() == resumed.to_json()


def test_what_was_said_on_the_way_is_said_again(given, tmp_path):
    """A note of a shared product comes from the unit that made it, also when that unit is read back."""
    stray = {**dict(given["target_tuned"].state_dict()), "stray.weight": torch.ones(2)}
    start = {**dict(given["target"].model.state_dict()), "stray.weight": torch.zeros(2)}
    options = {"methods": ["oracle", "naive"], "seeds": (0,), "work": tmp_path}

    def compared() -> Results:
        inputs = {**given, "target_tuned": None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gradfix.methods.opening.in_full", lambda *_: (TaskVector.between(start, stray), Work()))
            return run(inputs, **options)

    first = compared()
    assert any("not in the target, first 'stray.weight'" in note for note in first.notes)
    assert compared().to_json() == first.to_json()
    for path in (tmp_path / "units").glob("oracle-*"):
        path.unlink()  # as if killed after the product was saved and before the unit was
    assert compared().notes == first.notes


def without_seconds(results: Results) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in results.rows]


def test_finished_units_are_not_done_again(given, tmp_path, monkeypatch):
    first = run(given, methods=["gradfix"], work=tmp_path)
    monkeypatch.setattr(running._Run, "_work", lambda *a, **k: pytest.fail("worked again"))
    assert run(given, methods=["gradfix"], work=tmp_path).to_json() == first.to_json()


def test_another_setting_reads_no_old_unit(given, tmp_path):
    first = run(given, methods=["naive"], work=tmp_path)
    finer = run(given, methods=["naive"], work=tmp_path, search=replace(SMALL, alphas=(0.1, 0.2), wider=()))
    alphas = [next(r["alpha"] for r in results.rows if r["method"] == "naive") for results in (first, finer)]
    assert alphas[1] <= 0.2 < alphas[0]


def test_costs_count_the_passes(given):
    """Measured FLOPs of GradFix: the vote, and every alpha on the validation split."""
    from gradfix.methods.methods import flops

    results = run(given, methods=["gradfix"], seeds=(0,), search=replace(SMALL, full=True))
    parameters = sum(p.numel() for p in given["target"].model.parameters())
    row = next(row for row in results.rows if row["method"] == "gradfix")
    curve = next(curve for curve in results.curves if curve["method"] == "gradfix")
    alphas = len(curve["points"])
    expected = flops("gradfix", parameters, 9, scored=60, settings=alphas) + parameters * 2 * (alphas - 2)
    assert row["flops"] == pytest.approx(expected)
    assert row["samples"] == 9


def test_without_a_tuned_target_the_target_is_fine_tuned(given, tmp_path):
    options = {"methods": ["oracle", "fine_tuned"], "seeds": (0,), "target_tuned": None, "work": tmp_path}
    before = {name: p.clone() for name, p in given["target"].model.named_parameters()}
    results = run(given, finetune={"steps": 30, "lr": 0.01, "batch_size": 60}, **options)
    accuracy = {row["method"]: row["accuracy"] for row in results.rows}
    assert accuracy["fine_tuned"] > accuracy["zero_shot"] + 20
    flops = {row["method"]: row["flops"] for row in results.rows}
    assert flops["fine_tuned"] > 30 * 60 * 6 * sum(p.numel() for p in before.values())
    assert all(torch.equal(before[name], p) for name, p in given["target"].model.named_parameters())


def test_the_references_are_left_out_when_nobody_may_fine_tune(given):
    results = run(given, methods=["oracle", "naive"], seeds=(0,), target_tuned=None, finetune=False)
    assert [row["method"] for row in results.rows] == ["zero_shot", "naive"]
    assert all(row["recovered"] is None for row in results.rows)
    assert any("oracle was left out" in note for note in results.notes)


def test_unlabelled_inputs_may_not_come_from_test(given):
    inputs = [{"text": row["text"]} for row in given["data"].splits["test"][:5]]
    with pytest.raises(DataError, match="same example"):
        run(given, methods=["best"], unlabelled=inputs)


def test_changed_examples_are_shown_with_their_answers(validated):
    (changed,) = validated.changed
    assert 0 < len(changed["examples"]) <= 12
    for example in changed["examples"]:
        assert example["before"] != example["after"]
        assert (example["after"] == example["label"]) == (example["kind"] == "repaired")


@pytest.mark.parametrize(
    ("peak", "tried"),
    [
        (0.5, {0.0, 0.5, 1.0}),
        (1.0, {0.0, 0.5, 1.0, 2.0}),
        (2.0, {0.0, 0.5, 1.0, 2.0, 4.0}),
        (9.0, {0.0, 0.5, 1.0, 2.0, 4.0}),
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_the_grid_widens_while_its_edge_is_best(given, monkeypatch, peak, tried, full):
    trial = trial_of(given, replace(SMALL, alphas=(0.5, 1.0), wider=(2.0, 4.0), full=full))
    asked = scored_by(trial, monkeypatch, lambda alpha: -abs(alpha - peak))
    choice = trial.choose(trial.support(3, 0), [Setting({}, lambda view: trial.tau)])
    assert {alpha for alpha, _ in asked} == tried
    assert choice.alpha == min(tried, key=lambda alpha: abs(alpha - peak))
    assert any("widened" in note for note in choice.notes) == (peak > 0.5)
    assert any("largest one tried" in note for note in choice.notes) == (peak > 4)


def trial_of(given: dict[str, Any], search: Search | None = None, validation: bool = True) -> Trial:
    splits = given["data"].splits
    return Trial(
        given["target"],
        TaskVector.between(given["base"], given["tuned"]),
        Splits(splits["train"], splits["train"] if validation else None, splits["test"]),
        search=search,
    )


def scored_by(trial: Trial, monkeypatch, height) -> list[tuple[float, int]]:
    """Scores that depend on alpha alone; returns what was asked: alphas, and examples at each."""
    first = {name: p.detach().clone() for name, p in trial.model.named_parameters()}
    entry = max(trial.tau, key=lambda name: float(trial.tau[name].abs().max()))
    at = trial.tau[entry].abs().argmax()
    asked: list[tuple[float, int]] = []

    def score(name: str) -> Score:
        now = dict(trial.model.named_parameters())[entry].detach()
        alpha = round(float((now - first[entry]).flatten()[at] / trial.tau[entry].flatten()[at]), 3)
        count = len(trial.examples[name])
        asked.append((alpha, count))
        return Score(count, (10 - height(alpha)) * count, count)

    monkeypatch.setattr(trial, "score", score)
    return asked


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("peak", [0.0, 0.1, 0.4, 0.7, 1.0, 2.0, 6.0])
def test_alpha_is_raced_in_five_passes(given, monkeypatch, validation, peak):
    trial = trial_of(given, validation=validation)
    asked = scored_by(trial, monkeypatch, lambda alpha: -abs(alpha - peak))
    support = trial.support(30, 0)
    choice = trial.choose(support, [Setting({}, lambda view: trial.tau)])
    assert choice.alpha == pytest.approx(peak, rel=0.5)
    judges = len(trial.splits.validation or support.examples)
    assert sum(count for _, count in asked) <= 5 * judges
    assert {score.count for score in choice.curve.points.values()} == {judges}
    assert set(choice.curve.points) > {0.0}


@pytest.mark.parametrize("validation", [True, False])
def test_a_handful_of_examples_is_not_raced_on(given, validation):
    """Losers are told by sixteen examples or more: fewer would throw the best alpha away by chance."""
    trial = trial_of(given, validation=validation)
    if validation:
        trial = Trial(trial.bound, trial.tau, replace(trial.splits, validation=trial.splits.validation[:12]))
    rungs = trial.support(4, 0).rungs()
    sizes = [sum(len(trial.examples[held]) for _, held in rung) for rung in rungs]
    assert sizes == [12]


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize(("peak", "margin"), [(0.4, 0.8), (2.0, 0.2), (1.0, 0.0)])
def test_margin_and_alpha_are_raced_together(given, monkeypatch, validation, peak, margin):
    trial = trial_of(given, validation=validation)
    made: list[float] = [0.0]

    def setting(knob: float) -> Setting:
        def make(view):
            made[0] = knob
            return trial.tau

        return Setting({"margin": knob}, make)

    asked = scored_by(trial, monkeypatch, lambda alpha: -abs(alpha - peak) - 2 * abs(made[0] - margin))
    support = trial.support(30, 0)
    choice = trial.choose(support, [setting(knob) for knob in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)])
    assert choice.setting.knobs == {"margin": margin}
    assert choice.alpha == pytest.approx(peak, rel=0.5)
    judges = len(trial.splits.validation or support.examples)
    assert sum(count for _, count in asked) <= (6 if validation else 7) * judges
