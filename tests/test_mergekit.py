"""gradfix and mergekit on the same files: the table of docs/mergekit.md, made here.

GRADFIX_MERGEKIT_PYTHON is the interpreter of an environment that has mergekit. `python -m tests.test_mergekit` writes
the table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tests.conftest  # noqa: F401  as in the tests, also when run by hand
from gradfix.checkpoints.matched import TOKEN_TABLE, read_vocabulary
from gradfix.errors import GradfixError
from gradfix.merging.foreign import Job, mergekit_documents, run_document
from tests.mergekit_cases import CASES, Case, make_models, save

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mergekit.md"
BEGIN, END = "<!-- compared: begin -->", "<!-- compared: end -->"
HALF = 0.15  # two draws of one distribution: the norms of their changes differ by less
ROUNDING = {"arcee_fusion", "nearswap"}  # what bf16 leaves of their small numbers is rounding in mergekit

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One file under both tools: in float32, and as it is written."""

    case: Case
    equal: float | None = None  # share of entries with the same bits, float32
    apart: float | None = None  # relative to the change, float32
    written: float | None = None  # the same with the file's own dtype
    norms: tuple[float, float] = (0.0, 0.0)
    refused: tuple[str | None, str | None] = (None, None)  # theirs, ours

    def cells(self) -> list[str]:
        case = self.case
        if case.refused is not None:
            return [case.origin, case.label, "yes", "refused by both", "", ""]
        if case.random:
            ours, theirs = self.norms
            said = f"in distribution: change {ours:.2f} and {theirs:.2f} long"
            return [case.origin, case.label, "yes", said, "", ""]
        assert self.equal is not None and self.apart is not None and self.written is not None
        bits = "bit-equal" if self.equal == 1 else f"{self.apart:.0e}"
        return [
            case.origin,
            case.label,
            "yes",
            bits,
            f"{self.written:.0e}" if self.written else "bit-equal",
            _why(self),
        ]


def _why(row: Row) -> str:
    method = row.case.content["merge_method"]
    if not row.written or row.written < 1e-5:
        return ""
    if method in ROUNDING:
        return "mergekit computes in the file's dtype, and these numbers are smaller than its steps"
    return "mergekit computes in the file's dtype, gradfix in float32"


def interpreter() -> str:
    here = sys.executable if importlib.util.find_spec("mergekit") else None
    python = os.environ.get("GRADFIX_MERGEKIT_PYTHON", here)
    if python is None:
        pytest.skip("no environment with mergekit; see docs/mergekit.md")
    return python


def compare_all(home: Path, python: str) -> tuple[list[Row], dict[str, str]]:
    make_models(home)
    files = {(case.label, exact): save(case, home, exact) for case in CASES for exact in (True, False)}
    jobs = home / "jobs.json"
    jobs.write_text(json.dumps([[str(file), str(home / "theirs" / file.stem)] for file in files.values()]))
    done = subprocess.run(
        [python, str(ROOT / "tests" / "mergekit_run.py"), str(jobs)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout[done.stdout.rindex('{"failed"') :])
    return [_row(case, home, files, said["failed"]) for case in CASES], said["versions"]


def _row(case: Case, home: Path, files: dict[tuple[str, bool], Path], failed: dict[str, str]) -> Row:
    found: dict[bool, tuple[Weights, Weights]] = {}
    for exact in (True, False):
        file = files[case.label, exact]
        theirs, ours = home / "theirs" / file.stem, home / "ours" / file.stem
        try:
            run_document(Job(*mergekit_documents(file)), ours)
        except GradfixError as error:
            return Row(case, refused=(failed.get(str(theirs)), str(error)))
        if str(theirs) in failed:
            return Row(case, refused=(failed[str(theirs)], None))
        found[exact] = _load(theirs), _load(ours)
    base = case.content.get("base_model")
    start = _load(home / base) if isinstance(base, str) else {}
    equal, apart, _ = _distance(*found[True], start)
    _, written, _ = _distance(*found[False], start)
    return Row(case, equal, apart, written, (_length(found[True][1], start), _length(found[True][0], start)))


def _load(folder: Path) -> Weights:
    """Token tables in the order of the tokens' strings: a union adds its new tokens in any order in mergekit."""
    found = {n: t.double() for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    tokens = read_vocabulary(folder) if (folder / "tokenizer.json").is_file() else None
    if tokens is None:
        return found
    for name in [name for name in found if TOKEN_TABLE.search(name) and len(found[name]) >= len(tokens)]:
        rows = [row for _, row in sorted(tokens.items())]
        rest = [row for row in range(len(found[name])) if row not in set(rows)]
        found[name] = found[name][rows + rest]
    return found


def _change(weights: Weights, start: Weights) -> torch.Tensor:
    fits = {n for n in weights if n in start and start[n].shape == weights[n].shape}
    return torch.cat([(weights[n] - start[n] if n in fits else weights[n]).flatten() for n in sorted(weights)])


def _length(weights: Weights, start: Weights) -> float:
    return float(_change(weights, start).norm())


def _distance(theirs: Weights, ours: Weights, start: Weights) -> tuple[float, float, float]:
    assert {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in ours.items()}
    left, right = _change(theirs, start), _change(ours, start)
    gap = (left - right).abs()
    return float((gap == 0).double().mean()), float(gap.norm() / left.norm().clamp_min(1e-12)), float(gap.max())


def table(rows: list[Row], versions: dict[str, str]) -> str:
    words = ", ".join(f"{name} {number}" for name, number in versions.items())
    head = ["where mergekit has it", "file", "read", "float32", "as written", "why not"]
    lines = [f"Measured with {words}.", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row.cells()) + " |" for row in rows)])


@pytest.mark.mergekit
def test_mergekits_own_files_give_what_they_give_there(tmp_path: Path) -> None:
    rows, versions = compare_all(tmp_path, interpreter())
    for row in rows:
        case, (theirs, ours) = row.case, row.refused
        if case.refused is not None:
            assert theirs and ours and case.refused in ours, (case.label, theirs, ours)
        elif case.random:
            assert row.norms[0] == pytest.approx(row.norms[1], rel=HALF), case.label
        else:
            assert (theirs, ours) == (None, None), (case.label, theirs, ours)
            assert row.apart is not None and row.apart < case.tolerance, (case.label, row.apart)
    told = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    fresh = table(rows, versions).splitlines()
    assert [line.split("|")[1:5] for line in told[2:]] == [line.split("|")[1:5] for line in fresh[2:]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = table(*compare_all(Path(folder) / "files", interpreter()))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
