"""Accuracy on a real pair of encoders: every method, both directions, with and without validation labels.

    python -m benchmarks.fieldtest --fieldtest FOLDER [--device cuda] [--jobs 6] [--shots 5 50] [--seeds 0 1 2]

FOLDER holds models/{minilm-l6,gte-l6} and tasks/{movie,amazon,tweets}. Both encoders are fine-tuned on every task
(400 steps, batch 64, lr 2e-5), then every fine-tune is moved onto the other encoder. Writes
benchmarks/results/fieldtest.json: all rows, and the mean recovered share per method, budget and regime."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.parts import in_parallel

MODELS = ("minilm-l6", "gte-l6")
TASKS = ("movie", "amazon", "tweets")
REGIMES = ("validation", "few_shot")
METHODS = ("zero_shot", "naive", "one_step", "few_shot", "gradfix", "veto", "best", "oracle", "fine_tuned")
KEPT = (
    "pair",
    "task",
    "method",
    "shots",
    "seed",
    "accuracy",
    "recovered",
    "alpha",
    "margin",
    "seconds",
    "regime",
    "notes",
)
RESULTS = Path(__file__).parent / "results" / "fieldtest.json"


def options(about: str | None, results: Path) -> argparse.ArgumentParser:
    """What every benchmark on these models can be told."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--fieldtest", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("fieldtest-work"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=results)
    return parser


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    shared = ["--fieldtest", args.fieldtest, "--work", args.work, "--device", args.device, "--steps", args.steps,
              "--shots", *args.shots, "--seeds", *args.seeds, "--methods", *args.methods]  # fmt: skip
    in_parallel("benchmarks.fieldtest", shared, [("finetune", *one) for one in product(MODELS, TASKS)], args.jobs)
    parts = [("compare", *one) for one in product(TASKS, MODELS, REGIMES, args.seeds)]
    in_parallel("benchmarks.fieldtest", shared, parts, args.jobs)
    write(args, time.perf_counter() - begin)


def write(args: argparse.Namespace, seconds: float) -> None:
    rows, verdicts = (
        [json.loads(line) for path in sorted(args.work.glob(kind)) for line in path.read_text().splitlines()]
        for kind in ("rows-*.jsonl", "verdicts-*.jsonl")
    )
    tuning = [json.loads(path.read_text()) for path in sorted(args.work.glob("finetune-*.json"))]
    from gradfix.checkpoints.folder import versions

    result = {
        "command": "python -m benchmarks.fieldtest", "device": args.device, "seconds": seconds,
        "finetune_seconds": fmean(entry["seconds"] for entry in tuning), **versions(),
        "summary": summary(rows), "cells": cells(rows), "verdicts": verdicts,
        "verdicts_wrong": sum(said["points_below_best"] > 2 and not said["tie"] for said in verdicts), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for regime, by_shots in result["summary"].items():
        for shots, methods in by_shots.items():
            ordered = sorted(methods.items(), key=lambda item: -item[1])
            print(regime, shots, " ".join(f"{name} {value:.3f}" for name, value in ordered))


def run_part(args: argparse.Namespace) -> None:
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    kind, *rest = args.part
    {"finetune": finetune_part, "compare": compare_part}[kind](args, *rest)


def finetune_part(args: argparse.Namespace, model: str, task: str) -> None:
    import gradfix.tasks  # noqa: F401
    from gradfix.checkpoints.folder import save_like
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.data import load_data
    from gradfix.tasks.base import TASKS as KINDS
    from gradfix.training.finetuning import finetune

    source = args.fieldtest / "models" / model
    dataset = load_data(args.fieldtest / "tasks" / task)
    bound = KINDS["zero-shot"](dataset.labels).open(source, device=args.device)
    begin = time.perf_counter()
    finetune(bound, dataset.splits["train"], steps=args.steps, batch_size=64, lr=2e-5)
    seconds = time.perf_counter() - begin
    save_like(
        open_checkpoint(source), bound.model, args.work / f"{model}-{task}", extras=bound.save_extras, overwrite=True
    )
    (args.work / f"finetune-{model}-{task}.json").write_text(json.dumps({"seconds": seconds}))


def compare_part(args: argparse.Namespace, task: str, source: str, regime: str, seed: str) -> None:
    import gradfix.tasks  # noqa: F401
    from gradfix.methods.comparison import compare
    from gradfix.methods.search import Search

    target = MODELS[1 - MODELS.index(source)]
    out = args.work / f"rows-{task}-{source}-{regime}-{seed}.jsonl"
    out.write_text("")
    (args.work / f"verdicts-{task}-{source}-{regime}-{seed}.jsonl").unlink(missing_ok=True)
    search = replace(Search.quick(), folds=2) if regime == "few_shot" else Search.quick()
    for shots in args.shots:
        results = compare(
            base=args.fieldtest / "models" / source, tuned=args.work / f"{source}-{task}",
            target=args.fieldtest / "models" / target, target_tuned=args.work / f"{target}-{task}",
            data=args.fieldtest / "tasks" / task, task="zero-shot", shots=[shots], seeds=[int(seed)], methods=args.methods,
            validation="auto" if regime == "validation" else "none", search=search, batch_size=256,
            device=args.device, pair=f"{source} to {target}",
        )  # fmt: skip
        with open(out, "a") as file:
            for row in results.rows:
                file.write(json.dumps({name: row[name] for name in KEPT}) + "\n")
        best = max(row["accuracy"] for row in results.rows if not results.traits_of(row["method"]).reference)
        said = {name: results.verdict[name] for name in ("method", "tie", "tied", "refused", "lead", "best_on_test")}
        behind = best - results.verdict["accuracy"]
        with open(args.work / f"verdicts-{task}-{source}-{regime}-{seed}.jsonl", "a") as file:
            cell = {"task": task, "source": source, "regime": regime, "seed": int(seed), "shots": shots}
            file.write(json.dumps({**cell, **said, "points_below_best": behind}) + "\n")


def summary(rows: list[dict]) -> dict:
    """Mean recovered share by regime, budget and method."""
    groups: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        groups[row["regime"]][str(row["shots"])][row["method"]].append(row["recovered"])
    return {r: {s: {m: round(fmean(v), 4) for m, v in ms.items()} for s, ms in ss.items()} for r, ss in groups.items()}


def cells(rows: list[dict]) -> dict:
    """Mean accuracy by regime, budget, pair, task and method."""
    groups: dict = defaultdict(list)
    for row in rows:
        groups["/".join([row["regime"], str(row["shots"]), row["pair"], row["task"], row["method"]])].append(
            row["accuracy"]
        )
    return {key: round(fmean(values), 2) for key, values in groups.items()}


if __name__ == "__main__":
    main()
