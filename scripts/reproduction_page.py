"""docs/reproduction.md from a run's JSON: `python -m scripts.reproduction_page RESULTS.json docs/reproduction.md`.

Nothing in that page is typed in that the run could contradict: verdicts, figures and tables come from the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradfix.checkpoints.write import write_text
from gradfix.experiments.document import markdown
from gradfix.experiments.experiment import FAILS, HOLDS, PARTLY

VERDICTS = (HOLDS, PARTLY, FAILS)


def document(results: Mapping[str, Any]) -> str:
    """The whole page."""
    tables = results["tables"]
    quick = bool(results["quick"])
    flag = " --quick" if quick else ""
    command = f"gradfix reproduce all --suite {results['suite']}{flag}"
    words = "the quick grid: fewer seeds, budgets, alphas and test images" if quick else "the full grid"
    units = float(results.get("measured_seconds", 0.0))
    parts = [_counts(tables)]
    for name in VERDICTS[::-1]:
        parts.append(_verdict_section(name, tables, results["suite"], flag))
    parts.append("\n# Tables\n")
    for name, table in tables.items():
        parts.append(f"\n{markdown(table)}\n`gradfix reproduce {name} --suite {results['suite']}{flag}`\n")
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return page.format(suite=results["suite"], command=command, words=words, minutes=units / 60, content="".join(parts))


def _counts(tables: Mapping[str, Any]) -> str:
    claims = [claim for table in tables.values() for claim in table["claims"]]
    found = {verdict: sum(claim["holds"] == verdict for claim in claims) for verdict in VERDICTS}
    return f"\nOf {len(claims)} claims, " + ", ".join(f"{count}: {name}" for name, count in found.items()) + ".\n"


def _verdict_section(verdict: str, tables: Mapping[str, Any], suite: str, flag: str) -> str:
    rows = [
        f"| {claim['text']} | {claim['evidence']} | {table['paper']['label']} | "
        f"`gradfix reproduce {name} --suite {suite}{flag}` |\n"
        for name, table in tables.items()
        for claim in table["claims"]
        if claim["holds"] == verdict
    ]
    title = f"\n## {verdict.capitalize()} here\n\n"
    return title + "| claim | measured | paper | command |\n|---|---|---|---|\n" + "".join(rows) if rows else ""


if __name__ == "__main__":
    source, out = sys.argv[1:]
    write_text(Path(out), document(json.loads(Path(source).read_text(encoding="utf-8"))))
