"""Ablations: mask strategies, alpha curves, sign agreement, subset selection, random vectors, support set.

They run on the suite's first pair, as the paper runs them on one model; the random vector runs on every pair,
because how related the bases are decides what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradfix.experiments import paper
from gradfix.experiments.experiment import (
    CLEAR,
    Cell,
    Claim,
    Figure,
    Line,
    PaperTable,
    Questions,
    accuracy_table,
    beats,
    experiment,
    fixed_line,
    mean,
    seeded_line,
    stays,
    text,
    title,
    verdict,
)
from gradfix.experiments.suite import Suite

SELECTORS = ("herding", "k-medoids", "coreset")
SIDES = ("base", "target", "base_tuned", "gradfix")


@experiment("masks", "Mask strategies, oracle and estimated")
def masks(ask: Questions) -> PaperTable:
    pair, shots = ask.suite.pairs[0], ask.grid.main[0]
    tasks = ask.suite.tasks(pair)
    lines = {name: fixed_line(ask, pair, name, paper.ONE_MODEL) for name in ("zero_shot", "fine_tuned")}
    for mask in ("agree", "force", "magnitude"):
        values = {task: [ask.measure("oracle_mask", pair=pair, task=task, mask=mask)["accuracy"]] for task in tasks}
        lines[f"oracle {mask}"] = Line(pair, f"oracle, {mask}", None, values, paper.masks(f"oracle {mask}"))
    for method in ("gradfix", "force", "magnitude", "random"):
        line = seeded_line(ask, pair, method, shots)
        lines[method] = Line(pair, f"estimated, {line.name}", shots, line.values, paper.masks(method))
    zero = lines["zero_shot"]
    claims = [
        beats("With the oracle's signs, forcing beats agreement.", (lines["oracle force"], lines["oracle agree"])),
        beats("With voted signs, agreement beats forcing.", (lines["gradfix"], lines["force"])),
        stays("The magnitude-scaled mask stays at zero-shot level, with the oracle's reference too.",
              [lines["magnitude"], lines["oracle magnitude"]], zero),
        stays("A random mask stays at zero-shot level.", [lines["random"]], zero),
    ]  # fmt: skip
    notes = ["The magnitude mask is fed with real-valued references: minus the mean gradient, or tau_B."]
    return PaperTable(*accuracy_table(list(lines.values())), claims, notes=notes)


@experiment("alpha_sensitivity", "Majority and mean vote along alpha")
def alpha_sensitivity(ask: Questions) -> PaperTable:
    """Validation accuracy at every alpha of the grid, averaged over seeds."""
    pair, shots = ask.suite.pairs[0], ask.grid.curve
    rows: list[list[Cell]] = []
    panels, above, wide = [], [], []
    for task in ask.suite.tasks(pair):
        majority, average = (_curve(ask, pair, task, method, shots) for method in ("gradfix", "gradfix_mean"))
        for alpha in sorted(majority):
            rows.append([task, alpha, majority[alpha], average.get(alpha)])
        shared = [alpha for alpha in majority if alpha in average and alpha > 0]
        above += [majority[alpha] > average[alpha] for alpha in shared]
        wide.append((_near_best(majority), _near_best(average)))
        panels.append({"title": task, "series": [_series("majority", majority), _series("mean", average)]})
    claims = [
        Claim("The majority vote beats the mean vote at every alpha.", verdict(above),
              f"at {sum(above)} of {len(above)} points (task, alpha)"),
        Claim("The majority vote keeps near its best over a wider range of alpha.",
              verdict([a > b for a, b in wide]),
              "alphas within 5 points of the best: " + ", ".join(f"{a} against {b}" for a, b in wide)),
    ]  # fmt: skip
    return PaperTable(
        ["task", "alpha", "majority", "mean"],
        rows,
        claims,
        {"figures": "the paper shows curves without numbers"},
        f"Majority and mean vote along alpha, {shots} per class, validation accuracy",
        Figure("lines", "alpha", "validation accuracy (%)", panels),
    )


def _curve(ask: Questions, pair: str, task: str, method: str, shots: int) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for answer in ask.seeded(pair, task, method, shots):
        for alpha, accuracy in answer["curve"]:
            found.setdefault(alpha, []).append(accuracy)
    return {alpha: sum(values) / len(values) for alpha, values in sorted(found.items())}


def _near_best(curve: Mapping[float, float]) -> int:
    best = max(curve.values(), default=0.0)
    return sum(value >= best - 5 for value in curve.values())


def _series(name: str, curve: Mapping[float, float]) -> dict[str, object]:
    return {"name": name, "points": [[alpha, value] for alpha, value in curve.items()]}


@experiment("sign_agreement", "Sign agreement per block and budget")
def sign_agreement(ask: Questions) -> PaperTable:
    """Share of weights whose voted sign is that of the target's own task vector."""
    pair, seed = ask.suite.pairs[0], ask.grid.seeds[0]
    rows: list[list[Cell]] = []
    panels = []
    rising, uneven = [], []
    for task in ask.suite.tasks(pair):
        found = {
            shots: ask.measure("agreement", pair=pair, task=task, shots=shots, seed=seed) for shots in ask.grid.budgets
        }
        blocks = list(dict.fromkeys(block for answer in found.values() for block in answer["blocks"]))
        for block in blocks:
            rows.append([task, block, *(_percent(answer["blocks"].get(block)) for answer in found.values())])
        whole = [_percent(answer["all"]) or 0.0 for answer in found.values()]
        rows.append([task, "all weights", *whole])
        rising.append(whole[-1] > whole[0])
        last = list(found[ask.grid.budgets[-1]]["blocks"].values())
        uneven.append(100 * (max(last, default=0.0) - min(last, default=0.0)))
        panels.append({
            "title": task, "rows": blocks, "columns": [str(shots) for shots in found],
            "values": [[_percent(a["blocks"].get(block)) for a in found.values()] for block in blocks],
        })  # fmt: skip
    claims = [
        Claim("Agreement is not uniform over the blocks.", verdict([gap > 2 * CLEAR for gap in uneven]),
              "largest gap between blocks: " + ", ".join(f"{gap:.1f} points" for gap in uneven)),
        Claim("Agreement with the target's own task vector grows with the budget.", verdict(rising),
              "; ".join(f"{row[0]} {text(row[2])} to {text(row[-1])} %" for row in rows if row[1] == "all weights")),
    ]  # fmt: skip
    return PaperTable(
        ["task", "block", *(f"{shots} per class" for shots in ask.grid.budgets)],
        rows,
        claims,
        {"figures": "the paper shows a heat map without numbers"},
        "Sign agreement of votes and tau_B per block and budget, in percent",
        Figure("heat", "examples per class", "block", panels),
    )


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


