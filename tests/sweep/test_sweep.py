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


def recorded() -> dict[str, dict]:
    return {row["model"]: row for row in json.loads(RESULTS.read_text())["rows"]}


def share() -> list:
    known = recorded()
    quick = [e for e in entries() if known.get(e.key, {}).get("parameters", LARGEST) < QUICK]
    return quick[::EVERY]


@pytest.mark.parametrize("entry", share(), ids=lambda entry: entry.key)
def test_a_share_of_the_architectures_votes_as_recorded(entry) -> None:
    (found,) = measure(entry, [torch.float64])["dtypes"].values()
    assert not found.get("crashed")
    assert not found["wrong"]
    assert found["way"] == recorded()[entry.key]["dtypes"]["float64"]["way"]


@pytest.mark.parametrize("dtype", COUNTED)
def test_the_last_sweep_found_nothing_wrong(dtype: str) -> None:
    built = [row for row in recorded().values() if row["built"]]
    one_pass, _, _, wrong, crashed = counts(built, dtype)
    assert (wrong, crashed) == (0, 0)
    assert one_pass >= 0.97 * len(built) > 400


def test_the_page_shows_the_last_sweep() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text(encoding="utf-8")
    assert ONE_PASS in PAGE.read_text(encoding="utf-8")
