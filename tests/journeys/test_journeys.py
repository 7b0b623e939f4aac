"""Kinds of checkpoints x commands: each cell works, measured by plain code, or is refused for the stated reason.

By default a share of the cells runs, spread so that every kind and every command comes; JOURNEYS=all (which is
what `make journeys` sets) walks the whole table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.journeys.expected import PAGE, expected, page
from tests.journeys.walking import cells, disagreement, walk

CELLS = cells()
if os.environ.get("JOURNEYS") != "all":
    pytestmark = pytest.mark.usefixtures("short_lessons")


@pytest.mark.parametrize(("kind", "command"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_a_cell_is_as_the_table_says(kind: str, command: str, stable: Path, tmp_path: Path) -> None:
    problem = disagreement(walk(kind, command, stable, tmp_path), expected(kind, command))
    assert not problem, f"{kind} {command}: {problem}"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.journeys.expected --write`"