@experiment("subset_selection", "Subset selection over budgets")
def subset_selection(ask: Questions) -> PaperTable:
    pair, seed = ask.suite.pairs[0], ask.grid.seeds[0]
    rows: list[list[Cell]] = []
    panels = []
    gains: dict[int, list[float]] = {}
    for task in ask.suite.tasks(pair):
        curves: dict[str, list[list[float | None]]] = {name: [] for name in ("random", *SELECTORS)}
        for shots in ask.grid.selection:
            random = mean([answer["accuracy"] for answer in ask.seeded(pair, task, "gradfix", shots)])
            chosen = {
                name: ask.measure("selected", pair=pair, task=task, selector=name, shots=shots, seed=seed)["accuracy"]
                for name in SELECTORS
            }  # fmt: skip
            rows.append([task, shots, random, *chosen.values()])
            gains.setdefault(shots, []).extend(value - (random or 0.0) for value in chosen.values())
            for name, value in {"random": random, **chosen}.items():
                curves[name].append([float(shots), value])
        panels.append({"title": task, "series": [{"name": n, "points": p} for n, p in curves.items()]})
    first, last = ask.grid.selection[0], ask.grid.selection[-1]
    average = {shots: mean(values) or 0.0 for shots, values in gains.items()}
    claims = [
        Claim(f"Structured selectors gain over random at {first} per class.",
              verdict([gain > 0 for gain in gains[first]]), f"{average[first]:+.1f} points on average"),
        Claim(f"Random selection catches up as the budget grows ({first} to {last}).",
              verdict([average[last] < max(average[first], CLEAR)]),
              f"average gain of the selectors {average[first]:+.1f} at {first}, {average[last]:+.1f} at {last}"),
    ]  # fmt: skip
    return PaperTable(
        ["task", "per class", "random", *SELECTORS],
        rows,
        claims,
        {"figures": "the paper shows curves without numbers"},
        "Few-shot set selection over budgets (random: mean over seeds)",
        Figure("lines", "examples per class", "test accuracy (%)", panels),
    )


