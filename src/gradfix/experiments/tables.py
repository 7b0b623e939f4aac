"""The paper's main tables: transport (Tab. 1 and 2), merging (Tab. 3), seeds, alphas, and what it all costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradfix.experiments import paper
from gradfix.experiments.experiment import (
    CLEAR,
    Cell,
    Claim,
    Line,
    PaperTable,
    Questions,
    accuracy_table,
    beats,
    both,
    experiment,
    fixed_line,
    points,
    seeded_line,
    stays,
    title,
    verdict,
)
from gradfix.experiments.suite import Suite
from gradfix.methods.methods import METHODS, flops

FIXED = ("zero_shot", "fine_tuned", "naive", "oracle", "transfusion")
BUDGETED = ("one_step", "few_shot", "gradfix")
BEYOND = ("bico", "best")  # not in the paper
COMBINERS = {"task_arithmetic": "task arithmetic", "ties": "TIES"}
PIPELINES = {"baseline": "baseline", "mask_then_merge": "mask, then merge", "merge_then_mask": "merge, then mask"}
SETTINGS = {"tasks": "several tasks", "sources": "several sources"}
STEPS, BATCH = 2000, 128  # the paper's recipe for a full fine-tune


def needs_vision(suite: Suite) -> str:
    return "" if suite.domain == "vision" else f"the {suite.name} suite has no images; use --suite openclip."


def needs_text(suite: Suite) -> str:
    return "" if suite.domain == "text" else f"the {suite.name} suite has no texts; use --suite t5."


@experiment("transport_vision", "Transport of task vectors, vision", needs_vision)
@experiment("transport_text", "Transport of task vectors, text", needs_text)
def transport(ask: Questions) -> PaperTable:
    lines: list[Line] = []
    claims: list[Claim] = []
    for pair in ask.suite.pairs:
        fixed = {method: fixed_line(ask, pair, method) for method in FIXED}
        budgeted = {
            (method, shots): seeded_line(ask, pair, method, shots) for shots in ask.grid.main for method in BUDGETED
        }
        beyond = [seeded_line(ask, pair, method, shots) for shots in ask.grid.main for method in BEYOND]
        lines += [*fixed.values(), *budgeted.values(), *beyond]
        claims += _transport_claims(pair, fixed, budgeted, ask.grid.main)
    notes = [
        "Alpha is chosen on validation data and 0 is a candidate. Not in the paper: few-shot fine-tuning with a tuned "
        f"rate and step count, {title('bico')} (the vector in the target's coordinates) and the {title('best').lower()} "
        "(a start along the vector, then lessons from the old fine-tune)."
    ]
    return PaperTable(*accuracy_table(lines), claims, notes=notes)


def _transport_claims(
    pair: str, fixed: dict[str, Line], budgeted: dict[tuple[str, int], Line], budgets: Sequence[int]
) -> list[Claim]:
    zero, naive, oracle = fixed["zero_shot"], fixed["naive"], fixed["oracle"]
    first, last = budgets[0], budgets[-1]
    ours, where = {k: budgeted["gradfix", k] for k in budgets}, f" at {last} per class"
    step = {k: budgeted["one_step", k] for k in budgets}
    return [
        stays(f"{pair}: plain addition stays at the level of the untouched target.", [naive], zero, ""),
        beats(f"{pair}: GradFix beats plain addition with {first} example per class.", (ours[first], naive)),
        beats(f"{pair}: one AdamW step at 1e-5 already improves on the untouched target.",
              *((step[k], zero) for k in budgets), where=where),
        beats(f"{pair}: GradFix beats one AdamW step at 1e-5 on the same examples.",
              *((ours[k], step[k]) for k in budgets), where=where),
        beats(f"{pair}: GradFix beats few-shot fine-tuning whose rate and steps are tuned (stronger than the "
              "paper's baseline).", *((ours[k], budgeted["few_shot", k]) for k in budgets), where=where),
        beats(f"{pair}: GradFix beats TransFusion.", *((ours[k], fixed["transfusion"]) for k in budgets), where=where),
        Claim(f"{pair}: the oracle mask is an upper bound of GradFix.",
              verdict([a + CLEAR >= b for a, b in both(oracle, ours[last])]),
              f"mean {points(oracle.mean, ours[last].mean)}{where}"),
    ]  # fmt: skip


@experiment("seeds", "Spread over seeds, all budgets")
def seeds(ask: Questions) -> PaperTable:
    """The appendix's tables: one step against GradFix at every budget, with the deviation over seeds."""
    lines, claims = [], []
    for pair in ask.suite.pairs:
        found = {
            (method, shots): seeded_line(ask, pair, method, shots)
            for shots in ask.grid.budgets
            for method in ("one_step", "gradfix")
        }
        lines += list(found.values())
        claims += _seed_claims(pair, found, ask.grid.budgets)
    header, rows = accuracy_table(lines, spread=True)
    for row, line in zip(rows, lines, strict=True):
        row.append(paper.deviation(ask.suite.paper_model(line.pair), line.method, line.shots or 0))
    return PaperTable([*header, "paper std"], rows, claims, {"seeds": list(ask.grid.seeds)})


