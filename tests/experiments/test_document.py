"""docs/reproduction.md is what the stored run says, word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.reproduction_page import document

from gradfix.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "reproduce_pocket.json"


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_generated_from_the_stored_run(results):
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert page == document(results), "python -m scripts.reproduction_page RESULTS docs/reproduction.md"


def test_the_stored_run_holds_every_table(results):
    assert results["suite"] == "pocket"
    assert set(results["tables"]) == set(EXPERIMENTS)


def test_the_page_names_every_claim_and_its_verdict(results):
    page = document(results)
    for table in results["tables"].values():
        for claim in table["claims"]:
            assert claim["text"] in page
            assert claim["evidence"] in page
            assert claim["holds"] is not None


def test_claims_that_fail_come_first(results):
    page = document(results)
    assert page.index("## Does not hold here") < page.index("## Holds partly here") < page.index("## Holds here")
