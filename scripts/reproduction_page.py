"""docs/reproduction.md from the stored runs, benchmarks/results/reproduce_*.json: `python -m scripts.reproduction_page`.

Nothing in that page is typed in that a run could contradict: verdicts, figures and tables come from the files."""

from __future__ import annotations

import json
from collections import Counter
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
REAL = "encoders"  # the suite of released models that the page opens with
MAIN = (
    "unrelated: plain addition stays at the level of the untouched target.",
    "unrelated: GradFix beats plain addition with 1 example per class.",
    "unrelated: GradFix beats one AdamW step at 1e-5 on the same examples.",
    "unrelated: GradFix beats few-shot fine-tuning whose rate and steps are tuned (stronger than the paper's baseline).",
    "unrelated: GradFix beats a random vector under the same mask.",
    "unrelated: the oracle mask is an upper bound of GradFix.",
    "several tasks, task arithmetic: merge-then-mask improves on merging without a mask.",
    "With voted signs, agreement beats forcing.",
    "The majority vote beats the mean vote at every alpha.",
    "Agreement with the target's own task vector grows with the budget.",
    "GradFix keeps the target's accuracy on the support set (within two points).",
    "unrelated: GradFix varies less over seeds than the AdamW step.",
)
Run = Mapping[str, Any]


def stored() -> list[Run]:
    """The runs there are, in the order of `ABOUT`."""
    files = (ROOT / "benchmarks" / "results" / f"reproduce_{suite}.json" for suite in ABOUT)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def document(runs: Sequence[Run]) -> str:
    """The whole page."""
    verdicts = [_in_short(runs)]
    for verdict, (title, meaning) in SECTIONS.items():
        verdicts.append(_verdict_section(verdict, f"\n## {title}\n\n{meaning}\n\n", runs))
    verdicts.append(_beyond(runs))
    tables = []
    for run in runs:
        tables.append(f"\n# Tables of the {run['suite']} suite\n")
        for name, table in _measured(run).items():
            tables.append(f"\n{markdown(table)}\n`{_command(name, run)}`\n")
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return page.format(
        suites="\n".join(map(_about, runs)),
        counts="\n".join(map(_counts, runs)),
        verdicts="".join(verdicts),
        tables="".join(tables),
    )


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
    found = Counter(claim["holds"] for table in run["tables"].values() for claim in table["claims"])
    told = f"{found[HOLDS]} hold, {found[PARTLY]} hold partly and {found[FAILS]} do not"
    return f"Of {found.total()} claims on the {run['suite']} suite {told}."


def _in_short(runs: Sequence[Run]) -> str:
    """What the suite of real models found about the paper's main claims, and what its best methods reach."""
    run = next((run for run in runs if run["suite"] == REAL), None)
    if run is None:
        return ""
    claims = {claim["text"]: claim for table in run["tables"].values() for claim in table["claims"]}
    lines = [f"\n## On real models, in short\n\nThe paper's main claims on the {REAL}, as they come out:\n\n"]
    for verdict in (HOLDS, PARTLY, FAILS):
        told = [claims[name] for name in MAIN if name in claims and claims[name]["holds"] == verdict]
        lines += [f"- **{verdict}**: {claim['text'].rstrip('.')}: {claim['evidence']}.\n" for claim in told]
    names = [METHODS[method].title for method in (FLOOR, "gradfix", "few_shot", *BEYOND, CEILING)]
    means = _means(run)
    lines.append(
        "\nBeside it what the other methods reach, mean accuracy over the tasks ([more](#beyond-the-paper)):\n\n"
    )
    for pair, shots in {pair: (pair, shots) for pair, shots in means}.values():
        told = [f"{name} {text(means[pair, shots].get(name))}" for name in names]
        lines.append(f"- **{pair}**, {shots} per class: {', '.join(told)}.\n")
    return "".join(lines)


def _verdict_section(verdict: str, title: str, runs: Sequence[Run]) -> str:
    """Every claim once, with what each suite found about it."""
    rows = []
    for claim, (labels, found) in _by_claim(runs).items():
        verdicts = {one["holds"] for one in found.values() if one["holds"]}
        if (verdicts.pop() if len(verdicts) == 1 else PARTLY if verdicts else None) != verdict:
            continue
        cells = [_cell(found[run["suite"]]) if run["suite"] in found else "-" for run in runs]
        rows.append(f"| {claim} | {' | '.join(cells)} | {', '.join(labels)} |\n")
    header = ["claim", *(run["suite"] for run in runs), "paper"]
    return title + f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n" + "".join(rows) if rows else ""


def _by_claim(runs: Sequence[Run]) -> dict[str, tuple[dict[str, None], dict[str, Any]]]:
    """By its text: where the paper makes a claim, and each suite's verdict and evidence."""
    found: dict[str, tuple[dict[str, None], dict[str, Any]]] = {}
    for run in runs:
        for table in run["tables"].values():
            for claim in table["claims"]:
                labels, verdicts = found.setdefault(claim["text"], ({}, {}))
                labels[table["paper"]["label"]] = None
                verdicts[run["suite"]] = claim
    return found


def _cell(claim: Mapping[str, Any]) -> str:
    return f"**{claim['holds'] or 'not measured'}**: {claim['evidence']}"


def _beyond(runs: Sequence[Run]) -> str:
    """Means over the tasks, the methods that are not in the paper beside those that are."""
    names = [METHODS[method].title for method in (FLOOR, *BUDGETED, *BEYOND, CEILING)]
    lines = [
        f"| {run['suite']} | {pair} | {shots} | {' | '.join(text(means.get(name)) for name in names)} |\n"
        for run in runs
        for (pair, shots), means in _means(run).items()
    ]
    header = ["suite", "pair", "per class", *names]
    title = (
        "\n## Beyond the paper\n\nMean test accuracy over the tasks, from the transport tables. Alpha is chosen on the "
        "validation split, whose inputs BiCo and the best recipe also read, without labels. A dash: not in that run.\n\n"
    )
    return title + f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n" + "".join(lines)


def _means(run: Run) -> dict[tuple[str, int], dict[str, float]]:
    """By pair and budget, every method's mean over the tasks; methods without a budget stand in each."""
    means: dict[tuple[str, int], dict[str, float]] = {}
    for table in [table for name, table in _measured(run).items() if name.startswith("transport_")]:
        column = table["header"].index("mean")
        for pair, shots in dict.fromkeys((row[0], row[2]) for row in table["rows"] if row[2]):
            rows = [row for row in table["rows"] if row[0] == pair and row[2] in (None, shots)]
            means[pair, shots] = {row[1]: row[column] for row in rows}
    return means


if __name__ == "__main__":
    write_text(PAGE, document(stored()))
