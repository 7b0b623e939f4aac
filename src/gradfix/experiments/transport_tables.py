"""Transport: Tab. 1 (vision), Tab. 2 (text), the seed tables and the table of chosen alphas."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradfix.experiments import paper
from gradfix.experiments.experiment import Line, accuracy_table, both, experiment, fixed_line, seeded_line
from gradfix.experiments.lab import Book
from gradfix.experiments.suite import Suite
from gradfix.experiments.tables import CLEAR, Cell, Claim, Table, better, points, verdict

FIXED = ("zero_shot", "fine_tuned", "naive", "oracle", "transfusion")
BUDGETED = ("one_step", "few_shot", "gradfix")


def needs_vision(suite: Suite) -> str:
    return "" if suite.domain == "vision" else f"the {suite.name} suite has no images; use --suite openclip."


def needs_text(suite: Suite) -> str:
    return "" if suite.domain == "text" else f"the {suite.name} suite has no texts; use --suite t5."


@experiment("transport_vision", "Transport of task vectors, vision", needs_vision)
def transport_vision(book: Book) -> Table:
    return _transport(book, "Transport of task vectors, vision", "Tab. 1")


@experiment("transport_text", "Transport of task vectors, text", needs_text)
def transport_text(book: Book) -> Table:
    return _transport(book, "Transport of task vectors, text", "Tab. 2")


def _transport(book: Book, title: str, label: str) -> Table:
    lines: list[Line] = []
    claims: list[Claim] = []
    for pair in book.suite.pairs:
        fixed = {method: fixed_line(book, pair, method) for method in FIXED}
        budgeted = {
            (method, shots): seeded_line(book, pair, method, shots)
            for shots in book.grid.main
            for method in BUDGETED
        }
        lines += [*fixed.values(), *budgeted.values()]
        claims += _transport_claims(pair, fixed, budgeted, book.grid.main)
    header, rows = accuracy_table(book, lines)
    notes = [
        "Alpha is chosen on validation data and 0 is a candidate; few-shot fine-tuning with a tuned rate and "
        "step count is not in the paper."
    ]
    return Table(title, header, rows, {"label": label}, claims, notes=notes)


def _transport_claims(
    pair: str, fixed: dict[str, Line], budgeted: dict[tuple[str, int], Line], budgets: Sequence[int]
) -> list[Claim]:
    zero, naive = fixed["zero_shot"], fixed["naive"]
    same = [abs(a - b) <= 2 * CLEAR for a, b in both(naive, zero)]
    first, last = budgets[0], budgets[-1]
    return [
        Claim(
            f"{pair}: plain addition stays at the level of the untouched target.",
            verdict(same),
            f"mean {points(naive.mean, zero.mean)}",
        ),
        Claim(
            f"{pair}: GradFix beats plain addition with {first} example per class.",
            verdict([better(a, b) for a, b in both(budgeted["gradfix", first], naive)]),
            f"mean {points(budgeted['gradfix', first].mean, naive.mean)}",
        ),
        _beats(
            pair,
            "one AdamW step at 1e-5 already improves on the untouched target.",
            [(budgeted["one_step", k], zero) for k in budgets],
            last,
        ),
        _beats(
            pair,
            "GradFix beats one AdamW step at 1e-5 on the same examples.",
            [(budgeted["gradfix", k], budgeted["one_step", k]) for k in budgets],
            last,
        ),
        _beats(
            pair,
            "GradFix beats few-shot fine-tuning whose rate and steps are tuned (stronger than the paper's baseline).",
            [(budgeted["gradfix", k], budgeted["few_shot", k]) for k in budgets],
            last,
        ),
        _beats(pair, "GradFix beats TransFusion.", [(budgeted["gradfix", k], fixed["transfusion"]) for k in budgets], last),
        Claim(
            f"{pair}: the oracle mask is an upper bound of GradFix.",
            verdict([a + CLEAR >= b for a, b in both(fixed["oracle"], budgeted["gradfix", last])]),
            f"mean {points(fixed['oracle'].mean, budgeted['gradfix', last].mean)} at {last} per class",
        ),
    ]  # fmt: skip


def _beats(pair: str, text: str, lines: Sequence[tuple[Line, Line]], last: int) -> Claim:
    wins = [better(a, b) for ours, theirs in lines for a, b in both(ours, theirs)]
    ours, theirs = lines[-1]
    return Claim(
        f"{pair}: {text}", verdict(wins), f"mean {points(ours.mean, theirs.mean)} at {last} per class"
    )


@experiment("seeds", "Spread over seeds, all budgets")
def seeds(book: Book) -> Table:
    """The appendix's tables: one step against GradFix at every budget, with the deviation over seeds."""
    lines, claims = [], []
    for pair in book.suite.pairs:
        found = {
            (method, shots): seeded_line(book, pair, method, shots)
            for shots in book.grid.budgets
            for method in ("one_step", "gradfix")
        }
        lines += list(found.values())
        claims += _seed_claims(pair, found, book.grid.budgets)
    header, rows = accuracy_table(book, lines, spread=True)
    index = header.index("paper mean")
    header.insert(index + 1, "paper std")
    for row, line in zip(rows, lines, strict=True):
        row.append(paper.deviation(book.suite.paper_model(line.pair), line.method, line.shots or 0))
    title = "Spread over seeds, all budgets"
    return Table(
        title, header, rows, {"label": paper.LABELS["seeds"], "seeds": list(book.grid.seeds)}, claims
    )


