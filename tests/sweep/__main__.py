"""Every architecture of three libraries under the engines: `make sweep`.

Results go to benchmarks/results/sweep.json, line after line, and the table of docs/engines.md is made from them. A run that
was interrupted goes on where it stopped, unless it is told to start over."""

from __future__ import annotations

import argparse
import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.sweep.measure import alone, measured
from tests.sweep.table import write_table
from tests.sweep.zoo import entries

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "sweep.json"
PAGE = ROOT / "docs" / "engines.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--start-over", action="store_true", help="measure again what is measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    known: dict[str, Any] = {}
    if options.out.is_file() and not options.start_over:
        known = {row["model"]: row for row in json.loads(options.out.read_text())["rows"]}
    names = [entry.key for entry in entries()]
    todo = [name for name in names if options.only in name and (options.only or not known.get(name, {}).get("built"))]
    with get_context("spawn").Pool(options.processes, alone, maxtasksperchild=40) as pool:
        for row in pool.imap_unordered(measured, todo):
            known[row["model"]] = row
            print(row["model"], _line(row), flush=True)
            _save(options.out, [known[name] for name in names if name in known])
    if options.out == RESULTS:
        write_table(RESULTS, PAGE)


def _line(row: dict[str, Any]) -> str:
    refused = [f"{name}: refused, {why}" for name, why in row["refused"].items()]
    return "; ".join([*(f"{name}: {_said(found)}" for name, found in row["dtypes"].items()), *refused])


def _said(found: dict[str, Any]) -> str:
    if "crashed" in found:
        return f"CRASHED {found['crashed']}"
    wrong = f" WRONG {found['wrong']}" if found.get("wrong") else ""
    close = f" {found['agreement']:.4f}" if "agreement" in found else f" {found['differing']:.1e}"
    return found["way"] + close + wrong + ("" if found["way"] == "one pass" else f" {found['notes']}")


def _save(path: Path, rows: list[Any]) -> None:
    import open_clip
    import timm
    import transformers

    versions = {module.__name__: module.__version__ for module in (torch, transformers, timm, open_clip)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
