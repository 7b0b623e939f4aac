"""A share of the sweep, and what its last full run must have found."""

from __future__ import annotations

import json

import pytest
import torch

from tests.sweep.__main__ import PAGE, RESULTS
from tests.sweep.measure import LARGEST, ONE_PASS, measure
from tests.sweep.table import COUNTED, counts, table
from tests.sweep.zoo import entries

EVERY = 31
QUICK = 300_000  # weights


needs_a_run = pytest.mark.skipif(not RESULTS.is_file(), reason="no sweep is recorded: make sweep")


def recorded() -> dict[str, dict]:
    if not RESULTS.is_file():
        return {}
    return {row["model"]: row for row in json.loads(RESULTS.read_text())["rows"]}


def share() -> list:
    known = recorded()
    quick = [e for e in entries() if known.get(e.key, {}).get("parameters", 0 if not known else LARGEST) < QUICK]
    return quick[::EVERY]


@pytest.mark.parametrize("entry", share(), ids=lambda entry: entry.key)
def test_a_share_of_the_architectures_votes_as_recorded(entry) -> None:
    row = measure(entry, [torch.float64])
    if not row["built"]:
        pytest.skip(row["why"])
    (found,) = row["dtypes"].values()
    assert not found.get("crashed")
    assert not found["wrong"]
    if known := recorded().get(entry.key):
        assert found["way"] == known["dtypes"]["float64"]["way"]


@needs_a_run
@pytest.mark.parametrize("dtype", COUNTED)
def test_the_last_sweep_found_nothing_wrong(dtype: str) -> None:
    built = [row for row in recorded().values() if row["built"]]
    one_pass, _, _, wrong, crashed = counts(built, dtype)
    assert (wrong, crashed) == (0, 0)
    assert one_pass >= 0.97 * len(built) > 400


@needs_a_run
def test_the_page_shows_the_last_sweep() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text(encoding="utf-8")
    assert ONE_PASS in PAGE.read_text(encoding="utf-8")
