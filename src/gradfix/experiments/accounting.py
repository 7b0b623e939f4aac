"""What it costs: share of the labels used, and floating-point operations with the number of samples stated."""

from __future__ import annotations

from gradfix.experiments import paper
from gradfix.experiments.experiment import experiment, title
from gradfix.experiments.lab import Book
from gradfix.experiments.tables import Cell, Claim, Table, verdict
from gradfix.methods.methods import METHODS, flops

STEPS, BATCH = 2000, 128  # the paper's recipe for a full fine-tune


@experiment("supervision", "Share of the labels that a budget uses")
def supervision(book: Book) -> Table:
    """Counted from the data, not typed in; the paper's shares beside it."""
    pair = book.suite.pairs[0]
    rows: list[list[Cell]] = []
    agree = []
    for task in book.suite.tasks(pair):
        found = book.ask("counts", pair=pair, task=task)
        samples, classes = int(found["samples"]), int(found["classes"])
        known = paper.SUPERVISION.get(task)
        for shots in book.grid.budgets:
            ours = 100 * shots * classes / samples if samples else None
            theirs = known[2].get(shots) if known else None
            rows.append([task, samples, classes, shots, ours, known[0] if known else None, theirs])
            if ours is not None and theirs is not None:
                agree.append(abs(ours - theirs) <= max(0.01, 0.1 * theirs))
    claims = []
    if agree:
        claims = [Claim("The shares are the paper's (within a tenth).", verdict(agree),
                        f"{sum(agree)} of {len(agree)} shares")]  # fmt: skip
    header = ["task", "samples", "classes", "per class", "percent", "paper samples", "paper percent"]
    label = {
        "label": paper.LABELS["supervision"],
        "figures": {t: [n, c] for t, (n, c, _) in paper.SUPERVISION.items()},
    }
    return Table("Share of the labels that a budget uses", header, rows, label, claims)


@experiment("flops", "Floating-point operations, with N")
def count_flops(book: Book) -> Table:
    """The formulas with N samples beside the paper's, which counts one pass whatever N is."""
    pair, shots = book.suite.pairs[0], book.grid.curve
    task = book.suite.tasks(pair)[0]
    found = book.ask("counts", pair=pair, task=task)
    # while questions are only listed there are no sizes yet
    size, tokens = int(found["parameters"]) or 1, float(found["tokens"]) or 1.0
    samples = shots * (int(found["classes"]) or 1)
    rows: list[list[Cell]] = []
    total = {}
    for method in ("naive", "gradfix", "one_step", "fine_tuned"):
        count, steps = (BATCH, STEPS) if method == "fine_tuned" else (samples, 1)
        total[method] = flops(method, size, count, tokens=tokens, steps=steps)
        per_weight = flops(method, 1, count, steps=steps)
        theirs = paper.FLOPS.get(method)
        shown = f"{theirs:g}P" if theirs else None
        rows.append([title(method), _formula(method), count, steps, per_weight, total[method], shown])
    step = total["one_step"] / total["gradfix"]
    full = total["fine_tuned"] / total["gradfix"]
    claims = [
        Claim("One AdamW step costs twice as much as GradFix.", verdict([1.8 <= step <= 2.2]),
              f"{step:.2f} times at N = {samples}: both pass over the same samples, which is nearly all of it"),
        Claim("Full fine-tuning costs about 4000 times as much as GradFix.", verdict([2000 <= full <= 8000]),
              f"{full:.0f} times at N = {samples}: {STEPS} steps of {BATCH} samples against one pass over {samples}"),
    ]  # fmt: skip
    header = ["method", "formula", "N", "steps", "multiples of P (one token)", "operations", "paper (no N)"]
    notes = [f"P = {size:,} trained weights, {tokens:.0f} tokens per sample; choosing alpha is not included."]
    label = {"label": paper.LABELS["flops"], "figures": dict(paper.FLOPS)}
    return Table("Floating-point operations, with N", header, rows, label, claims, notes=notes)


def _formula(name: str) -> str:
    cost = METHODS[name].cost
    return cost.formula if cost is not None else "-"