def _seed_claims(pair: str, found: dict[tuple[str, int], Line], budgets: Sequence[int]) -> list[Claim]:
    steadier = [
        (ours.deviation, theirs.deviation)
        for k in budgets
        for ours, theirs in [(found["gradfix", k], found["one_step", k])]
        if ours.deviation is not None and theirs.deviation is not None
    ]
    first, last = found["gradfix", budgets[0]], found["gradfix", budgets[-1]]
    shown = ", ".join(f"{a:.1f} against {b:.1f}" for a, b in steadier)
    return [
        Claim(
            f"{pair}: GradFix varies less over seeds than the AdamW step.",
            verdict([a < b for a, b in steadier]),
            f"std at {', '.join(map(str, budgets))} per class: {shown or 'one seed only'}",
        ),
        beats(f"{pair}: GradFix gains with more examples.", (last, first),
              where=f" ({budgets[-1]} and {budgets[0]} per class)"),
    ]  # fmt: skip


@experiment("alphas", "Chosen alpha per task")
def alphas(ask: Questions) -> PaperTable:
    """The scale GradFix chose on validation data, the median over seeds."""
    shots = ask.grid.curve
    tasks = list(dict.fromkeys(task for pair in ask.suite.pairs for task in ask.suite.tasks(pair)))
    rows: list[list[Cell]] = []
    chosen, oracle = [], []
    for pair in ask.suite.pairs:
        known = paper.ALPHAS.get(ask.suite.paper_model(pair), {})
        ours: dict[str, float] = {}
        best: dict[str, float] = {}
        for task in ask.suite.tasks(pair):
            found = [answer["alpha"] for answer in ask.seeded(pair, task, "gradfix", shots)]
            ours[task] = float(median(value for value in found if value is not None))
            best[task] = float(ask.fixed(pair, task, "oracle")["alpha"] or 0.0)
        chosen += list(ours.values())
        oracle += list(best.values())
        rows.append([pair, "GradFix", shots, *(ours.get(task) for task in tasks)])
        rows.append([pair, "oracle", None, *(best.get(task) for task in tasks)])
        if set(known) & set(tasks):
            rows.append([pair, "paper", None, *(known.get(task) for task in tasks)])
    top = max(ask.grid.search.alphas)
    claims = [
        Claim("The best alpha of GradFix lies inside the grid, well below 1.",
              verdict([0 < value < top for value in chosen]), f"between {min(chosen):g} and {max(chosen):g}"),
        Claim("The best alpha of the oracle is 1.", verdict([value == top for value in oracle]),
              f"between {min(oracle):g} and {max(oracle):g}"),
    ]  # fmt: skip
    models = dict.fromkeys(ask.suite.paper_model(pair) for pair in ask.suite.pairs)
    theirs = {model: paper.ALPHAS[model] for model in models}
    notes = [
        f"The paper's alphas for {model}: " + ", ".join(f"{t} {a:g}" for t, a in found.items()) + "."
        for model, found in theirs.items()
    ]
    header = ["pair", "method", "per class", *tasks]
    return PaperTable(header, rows, claims, {"figures": theirs}, notes=notes)