@experiment("random_task_vector", "Random task vector under the same mask")
def random_task_vector(ask: Questions) -> PaperTable:
    """Noise of tau's mean and deviation under the voted mask: what the votes do without the task vector."""
    lines: list[Line] = []
    claims = []
    for pair in ask.suite.pairs:
        zero = fixed_line(ask, pair, "zero_shot")
        noise, ours = (
            [seeded_line(ask, pair, method, shots) for shots in ask.grid.main] for method in ("random_tau", "gradfix")
        )
        lines += [zero, *(line for both in zip(noise, ours, strict=True) for line in both)]
        shown = f"random vector {text(noise[-1].mean)}, GradFix {text(ours[-1].mean)}, zero-shot {text(zero.mean)}"
        shown += f" at {ask.grid.main[-1]} per class"
        wins = beats(f"{pair}: GradFix beats a random vector under the same mask.", *zip(ours, noise, strict=True))
        level = stays(f"{pair}: a random vector under the voted mask stays at zero-shot level.", noise, zero)
        claims += [replace(wins, evidence=shown), replace(level, evidence=shown)]
    return PaperTable(*accuracy_table(lines), claims)


def needs_support(suite: Suite) -> str:
    has = type(suite).support is not Suite.support
    return "" if has else f"the {suite.name} suite has no support set."


@experiment("generalisation", "Task and support-set accuracy", needs_support)
def generalisation(ask: Questions) -> PaperTable:
    """Does transport cost what the target knew? Accuracy on the task and on data that has nothing to do with it."""
    pair, shots, seed = ask.suite.pairs[0], ask.grid.curve, ask.grid.seeds[0]
    tasks = ask.suite.tasks(pair)
    names = {"base": "old base", "target": title("zero_shot"), "base_tuned": "old base, fine-tuned",
             "gradfix": title("gradfix")}  # fmt: skip
    rows: list[list[Cell]] = []
    found = {}
    for who in SIDES:
        found[who] = {
            task: ask.measure("support", pair=pair, task=task, who=who, shots=shots, seed=seed) for task in tasks
        }
        row: list[Cell] = [names[who]]
        for task in tasks:
            row += [found[who][task]["accuracy"], found[who][task]["support"]]
        theirs = paper.GENERALISATION[who]
        row += [mean([task for task, _ in theirs]), mean([support for _, support in theirs])]
        rows.append(row)
    kept = [found["gradfix"][t]["support"] - found["target"][t]["support"] for t in tasks]
    gained = [found["gradfix"][t]["accuracy"] - found["target"][t]["accuracy"] for t in tasks]
    claims = [
        Claim("GradFix raises the task accuracy of the target.", verdict([gain > CLEAR for gain in gained]),
              ", ".join(f"{task} {gain:+.1f}" for task, gain in zip(tasks, gained, strict=True))),
        Claim("GradFix keeps the target's accuracy on the support set (within two points).",
              verdict([change >= -2 * CLEAR for change in kept]),
              ", ".join(f"{task} {change:+.1f}" for task, change in zip(tasks, kept, strict=True))),
    ]  # fmt: skip
    columns = [column for task in tasks for column in (task, f"{task} support")]
    header = ["model", *columns, "paper task mean", "paper support mean"]
    return PaperTable(header, rows, claims, title=f"Task and support-set accuracy, {shots} per class")
