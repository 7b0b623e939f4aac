"""Merge recipes: what is read, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradfix.errors import CorruptInput, UsageError
from gradfix.merging.recipes import load_recipe
from gradfix.system.yamlfile import load_yaml

RECIPE = """
target: new-base
vectors:
  - {base: old, tuned: a, weight: 0.5}
  - {base: older, tuned: b}
method: ties
density: 0.3
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "merge.yml"
    path.write_text(text)
    return path


def test_a_recipe_is_read_and_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, RECIPE), out="somewhere", target=None)
    assert recipe.target == "new-base" and recipe.out == "somewhere"
    assert [(v.base, v.tuned, v.weight) for v in recipe.vectors] == [("old", "a", 0.5), ("older", "b", 1.0)]
    assert recipe.densities() == 0.3
    assert (recipe.settled_order(), recipe.settled_alpha()) == ("plain", 1.0)
    with pytest.raises(ValidationError):
        recipe.method = "mean"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("vectors", "order", "alpha"),
    [
        ("- {base: o, tuned: a, votes: v}\n- {base: p, tuned: b, votes: v}", "mask_then_merge", 1.0),
        ("- {base: o, tuned: a, votes: v}\n- {base: o, tuned: b, votes: w}", "merge_then_mask", 1.0),
        ("- {base: o, tuned: a, data: d, task: zero-shot}\n- {base: p, tuned: b, data: d, task: zero-shot}",
         "mask_then_merge", "auto"),
    ],
)  # fmt: skip
def test_defaults_follow_the_vectors(tmp_path: Path, vectors: str, order: str, alpha: Any) -> None:
    recipe = load_recipe(write(tmp_path, f"target: t\nvectors:\n{vectors}\n"))
    assert (recipe.settled_order(), recipe.settled_alpha()) == (order, alpha)


def test_a_vector_may_have_a_density_of_its_own(tmp_path: Path) -> None:
    text = "target: t\ndensity: 0.5\nvectors:\n- {base: o, tuned: a, density: 0.1}\n- {base: o, tuned: b}\n"
    assert load_recipe(write(tmp_path, text)).densities() == [0.1, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RECIPE + "metod: mean\n", "no key called 'metod'.*Did you mean 'method'"),
        (RECIPE.replace("tuned: b", "tund: b"), r"vectors\[1\]: no key called 'tund'.*'tuned'"),
        (RECIPE + "method: mean\n", "line 8: key 'method' is already on line 6"),
        (RECIPE.replace("ties", "tise"), "no merge called 'tise'.*Did you mean 'ties'"),
        (RECIPE + "mask: agre\n", "no mask called 'agre'"),
        (RECIPE + "order: masked\n", "order"),
        (RECIPE + "alpha: auto\n", "alpha auto needs data"),
        (RECIPE.replace("ties", "mean"), "density means nothing to the merge 'mean'"),
        (RECIPE.replace("0.3", "1.3"), "density"),
        ("target: t\nvectors: []\n", "vectors"),
        ("vectors:\n- {base: a, tuned: b}\n", "target is missing"),
        ("target: t\nvectors:\n- {base: a, tuned: b, data: d}\n", "needs a task"),
        ("target: t\norder: plain\nvectors:\n- {base: a, tuned: b, votes: v}\n", "order plain uses no votes"),
        ("- a list\n", "must hold settings"),
        ("target: [\n", "line 2"),
        ("a: !!python/object/apply:os.system ['touch canary']\n", "constructor"),
        ("a: &x {b: 1}\nc: *x\n", "aliases"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value) and "merge.yml" in str(caught.value)
    assert not Path("canary").exists()


def test_files_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_yaml(tmp_path / "none.yml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(CorruptInput, match="cannot be read as text"):
        load_yaml(tmp_path / "binary.yml")
    assert load_yaml(write(tmp_path, "")) == {}
