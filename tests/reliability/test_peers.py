"""The table of `docs/reliability.md`: the same faults given to gradfix, mergekit and plain transformers.

mergekit is looked for in this interpreter and in GRADFIX_MERGEKIT_PYTHON, else installed into an environment of
its own, which takes minutes and a package index."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("peers.py")
RECORDED = ROOT / "benchmarks" / "results" / "peers.json"


def ask(python: str, tool: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [python, str(SCRIPT), tool, str(folder)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout[done.stdout.index("{\n") :])


@pytest.fixture(scope="session")
def mergekit_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("GRADFIX_MERGEKIT_PYTHON")
    if given or importlib.util.find_spec("mergekit"):
        return given or sys.executable
    home = tmp_path_factory.mktemp("mergekit")
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "mergekit"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mergekit cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return python


def test_gradfix_refuses_every_fault(tmp_path: Path) -> None:
    results = ask(sys.executable, "gradfix", tmp_path / "work")["results"]
    assert results.pop("nothing wrong")["exit"] == 0
    assert results.pop("killed while writing")["half_an_output"] == 0
    named = results.pop("config that names code")  # only weights are merged: the code is neither run nor copied
    assert named["exit"] == 0 and not named["ran_code"]
    for name, found in results.items():
        assert found["exit"] in {2, 3, 4, 6, 8}, (name, found)
        assert found["said"].startswith("gradfix: "), (name, found)
        assert not found["ran_code"] and not found["inputs_changed"], (name, found)
        kept = "there, but unreadable (SafetensorError)"  # the user's own folder, left as it was
        assert found["output"] == (kept if name == "output folder not empty" else "none"), (name, found)


@pytest.mark.mergekit
def test_peers_do_what_the_table_says(mergekit_python: str, tmp_path: Path) -> None:
    """Exit status and output of each peer as recorded; another version may differ, and then the table is old."""
    recorded = {entry["tool"]: entry for entry in json.loads(RECORDED.read_text())["tools"]}
    for tool, python in (("mergekit", mergekit_python), ("transformers", sys.executable)):
        found = ask(python, tool, tmp_path / tool)
        if found["versions"][tool] != recorded[tool]["versions"][tool]:
            pytest.skip(f"{tool} {found['versions'][tool]} is not the version of the table")
        for name, before in recorded[tool]["results"].items():
            now = found["results"][name]
            assert (now.get("exit"), now.get("output")) == (before.get("exit"), before.get("output")), name
