"""Results as Markdown: the verdict, the table, the notes. Names are escaped, so they stay text in any renderer."""

from __future__ import annotations

import re
from typing import Any

from gradfix.methods.results import Results, is_spoken, measure_of, number_text, share_text
from gradfix.report.sections import baseline_wins, flops, headline, labelled, reasons, seconds

SPOKEN = {
    "loss per token": "test_loss", "token F1": "token_f1", "loss on general text": "general_loss",
    "divergence from the new base": "divergence",
}  # fmt: skip
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&])")


def safe(value: Any) -> str:
    """Text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", re.sub(r"\s+", " ", str(value)).strip())


def to_markdown(results: Results, title: str = "What to ship") -> str:
    lines = [f"# {safe(title)}", ""]
    for pair in results.pairs():
        verdicts = [verdict for verdict in results.verdicts if verdict["pair"] == pair]
        main = max(verdicts, key=lambda verdict: verdict["shots"])
        if pair is not None:
            lines += [f"## {safe(str(pair).capitalize())}", ""]
        lines += [f"**{safe(headline(main))}.** {safe(reasons(main))}", ""]
        caution = baseline_wins(main, results)
        if caution:
            lines += [safe(caution), ""]
        for verdict in verdicts:
            lines += _table(results, pair, verdict)
    if results.notes:
        lines += ["Notes", "", *(f"- {safe(note)}" for note in results.notes), ""]
    return "\n".join(lines)


def _table(results: Results, pair: str | None, verdict: dict[str, Any]) -> list[str]:
    rows = [r for r in results.summary_rows() if r["pair"] == pair and r["shots"] == verdict["shots"]]
    besides = list(dict.fromkeys(name for row in rows for name in row["measures"]))
    spoken = SPOKEN if any(map(is_spoken, rows)) else {}
    lines = [
        f"{labelled(verdict['shots'], rows)}, {verdict['seeds']} " + ("seed" if verdict["seeds"] == 1 else "seeds"),
        "",
        f"| method | held out | {' | '.join(map(safe, [measure_of(verdict), *besides, *spoken]))} | recovered | alpha | seconds | FLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|" + "---:|" * len([*besides, *spoken]),
    ]
    own = results.had_row(pair)
    for row in [*([own] if own is not None else []), *rows]:
        wide = f" ± {row['spread']:.1f}" if row["spread"] is not None else ""
        held = number_text(row["validation_accuracy"], ".1f")
        more = "".join(f" | {number_text(row['measures'].get(one), '.1f')}" for one in besides)
        more += "".join(f" | {number_text(row[key], '.3f')}" for key in spoken.values())
        name = safe(row["title"])
        name = f"**{name}**" if row["method"] == verdict["method"] else name
        lines.append(
            f"| {name} | {held} | {number_text(row['accuracy'], '.1f')}{wide}{more} | {share_text(row['recovered'])} | "
            f"{number_text(results.shown_alpha(row))} | {'-' if row['seconds'] is None else seconds(row['seconds'])} | {flops(row['flops']) or '-'} |"
        )
    return [*lines, ""]
