"""Tab. 3: merging task vectors onto a target, several tasks of one source and several sources of one task."""

from __future__ import annotations

from gradfix.experiments import paper
from gradfix.experiments.experiment import Line, accuracy_table, both, experiment, fixed_line
from gradfix.experiments.lab import Answer, Book
from gradfix.experiments.tables import CLEAR, Claim, Table, better, points, verdict

COMBINERS = {"task_arithmetic": "task arithmetic", "ties": "TIES"}
PIPELINES = {
    "baseline": "baseline",
    "mask_then_merge": "mask, then merge",
    "merge_then_mask": "merge, then mask",
}
SETTINGS = {"tasks": "several tasks", "sources": "several sources"}


@experiment("merging", "Merging on a new base")
def merging(book: Book) -> Table:
    pair = book.suite.pairs[0]
    shots = book.grid.main[min(1, len(book.grid.main) - 1)]
    seed = book.grid.seeds[0]
    tasks = book.suite.tasks(pair)
    zero = fixed_line(book, pair, "zero_shot")
    lines = {("tasks", "zero_shot", ""): zero}
    naive = {task: [book.fixed(pair, task, "naive")["accuracy"]] for task in tasks}
    single = {
        task: [book.ask("method", pair=pair, task=task, method="gradfix", shots=shots, seed=seed)["accuracy"]]
        for task in tasks
    }
    for name, values in (("naive", naive), ("gradfix", single)):
        lines["tasks", "single", name] = Line(
            pair, f"one vector, {name}", shots, values, paper.merged("tasks", "single", name)
        )
    for setting, chosen in (("tasks", [None]), ("sources", list(book.suite.source_tasks()))):
        for combiner, combined in COMBINERS.items():
            for pipeline, how in PIPELINES.items() if chosen else ():
                found: dict[str, float] = {}
                for task in chosen:
                    answer = book.ask(
                        "merged", pair=pair, setting=setting, task=task, combiner=combiner, pipeline=pipeline,
                        shots=shots, seed=seed,
                    )  # fmt: skip
                    found |= _accuracies(answer, tasks if task is None else (task,))
                name = f"{SETTINGS[setting]}, {combined}, {how}"
                known = paper.merged(setting, combiner, pipeline)
                values = {task: [value] for task, value in found.items()}
                lines[setting, combiner, pipeline] = Line(pair, name, shots, values, known)
    header, rows = accuracy_table(book, list(lines.values()))
    notes = [
        "One merged model and one alpha for all tasks, chosen by the mean validation accuracy; 0 is a candidate, so "
        "a merge that only harms shows as the untouched target."
    ]
    if not book.suite.source_tasks():
        notes.append(
            f"the {book.suite.name} suite has one source per task: several sources were not measured."
        )
    return Table(
        "Merging on a new base",
        header,
        rows,
        {"label": paper.LABELS["merging"]},
        _claims(lines, zero),
        notes=notes,
    )


def _accuracies(answer: Answer, tasks: tuple[str, ...]) -> dict[str, float]:
    return {task: answer["accuracies"][task] for task in tasks}


def _claims(lines: dict[tuple[str, str, str], Line], zero: Line) -> list[Claim]:
    claims = []
    for setting, combiner in [key[:2] for key in lines if key[2] == "baseline"]:
        base, mask_first, merge_first = (lines[setting, combiner, pipeline] for pipeline in PIPELINES)
        where = f"{SETTINGS[setting]}, {COMBINERS[combiner]}"
        if setting == "tasks":
            near = [abs(a - b) <= 2 * CLEAR for a, b in both(base, zero)]
            claims.append(
                Claim(
                    f"{where}: merging without a mask stays near zero-shot.",
                    verdict(near),
                    f"mean {points(base.mean, zero.mean)} zero-shot",
                )
            )
        winner, other = (merge_first, mask_first) if setting == "tasks" else (mask_first, merge_first)
        claims += [
            _beats(f"{where}: {_order(winner)} improves on merging without a mask.", winner, base),
            _beats(f"{where}: {_order(winner)} beats {_order(other)}.", winner, other),
        ]
    return claims


def _order(line: Line) -> str:
    return "merge-then-mask" if line.name.endswith("then mask") else "mask-then-merge"


def _beats(sentence: str, left: Line, right: Line) -> Claim:
    wins = [better(a, b) for a, b in both(left, right)]
    return Claim(sentence, verdict(wins), f"mean {points(left.mean, right.mean)}")
