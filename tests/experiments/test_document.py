"""docs/reproduction.md is what the stored runs say, word for word."""

from __future__ import annotations

import copy

import pytest
from scripts.reproduction_page import PAGE, document, stored

from gradfix.experiments import EXPERIMENTS
from gradfix.experiments.experiment import FAILS, HOLDS
from gradfix.methods.methods import METHODS


@pytest.fixture(scope="module")
def runs():
    return stored()


def test_the_page_is_generated_from_the_stored_runs(runs):
    assert PAGE.read_text(encoding="utf-8") == document(runs), "python -m scripts.reproduction_page"


def test_the_stored_runs_hold_every_table(runs):
    assert runs[0]["suite"] == "pocket"
    for run in runs:
        assert set(run["tables"]) == set(EXPERIMENTS)


def test_the_page_names_every_claim_and_its_verdict(runs):
    page = document(runs)
    for run in runs:
        for table in run["tables"].values():
            for claim in table["claims"]:
                assert claim["text"] in page
                assert f"**{claim['holds']}**: {claim['evidence']}" in page


def test_claims_that_fail_come_first(runs):
    page = document(runs)
    assert page.index("## Does not hold here") < page.index("## Holds partly here") < page.index("## Holds here")


def test_two_suites_stand_side_by_side(runs):
    """A claim that holds in one of them only holds partly; one that only one suite measured leaves a gap."""
    other = copy.deepcopy(runs[0]) | {"suite": "encoders"}
    first = other["tables"]["masks"]["claims"][0]
    assert first["holds"] == HOLDS
    first["holds"] = FAILS
    gone = other["tables"]["masks"]["claims"].pop()
    page = document([runs[0], other])
    row = next(line for line in page.splitlines() if line.startswith(f"| {first['text']} |"))
    assert row.index("**holds**") < row.index("**does not hold**")
    assert page.index("## Holds partly here") < page.index(row) < page.index("## Holds here")
    assert f"| {gone['text']} | **{gone['holds']}**: {gone['evidence']} | - |" in page


def test_the_methods_beyond_the_paper_are_told(runs):
    part = document(runs).split("## Beyond the paper")[1].split("\n# ")[0]
    assert METHODS["best"].title in part
    assert part.count("| pocket | unrelated |") == 3
