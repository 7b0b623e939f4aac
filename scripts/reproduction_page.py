"""docs/reproduction.md from the stored runs, benchmarks/results/reproduce_*.json: `python -m scripts.reproduction_page`.

Nothing in that page is typed in that a run could contradict: verdicts, figures and tables come from the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradfix.checkpoints.write import write_text
from gradfix.experiments.document import markdown
from gradfix.experiments.experiment import FAILS, HOLDS, PARTLY, text
from gradfix.experiments.tables import BEYOND, BUDGETED
from gradfix.methods.methods import CEILING, FLOOR, METHODS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
ABOUT = {
    "pocket": "vision transformers of about a million weights, embedded in the package; three corruptions of clothing "
    "images are the tasks, the clean images the support set.",
    "encoders": "released sentence encoders of 14 and 25 million weights (e5-small to gte-small, unrelated; "
    "all-MiniLM-L6 to every second layer of gte-small, related), fine-tuned for 400 steps; the polarity of film and "
    "product reviews and of tweets and 77 intents of bank customers are the tasks, and one with other labels is a task's "
    "support set.",
    "openclip": "the paper's vision models.",
    "t5": "the paper's text models.",
}
SECTIONS = {
    FAILS: ("Does not hold here", "In no suite that measured it."),
    PARTLY: ("Holds partly here", "In some comparisons, or in one suite only."),
    HOLDS: ("Holds here", "In every suite that measured it."),
}
Run = Mapping[str, Any]


def stored() -> list[Run]:
    """The runs there are, in the order of `ABOUT`."""
    files = (ROOT / "benchmarks" / "results" / f"reproduce_{suite}.json" for suite in ABOUT)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def document(runs: Sequence[Run]) -> str:
    """The whole page."""
    parts = [_counts(run) for run in runs]
    for verdict, (title, meaning) in SECTIONS.items():
        parts.append(_verdict_section(verdict, f"\n## {title}\n\n{meaning}\n\n", runs))
    parts.append(_beyond(runs))
    for run in runs:
        parts.append(f"\n# Tables of the {run['suite']} suite\n")
        for name, table in _measured(run).items():
            parts.append(f"\n{markdown(table)}\n`{_command(name, run)}`\n")
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return page.format(suites="\n".join(map(_about, runs)), content="".join(parts))


def _about(run: Run) -> str:
    words = "the quick grid: fewer seeds, budgets, alphas and test examples" if run["quick"] else "the full grid"
    minutes = float(run.get("measured_seconds", 0.0)) / 60
    made = f"Made by `{_command('all', run)}`: {words}, {minutes:.0f} minutes of measuring."
    return f"- **{run['suite']}**: {ABOUT[run['suite']]} {made}"


def _command(table: str, run: Run) -> str:
    folder = " --local encoders=FOLDER" if run["suite"] == "encoders" else ""
    return f"gradfix reproduce {table} --suite {run['suite']}{folder}{' --quick' if run['quick'] else ''}"


def _measured(run: Run) -> dict[str, Any]:
    return {name: table for name, table in run["tables"].items() if list(table["header"]) != ["not measured"]}


def _counts(run: Run) -> str:
    claims = [claim for table in run["tables"].values() for claim in table["claims"]]
    found = {verdict: sum(claim["holds"] == verdict for claim in claims) for verdict in (HOLDS, PARTLY, FAILS)}
    counted = ", ".join(f"{count}: {name}" for name, count in found.items())
    return f"\nOf {len(claims)} claims on the {run['suite']} suite, {counted}.\n"


def _verdict_section(verdict: str, title: str, runs: Sequence[Run]) -> str:
    """Every claim once, with what each suite found about it."""
    rows = []
    for claim, (label, found) in _by_claim(runs).items():
        verdicts = {one["holds"] for one in found.values() if one["holds"]}
        if (verdicts.pop() if len(verdicts) == 1 else PARTLY if verdicts else None) != verdict:
            continue
        cells = [_cell(found[run["suite"]]) if run["suite"] in found else "-" for run in runs]
        rows.append(f"| {claim} | {' | '.join(cells)} | {label} |\n")
    header = ["claim", *(run["suite"] for run in runs), "paper"]
    return title + f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n" + "".join(rows) if rows else ""


def _by_claim(runs: Sequence[Run]) -> dict[str, tuple[str, dict[str, Any]]]:
    """By its text: where the paper makes a claim, and each suite's verdict and evidence."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for run in runs:
        for table in run["tables"].values():
            for claim in table["claims"]:
                found.setdefault(claim["text"], (table["paper"]["label"], {}))[1][run["suite"]] = claim
    return found


def _cell(claim: Mapping[str, Any]) -> str:
    return f"**{claim['holds'] or 'not measured'}**: {claim['evidence']}"


def _beyond(runs: Sequence[Run]) -> str:
    """Means over the tasks, the methods that are not in the paper beside those that are."""
    names = [METHODS[method].title for method in (FLOOR, *BUDGETED, *BEYOND, CEILING)]
    lines = []
    for run in runs:
        tables = [t for name, t in _measured(run).items() if name.startswith("transport_")]
        for table in tables:
            where = {column: index for index, column in enumerate(table["header"])}
            means = {(row[0], row[1], row[2]): row[where["mean"]] for row in table["rows"]}
            for pair, shots in dict.fromkeys((pair, shots) for pair, _, shots in means if shots):
                cells = [means.get((pair, name, shots), means.get((pair, name, None))) for name in names]
                lines.append(f"| {run['suite']} | {pair} | {shots} | {' | '.join(map(text, cells))} |\n")
    header = ["suite", "pair", "per class", *names]
    title = "\n## Beyond the paper\n\nMean test accuracy over the tasks, from the transport tables.\n\n"
    return title + f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n" + "".join(lines)


if __name__ == "__main__":
    write_text(PAGE, document(stored()))