@experiment("merging", "Merging on a new base")
def merging(ask: Questions) -> PaperTable:
    """Several tasks of one source, and several sources of one task."""
    pair, seed = ask.suite.pairs[0], ask.grid.seeds[0]
    shots = ask.grid.main[min(1, len(ask.grid.main) - 1)]
    tasks = ask.suite.tasks(pair)
    zero = fixed_line(ask, pair, "zero_shot", paper.ONE_MODEL)
    lines = {("tasks", "zero_shot", ""): zero}
    single = {
        "naive": {task: [ask.fixed(pair, task, "naive")["accuracy"]] for task in tasks},
        "gradfix": {task: [ask.method(pair, task, "gradfix", shots, seed)["accuracy"]] for task in tasks},
    }
    for name, values in single.items():
        known = paper.merged("tasks", "single", name)
        lines["tasks", "single", name] = Line(pair, f"one vector, {name}", shots, values, known)
    for setting, chosen in (("tasks", [None]), ("sources", list(ask.suite.source_tasks()))):
        for combiner, combined in COMBINERS.items():
            for pipeline, how in PIPELINES.items() if chosen else ():
                found: dict[str, list[float | None]] = {}
                for task in chosen:
                    answer = ask.measure(
                        "merged", pair=pair, setting=setting, task=task, combiner=combiner, pipeline=pipeline,
                        shots=shots, seed=seed,
                    )  # fmt: skip
                    for one in tasks if task is None else (task,):
                        found[one] = [answer["accuracies"][one]]
                name = f"{SETTINGS[setting]}, {combined}, {how}"
                known = paper.merged(setting, combiner, pipeline)
                lines[setting, combiner, pipeline] = Line(pair, name, shots, found, known)
    notes = [
        "One merged model and one alpha for all tasks, chosen by the mean validation accuracy; 0 is a candidate, so "
        "a merge that only harms shows as the untouched target."
    ]
    if not ask.suite.source_tasks():
        notes.append(f"The {ask.suite.name} suite has one source per task: several sources were not measured.")
    return PaperTable(*accuracy_table(list(lines.values())), _merge_claims(lines, zero), notes=notes)


def _merge_claims(lines: dict[tuple[str, str, str], Line], zero: Line) -> list[Claim]:
    claims = []
    for setting, combiner in [key[:2] for key in lines if key[2] == "baseline"]:
        base, mask_first, merge_first = (lines[setting, combiner, pipeline] for pipeline in PIPELINES)
        where = f"{SETTINGS[setting]}, {COMBINERS[combiner]}"
        order = [("mask-then-merge", mask_first), ("merge-then-mask", merge_first)]
        if setting == "tasks":
            claims.append(stays(f"{where}: merging without a mask stays near zero-shot.", [base], zero))
            order.reverse()
        (winner, best), (other, second) = order
        claims += [
            beats(f"{where}: {winner} improves on merging without a mask.", (best, base)),
            beats(f"{where}: {winner} beats {other}.", (best, second)),
        ]
    return claims


@experiment("supervision", "Share of the labels that a budget uses")
def supervision(ask: Questions) -> PaperTable:
    """Counted from the data, not typed in; the paper's shares beside it."""
    pair = ask.suite.pairs[0]
    rows: list[list[Cell]] = []
    agree = []
    for task in ask.suite.tasks(pair):
        found = ask.measure("counts", pair=pair, task=task)
        samples, classes = int(found["samples"]), int(found["classes"])
        known = paper.SUPERVISION.get(task)
        for shots in ask.grid.budgets:
            ours = 100 * shots * classes / samples if samples else None
            theirs = known[2].get(shots) if known else None
            rows.append([task, samples, classes, shots, ours, known[0] if known else None, theirs])
            if ours is not None and theirs is not None:
                agree.append(abs(ours - theirs) <= max(0.01, 0.1 * theirs))
    evidence = f"{sum(agree)} of {len(agree)} shares"
    claims = [Claim("The shares are the paper's (within a tenth).", verdict(agree), evidence)] if agree else []
    header = ["task", "samples", "classes", "per class", "percent", "paper samples", "paper percent"]
    sizes = {task: [samples, classes] for task, (samples, classes, _) in paper.SUPERVISION.items()}
    return PaperTable(header, rows, claims, {"figures": sizes})


@experiment("flops", "Floating-point operations, with N")
def count_flops(ask: Questions) -> PaperTable:
    """The formulas with N samples beside the paper's, which counts one pass whatever N is."""
    pair, shots = ask.suite.pairs[0], ask.grid.curve
    found = ask.measure("counts", pair=pair, task=ask.suite.tasks(pair)[0])
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
    return PaperTable(header, rows, claims, {"figures": dict(paper.FLOPS)}, notes=notes)


def _formula(name: str) -> str:
    cost = METHODS[name].cost
    return cost.formula if cost is not None else "-"
