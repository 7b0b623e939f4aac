"""The examples are short, run as they stand, and print what they promise."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
PROMISED = {
    "transport_in_memory": r"kept \d+%, alpha [\d.]+: [\d.]+ % -> [\d.]+ %",
    "transport_folders": r"of 200 test images",
    "one_vote_many_masks": r"half_ties keeps",
    "merge_two_bases": r"mask, then ties",
    "lora_adapter": r"test accuracy [\d.]+ % -> [\d.]+ %",
    "compare_methods": r"Plain addition",
}


def test_there_are_six_and_each_is_short():
    assert {path.stem for path in EXAMPLES} == set(PROMISED)
    for path in EXAMPLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 40, path.name


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    from gradfix.vectors.masks import MASKS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MASKS, "_entries", dict(MASKS._entries))  # an example may register one of its own
    left = runpy.run_path(str(path), run_name="__main__")
    assert re.search(PROMISED[path.stem], capsys.readouterr().out)
    if path.stem == "transport_folders":  # it loads like any other checkpoint, card and class names included
        assert Path("moved/README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name:")
        assert left["model"].config.id2label[0] != "LABEL_0"


@pytest.mark.usefixtures("short_lessons")
def test_the_notebook_goes_from_checkpoints_to_a_page(tmp_path, monkeypatch, capsys):
    """As it stands, cell by cell; outputs are not kept in the file."""
    notebook = json.loads((FOLDER / "first_hour.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    said = capsys.readouterr().out
    assert re.search(r"what you had [\d.]+ %, the new base as it is [\d.]+ %", said)
    assert space["after"] > space["before"] + 30
    assert "<html" in Path("report.html").read_text(encoding="utf-8") and space["results"]._repr_html_()
