"""Every experiment on a miniature suite: schema, figures, resume, names, and the paper's numbers beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.miniature import SHIFTS, Miniature
from gradfix import pocket
from gradfix.cli import run
from gradfix.errors import CorruptInput, UsageError
from gradfix.experiments import EXPERIMENTS, Reproduction, paper, plan_reproduce
from gradfix.experiments.experiment import FAILS, HOLDS, PARTLY, Claim, overall, verdict
from gradfix.experiments.measures import MEASURES
from gradfix.methods.methods import METHODS

FIGURES = {"alpha_sensitivity", "sign_agreement", "subset_selection"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture(scope="module")
def made(out: Path) -> Reproduction:
    return plan_reproduce(out=str(out), suite=Miniature()).run()


@pytest.fixture(scope="module")
def content(made: Reproduction) -> dict[str, Any]:
    return json.loads(json.dumps(made.as_json(), allow_nan=False))


def test_every_table_of_the_paper_is_an_experiment():
    assert set(EXPERIMENTS) == set(paper.LABELS)


@pytest.mark.parametrize("name", list(paper.LABELS))
def test_every_experiment_yields_a_whole_table(content, name):
    table = content["tables"][name]
    assert {"title", "header", "rows", "paper", "claim", "holds", "seconds"} <= set(table)
    assert table["rows"]
    assert all(len(row) == len(table["header"]) for row in table["rows"])
    assert table["paper"]["label"] == paper.LABELS[name]
    assert table["holds"] in (HOLDS, PARTLY, FAILS, None)
    assert all(claim["evidence"] for claim in table["claims"])
    assert (table["figure"] is not None) == (name in FIGURES)


def test_the_json_says_what_it_was_made_with(content):
    assert content["suite"] == "miniature"
    assert content["versions"]["torch"]


def test_a_text_table_on_images_says_why_it_is_empty(content):
    table = content["tables"]["transport_text"]
    assert table["holds"] is None
    assert "--suite t5" in table["rows"][0][0]


def test_the_paper_stands_beside_ours(content):
    table = content["tables"]["transport_vision"]
    column = table["header"].index("paper mean")
    found = {row[1]: row[column] for row in table["rows"] if row[2] in (None, 1)}
    assert found[METHODS["gradfix"].title] == pytest.approx(64.45, abs=0.01)
    assert found[METHODS["naive"].title] == pytest.approx(54.77, abs=0.01)


def test_a_method_that_cannot_run_leaves_a_gap_not_a_zero(content):
    rows = {row[1]: row for row in content["tables"]["transport_vision"]["rows"]}
    assert rows[METHODS["transfusion"].title][3] is None


def test_merging_covers_both_settings_and_every_pipeline(content):
    names = [row[1] for row in content["tables"]["merging"]["rows"]]
    for setting in ("several tasks", "several sources"):
        for combiner in ("task arithmetic", "TIES"):
            found = [name for name in names if name.startswith(f"{setting}, {combiner}, ")]
            assert len(found) == 3


def test_supervision_is_counted_from_the_data(content):
    row = content["tables"]["supervision"]["rows"][0]
    assert row[:5] == ["near", 60, 3, 1, pytest.approx(5.0)]


def test_flops_state_the_number_of_samples(content):
    table = content["tables"]["flops"]
    rows = {row[0]: row for row in table["rows"]}
    samples = rows[METHODS["gradfix"].title][table["header"].index("N")]
    assert samples == 9
    assert rows[METHODS["gradfix"].title][4] == 6 * samples + 2
    assert rows[METHODS["one_step"].title][4] == 6 * samples + 10


def test_the_oracle_mask_agrees_with_the_oracle_method(content):
    first = {row[1]: row[3] for row in content["tables"]["masks"]["rows"]}
    second = {row[1]: row[3] for row in content["tables"]["transport_vision"]["rows"]}
    assert first["oracle, agree"] == second[METHODS["oracle"].title]


def test_tables_and_figures_are_written(out, made):
    for name in paper.LABELS:
        assert (out / "tables" / f"{name}.json").is_file()
        assert (out / "tables" / f"{name}.md").read_text().startswith("## ")
    for name in FIGURES:
        assert (out / "figures" / f"{name}.svg").read_text().startswith("<?xml")
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "reproduction.json").read_text()) == made.as_json()


def test_tables_print_as_text_with_the_claims_last(made):
    *tables, claims = made.tables()
    assert len(tables) == len(paper.LABELS)
    assert all(isinstance(cell, str) for _, _, rows in tables for row in rows for cell in row)
    assert claims[0] == "Claims of the paper"


def test_finished_work_is_read_back(out, made):
    suite = Miniature()
    again = plan_reproduce(out=str(out), suite=suite).run()
    assert suite.opened == 0
    assert again.as_json() == made.as_json()


def test_a_killed_run_loses_one_question(tmp_path, made, monkeypatch):
    """The run dies in its fourth measurement; the next one makes the rest and the same table."""
    calls = []
    real = MEASURES["method"]

    def dying(lab: Any, **given: Any) -> dict[str, Any]:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(lab, **given)

    config = {"table": "random_task_vector", "out": str(tmp_path)}
    monkeypatch.setitem(MEASURES._entries, "method", dying)
    with pytest.raises(KeyboardInterrupt):
        plan_reproduce(**config, suite=Miniature()).run()
    finished = len(list((tmp_path / "units").iterdir()))
    assert finished == 3
    monkeypatch.setitem(MEASURES._entries, "method", real)
    table = plan_reproduce(**config, suite=Miniature()).run().as_json()["tables"]["random_task_vector"]
    assert table["rows"] == made.as_json()["tables"]["random_task_vector"]["rows"]


def test_a_damaged_unit_is_named(tmp_path):
    config = {"table": "supervision", "out": str(tmp_path)}
    plan_reproduce(**config, suite=Miniature()).run()
    unit = next((tmp_path / "units").iterdir())
    unit.write_text("{")
    with pytest.raises(CorruptInput, match=unit.name):
        plan_reproduce(**config, suite=Miniature()).run()


def test_planning_asks_but_opens_nothing():
    suite = Miniature()
    job = plan_reproduce(suite=suite)
    assert suite.opened == 0
    assert len(set(job.questions)) == len(job.questions)
    assert job.estimate.words.startswith(f"{len(job.questions)} ")


def test_experiments_share_their_questions():
    alone = sum(len(plan_reproduce(n, Miniature()).questions) for n in EXPERIMENTS)
    assert len(plan_reproduce(suite=Miniature()).questions) < alone / 1.3


@pytest.mark.parametrize(("field", "message"), [("table", "'masks'"), ("suite", "'pocket'")])
def test_unknown_names_get_a_suggestion(field, message):
    wrong = {"table": "mask", "suite": "poket"}[field]
    with pytest.raises(UsageError, match=f"Did you mean {message}"):
        plan_reproduce(**{field: wrong})


def test_the_command_answers_in_two_processes(tmp_path, capsys):
    """The embedded suite, a table that needs no measuring: workers start, answer and end."""
    out, results = tmp_path / "out", tmp_path / "results.json"
    code = run(["reproduce", "supervision", "--quick", "--out", str(out), "--json", str(results), "--quiet"])
    assert code == 0, capsys.readouterr().err
    table = json.loads(results.read_text())["tables"]["supervision"]
    assert [row[0] for row in table["rows"][::2]] == list(pocket.TASKS)
    assert table["rows"][0][4] == pytest.approx(100 * 10 / pocket.figures()["images"]["all"])
    assert len(list((out / "units").iterdir())) == len(pocket.TASKS)


def test_local_folders_are_refused_where_they_mean_nothing():
    with pytest.raises(UsageError, match="embedded"):
        plan_reproduce(local=("a/b=c",))
    with pytest.raises(UsageError, match="NAME=FOLDER"):
        plan_reproduce(suite="t5", local=("a/b",))


def test_the_verdict_needs_all_some_or_none():
    assert [verdict([True, True]), verdict([True, False]), verdict([False]), verdict([])] == [
        HOLDS, PARTLY, FAILS, None,
    ]  # fmt: skip
    assert overall([Claim("a", HOLDS, ""), Claim("b", FAILS, "")]) == PARTLY
    assert overall([Claim("a", FAILS, ""), Claim("b", None, "")]) == FAILS


def test_the_paper_numbers_average_to_the_papers_averages():
    """The tables print an average too: a typing mistake in a cell would show here."""
    printed = {
        ("ViT-B-16", "zero_shot", None): 54.45, ("ViT-B-16", "oracle", None): 85.71,
        ("ViT-B-16", "gradfix", 5): 67.57, ("ViT-B-16", "one_step", 50): 66.26,
        ("ViT-L-14", "fine_tuned", None): 95.31, ("ViT-L-14", "gradfix", 2): 68.61,
        ("ViT-L-14", "one_step", 2): 65.50, ("T5", "gradfix", 50): 58.48, ("T5", "naive", None): 42.12,
    }  # fmt: skip
    for (model, method, shots), value in printed.items():
        assert paper.average(paper.accuracies(model, method, shots)) == pytest.approx(value, abs=0.03)
    assert paper.average(paper.masks("force")) == pytest.approx(64.18, abs=0.01)
    assert paper.average(paper.merged("sources", "ties", "mask_then_merge")) == pytest.approx(67.13, abs=0.01)


def test_the_papers_shares_follow_from_its_sizes():
    """To rounding; the paper's DTD row is a little lower than its own sizes say."""
    for task, (samples, classes, shares) in paper.SUPERVISION.items():
        for shots, share in shares.items():
            room = 0.005 * share if task == "dtd" else 0.0
            assert 100 * shots * classes / samples == pytest.approx(share, abs=0.006 + room)


def test_two_tasks_are_measured(content):
    assert set(SHIFTS) <= set(content["tables"]["masks"]["header"])
