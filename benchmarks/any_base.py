"""From any base to any base, on real encoders: the share of the fine-tuning gain that arrives.

    python -m benchmarks.any_base --fieldtest FOLDER [--work WORK] [--device cuda] [--jobs 12] [--seeds 0 1 2]

FOLDER holds models/, packed/ with unpack.py, and tasks/. Every encoder is fine-tuned on every task (kept in WORK, 400
steps, batch 64, lr 2e-5), then moved onto the others: unrelated bases of one shape, another depth in both directions,
a related pair. Labels only, and again with 500 real unlabelled inputs. Nothing is chosen on test. Rows are kept in WORK
and added to, so that other methods, tasks or inputs can be run later (`--methods few_shot naive --tasks banking`). Writes
benchmarks/results/any_base.json: every run, and the mean share by group, inputs, budget and method."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parts import in_parallel

TWELVE, SIX, NARROW = ("e5-l12", "gte-l12"), "minilm-l6", "minilm-w256"
GROUPS = {
    "unrelated": [TWELVE, TWELVE[::-1]],
    "deeper": [(SIX, other) for other in TWELVE],
    "shallower": [(other, SIX) for other in TWELVE],
    "related": [(SIX, "gte-l6"), ("gte-l6", SIX)],
}
OTHER_WIDTH = {  # `benchmarks.other_width` makes the narrow encoder first
    "narrower": [(SIX, NARROW)],
    "wider": [(NARROW, SIX)],
    "narrower and shallower": [(other, NARROW) for other in TWELVE],
    "wider and deeper": [(NARROW, other) for other in TWELVE],
}
PAIRS = GROUPS | OTHER_WIDTH
TASKS = ("movie", "amazon", "tweets", "banking")
MANY = "banking"  # 77 classes: other budgets
METHODS = ("best", "bico")
REAL = 500
RESULTS = Path(__file__).parent / "results" / "any_base.json"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fieldtest", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("any-base-work"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--many-shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--inputs", nargs="+", default=["labels", "real"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--began", type=float, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.began = args.began or time.time()
    if args.part:
        run_part(args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    names = ("fieldtest", "work", "device", "steps", "limit", "began")
    many = ("shots", "many_shots", "seeds", "methods", "inputs")
    shared: list[object] = [word for name in names for word in (f"--{name}", getattr(args, name))]
    shared += [word for name in many for word in (f"--{name.replace('_', '-')}", *map(str, getattr(args, name)))]
    pairs = [pair for group in args.groups for pair in PAIRS[group]]
    models = dict.fromkeys(model for pair in pairs for model in pair)
    for model in models:
        folder_of(args, model)
    tuning = [
        ("finetune", *one)
        for one in product(models, args.tasks)
        if not (args.work / "-".join(one) / "figures.json").exists()
    ]
    in_parallel("benchmarks.any_base", shared, tuning, args.jobs)
    parts = [("move", task, *pair) for task, pair in product(args.tasks, pairs)]
    in_parallel("benchmarks.any_base", shared, parts, args.jobs)
    write(args)


def write(args: argparse.Namespace) -> None:
    from gradfix.checkpoints.folder import versions

    rows = [json.loads(line) for path in sorted(args.work.glob("rows-*")) for line in path.open()]
    result = {
        "command": "python -m benchmarks.any_base", "device": args.device, "seconds": time.time() - args.began,
        **versions(), "summary": summary(rows), "banking": summary(rows, banking=True), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("summary", "banking"):
        for key, value in result[name].items():
            print(name, key, value)


def folder_of(args: argparse.Namespace, model: str) -> Path:
    """The model as a folder: as it is stored, or unpacked into the work folder once."""
    stored, own = args.fieldtest / "models" / model, args.work / "models" / model
    if stored.is_dir():
        return stored
    if not (own / "tokenizer.json").is_file():
        packed = args.fieldtest / "packed" / f"{model}.safetensors"
        subprocess.run([sys.executable, args.fieldtest / "unpack.py", packed, own], check=True)
    return own


def run_part(args: argparse.Namespace) -> None:
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    kind, *rest = args.part
    {"finetune": finetune_part, "move": move_part}[kind](args, *rest)


def finetune_part(args: argparse.Namespace, model: str, task: str) -> None:
    from gradfix.checkpoints.folder import save_like
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.data import load_data
    from gradfix.tasks.scoring import evaluate
    from gradfix.tasks.zero_shot import ZeroShot
    from gradfix.training.finetuning import finetune

    source, out = folder_of(args, model), args.work / f"{model}-{task}"
    dataset = load_data(args.fieldtest / "tasks" / task)
    bound = ZeroShot(dataset.labels).open(source, device=args.device)

    def accuracy() -> float:
        return evaluate(bound.model, bound, bound.scoring_batches(dataset.splits["test"], 256))["accuracy"]

    figures = {"zero_shot": accuracy()}
    begin = time.perf_counter()
    finetune(bound, dataset.splits["train"], steps=args.steps, batch_size=64, lr=2e-5)
    figures |= {"seconds": time.perf_counter() - begin, "fine_tuned": accuracy()}
    save_like(open_checkpoint(source), bound.model, out, extras=bound.save_extras, overwrite=True)
    (out / "figures.json").write_text(json.dumps(figures))


def move_part(args: argparse.Namespace, task: str, source: str, target: str) -> None:
    """One fine-tune onto one base: every budget, seed and method, as `transport` runs them."""
    from gradfix.data import load_data
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.trial import Passes

    dataset = load_data(args.fieldtest / "tasks" / task)
    figures = json.loads((args.work / f"{target}-{task}" / "figures.json").read_text())
    with open(args.work / f"rows-{task}-{source}-{target}.jsonl", "a") as out:
        for real in [inputs == "real" for inputs in args.inputs if task != MANY or inputs == "labels"]:
            opened = Opened(
                Request(
                    base=folder_of(args, source), tuned=args.work / f"{source}-{task}", target=folder_of(args, target),
                    data=dataset, task="zero-shot", validation="none", finetune=False, device=args.device,
                    unlabelled=dataset.splits["validation"][:REAL] if real else None, passes=Passes(batch_size=256),
                )
            )  # fmt: skip
            opened.trial.judged = False
            for row in runs(args, opened, task):
                where = {"task": task, "source": source, "target": target, "inputs": "real" if real else "labels"}
                out.write(json.dumps({**where, **row, **shares(row, figures)}) + "\n")
                out.flush()


def runs(args: argparse.Namespace, opened: Any, task: str) -> Iterable[dict[str, Any]]:
    from gradfix.methods.method import NotHere
    from gradfix.methods.methods import METHODS as KNOWN
    from gradfix.methods.yardsticks import tokens_seen, trained_weights
    from gradfix.training.costs import Work
    from gradfix.vectors.scale import dialled

    trial, size, tokens = opened.trial, trained_weights(opened.bound), tokens_seen(opened.trial)
    full = Work(forward=64 * args.steps, backward=64 * args.steps, steps=args.steps).flops(size, tokens)
    methods = args.methods
    for seed, shots, name in product(args.seeds, args.many_shots if task == MANY else args.shots, methods):
        if time.time() - args.began > args.limit:
            return
        support = trial.support(shots, seed)
        trial.open_bill()
        begin = time.perf_counter()
        try:
            outcome = KNOWN[name].run(trial, support)
        except NotHere:
            continue
        work = trial.bill.total(time.perf_counter() - begin)
        with dialled(trial.model, outcome.update if outcome.update is not None else {}) as dial:
            dial.turn(outcome.alpha)
            accuracy = trial.score("test").accuracy
        told = {key: outcome.parts[key] for key in ("start", "start_alpha") if key in outcome.parts}
        yield {
            "shots": shots, "seed": seed, "method": name, "accuracy": accuracy, "alpha": outcome.alpha, **told,
            "seconds": work.seconds, "cost": work.flops(size, tokens) / full,
        }  # fmt: skip


def shares(row: dict[str, Any], figures: dict[str, float]) -> dict[str, float]:
    gain = figures["fine_tuned"] - figures["zero_shot"]
    share = (row["accuracy"] - figures["zero_shot"]) / gain if gain else 0.0
    return {
        "share": round(share, 4),
        **{name: figures[name] for name in ("zero_shot", "fine_tuned")},
        "time": row["seconds"] / figures["seconds"],
    }


def summary(rows: list[dict[str, Any]], banking: bool = False) -> dict[str, Any]:
    """Mean share (and cost and time beside a full fine-tune) by group, inputs, budget and method."""
    group = {pair: name for name, pairs in PAIRS.items() for pair in pairs}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if (row["task"] == MANY) == banking:
            where = group[row["source"], row["target"]], row["inputs"], str(row["shots"]), row["method"]
            found["/".join(where)].append(row)
    return {
        key: {
            "runs": len(ones),
            **{n: round(fmean(one[n] for one in ones), 4) for n in ("share", "accuracy", "cost", "time")},
        }
        for key, ones in sorted(found.items())
    }


if __name__ == "__main__":
    main()
