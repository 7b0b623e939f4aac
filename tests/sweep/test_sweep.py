"""A share of the sweep, and what its last full run must have found."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.sweep.__main__ import PAGE, RESULTS
from tests.sweep.measure import CLOSE, ONE_PASS, measure
from tests.sweep.table import COUNTED, counts, table
from tests.sweep.zoo import entries

EVERY = 31
QUICK = 300_000  # weights
NOT_RUN = 0.02  # of the models, by their own library
BY_ROUNDING = 0.01  # fewer votes shared with the exact ones in 16 bits by `auto` than by the loop

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())
ROWS: list[dict[str, Any]] = RECORDED["rows"]


@pytest.mark.parametrize("name", [row["model"] for row in ROWS if 0 < row["parameters"] < QUICK][::EVERY])
def test_a_share_of_the_architectures_votes_as_recorded(name: str) -> None:
    row = measure(next(entry for entry in entries() if entry.key == name), [torch.float64])
    (known,) = [row for row in ROWS if row["model"] == name]
    if "float64" in row["refused"]:
        pytest.skip(row["refused"]["float64"])
    found = row["dtypes"]["float64"]
    assert "crashed" not in found
    assert not found["wrong"]
    assert found["way"] == known["dtypes"]["float64"]["way"]


@pytest.mark.parametrize("dtype", COUNTED)
def test_the_last_sweep_found_nothing_wrong(dtype: str) -> None:
    one_pass, partly, looped, wrong, crashed = counts(ROWS, dtype)
    assert (wrong, crashed) == (0, 0)
    assert one_pass >= 0.97 * (one_pass + partly + looped) > 450


def test_nearly_every_model_was_run() -> None:
    assert sum(not row["built"] for row in ROWS) <= NOT_RUN * len(ROWS)


def test_in_16_bits_the_two_engines_differ_by_rounding_alone() -> None:
    for row in ROWS:
        found = row["dtypes"].get("bfloat16", {"agreement": 1.0})
        if found["agreement"] < CLOSE:
            assert found["batched_exact"] > found["looped_exact"] - BY_ROUNDING, row["model"]


def test_the_page_shows_the_last_sweep() -> None:
    assert table(RECORDED) in PAGE.read_text(encoding="utf-8")
    assert ONE_PASS in PAGE.read_text(encoding="utf-8")
