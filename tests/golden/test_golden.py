"""The public surface gives the results that golden.json holds.

Exact: bytes of written weights, votes, merges, counts, fates, exit codes, names of chosen methods, alphas and
margins. With a tolerance (see `sections.py`): accuracies and validation scores, by one example, because they
pass through training or through float32 on the embedded models; norms, by a relative 1e-4. Messages are held
to a phrase. Only `import gradfix` and the command line are used, so the modules inside may move freely.

A result that changes on purpose is frozen anew by `python -m tests.golden SECTION`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.sections import FILE, SECTIONS, WORLDS, differences, make_section

FROZEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = WORLDS[name](tmp_path_factory.mktemp("golden") / name)
        return made[name]

    return get


@pytest.mark.parametrize("name", SECTIONS)
def test_results_are_the_frozen_ones(name: str, world: Callable[[str], Path], tmp_path: Path) -> None:
    fresh = make_section(name, world(SECTIONS[name][0]), tmp_path / "out")
    found = list(differences(FROZEN[name], json.loads(json.dumps(fresh))))
    assert not found, "\n".join(found)


def test_every_section_is_frozen() -> None:
    assert set(FROZEN) == set(SECTIONS)


def test_a_difference_is_seen() -> None:
    frozen = {"rows": {"accuracy": 50.0, "alpha": 0.5, "files": ["a"]}}
    assert not list(differences(frozen, {"rows": {"accuracy": 51.0, "alpha": 0.5, "files": ["a"]}}))
    for change in ({"accuracy": 52.0}, {"alpha": 0.6}, {"files": ["b"]}, {"more": 1}):
        assert list(differences(frozen, {"rows": {**frozen["rows"], **change}}))