def _seed_claims(pair: str, found: dict[tuple[str, int], Line], budgets: Sequence[int]) -> list[Claim]:
    steadier = [
        (ours.deviation, theirs.deviation)
        for k in budgets
        for ours, theirs in [(found["gradfix", k], found["one_step", k])]
        if ours.deviation is not None and theirs.deviation is not None
    ]
    first, last = found["gradfix", budgets[0]], found["gradfix", budgets[-1]]
    shown = ", ".join(f"{a:.1f} against {b:.1f}" for a, b in steadier)
    gains = [better(b, a) for a, b in both(first, last)]
    return [
        Claim(
            f"{pair}: GradFix varies less over seeds than the AdamW step.",
            verdict([a < b for a, b in steadier]),
            f"std at {', '.join(map(str, budgets))} per class: {shown or 'one seed only'}",
        ),
        Claim(
            f"{pair}: GradFix gains with more examples.",
            verdict(gains),
            f"mean {points(last.mean, first.mean)} ({budgets[-1]} and {budgets[0]} per class)",
        ),
    ]


@experiment("alphas", "Chosen alpha per task")
def alphas(book: Book) -> Table:
    """The scale GradFix chose on validation data, the median over seeds."""
    shots = book.grid.curve
    tasks = list(dict.fromkeys(task for pair in book.suite.pairs for task in book.suite.tasks(pair)))
    rows: list[list[Cell]] = []
    chosen, oracle = [], []
    for pair in book.suite.pairs:
        known = paper.ALPHAS.get(book.suite.paper_model(pair), {})
        ours: dict[str, float] = {}
        best: dict[str, float] = {}
        for task in book.suite.tasks(pair):
            found = [answer["alpha"] for answer in book.seeded(pair, task, "gradfix", shots)]
            ours[task] = float(median(value for value in found if value is not None))
            best[task] = float(book.fixed(pair, task, "oracle")["alpha"] or 0.0)
        chosen += list(ours.values())
        oracle += list(best.values())
        rows.append([pair, "GradFix", shots, *(ours.get(task) for task in tasks)])
        rows.append([pair, "oracle", None, *(best.get(task) for task in tasks)])
        if set(known) & set(tasks):
            rows.append([pair, "paper", None, *(known.get(task) for task in tasks)])
    top = max(book.grid.search.alphas)
    claims = [
        Claim(
            "The best alpha of GradFix lies inside the grid, well below 1.",
            verdict([0 < value < top for value in chosen]),
            f"between {min(chosen):g} and {max(chosen):g}",
        ),
        Claim("The best alpha of the oracle is 1.", verdict([value == top for value in oracle]),
              f"between {min(oracle):g} and {max(oracle):g}"),
    ]  # fmt: skip
    header = ["pair", "method", "per class", *tasks]
    models = dict.fromkeys(book.suite.paper_model(pair) for pair in book.suite.pairs)
    notes = [
        f"The paper's alphas for {model}: "
        + ", ".join(f"{t} {a:g}" for t, a in paper.ALPHAS[model].items())
        + "."
        for model in models
    ]
    label = {"label": paper.LABELS["alphas"], "figures": {model: paper.ALPHAS[model] for model in models}}
    return Table("Chosen alpha per task", header, rows, label, claims, notes=notes)
