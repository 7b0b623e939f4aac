"""Retrievers from base to base, on real encoders: the share of the fine-tuning gain in nDCG@10 that arrives.

    python -m benchmarks.retrieval --fieldtest FOLDER [--work WORK] [--device cuda] [--jobs 5] [--seeds 0 1 2]

FOLDER holds models/, packed/ with unpack.py, and tasks/. Every encoder is tuned by contrast on the pairs of `banking`
(kept in WORK, 400 steps of 64 pairs, lr 2e-5), then moved onto others: from 500 unlabelled texts alone, and with 5
labelled ones per class on top. Searched are the texts of the test split, each for those with its label. Plain addition
and few-shot training have the same labels. Also the recall that --keep-index keeps. Nothing is chosen on test. Writes
benchmarks/results/retrieval.json: every run, and means by pair, budget and method."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.any_base import folder_of
from benchmarks.parts import in_parallel

PAIRS = {
    "related": [("minilm-l6", "gte-l6"), ("gte-l6", "minilm-l6")],
    "unrelated": [("e5-l12", "gte-l12"), ("gte-l12", "e5-l12")],
    "deeper": [("minilm-l6", "e5-l12")],
}
TASK, REAL, BATCH = "banking", 500, 64
RESULTS = Path(__file__).parent / "results" / "retrieval.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fieldtest", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("retrieval-work"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--groups", nargs="+", default=list(PAIRS))
    parser.add_argument("--methods", nargs="+", default=["best", "few_shot", "naive", "bico"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--began", type=float, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.began = args.began or time.time()
    if args.part:
        run_part(args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    names = ("fieldtest", "work", "device", "steps", "limit", "began")
    shared: list[object] = [word for name in names for word in (f"--{name}", getattr(args, name))]
    shared += [word for name in ("shots", "seeds", "methods") for word in (f"--{name}", *map(str, getattr(args, name)))]
    pairs = [pair for group in args.groups for pair in PAIRS[group]]
    models = dict.fromkeys(model for pair in pairs for model in pair)
    for model in models:
        folder_of(args, model)
    tuning = [("finetune", model) for model in models if not (args.work / f"{model}-pairs" / "figures.json").exists()]
    in_parallel("benchmarks.retrieval", shared, tuning, args.jobs)
    in_parallel("benchmarks.retrieval", shared, [("move", *pair) for pair in pairs], args.jobs)
    write(args)


def write(args: argparse.Namespace) -> None:
    from gradfix.checkpoints.folder import versions

    rows = [json.loads(line) for path in sorted(args.work.glob("rows-*")) for line in path.open()]
    tuned = {path.parent.name: json.loads(path.read_text()) for path in sorted(args.work.glob("*-pairs/figures.json"))}
    result = {
        "command": "python -m benchmarks.retrieval", "device": args.device, "seconds": time.time() - args.began,
        **versions(), "tuned": tuned, "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["summary"].items():
        print(key, value)


def run_part(args: argparse.Namespace) -> None:
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    kind, *rest = args.part
    {"finetune": finetune_part, "move": move_part}[kind](args, *rest)


def finetune_part(args: argparse.Namespace, model: str) -> None:
    from gradfix.checkpoints.folder import save_like
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.data import load_data
    from gradfix.tasks.embedding import EmbeddingTask
    from gradfix.tasks.scoring import evaluate
    from gradfix.training.finetuning import finetune

    source, out = folder_of(args, model), args.work / f"{model}-pairs"
    dataset = load_data(args.fieldtest / "tasks" / TASK)
    bound = EmbeddingTask(dataset.labels).open(source, device=args.device)

    def score(split: str) -> dict[str, float]:
        return evaluate(bound.model, bound, bound.scoring_batches(dataset.splits[split], 256))

    figures: dict[str, Any] = {split: {"before": score(split)} for split in ("validation", "test")}
    begin = time.perf_counter()
    finetune(bound, dataset.splits["train"], steps=args.steps, batch_size=BATCH, lr=2e-5)
    figures["seconds"] = time.perf_counter() - begin
    for split in ("validation", "test"):
        figures[split]["after"] = score(split)
    save_like(open_checkpoint(source), bound.model, out, extras=bound.save_extras, overwrite=True)
    (out / "figures.json").write_text(json.dumps(figures))


def move_part(args: argparse.Namespace, source: str, target: str) -> None:
    """One fine-tune onto one base: every budget, seed and method, as `transport` runs them."""
    from gradfix.data import load_data
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.search import Search
    from gradfix.methods.trial import Passes

    dataset = load_data(args.fieldtest / "tasks" / TASK)
    figures = json.loads((args.work / f"{target}-pairs" / "figures.json").read_text())
    opened = Opened(
        Request(
            base=folder_of(args, source), tuned=args.work / f"{source}-pairs", target=folder_of(args, target),
            data=dataset, task="embedding", validation="none", finetune=False, device=args.device,
            passes=Passes(batch_size=256), search=Search(rates=(3e-5, 1e-4), steps=(20, 40), folds=3),
        )
    )  # fmt: skip
    opened.trial.judged = False
    opened.trial.define("held", dataset.splits["validation"])  # looked at, never chosen on
    with open(args.work / f"rows-{source}-{target}.jsonl", "w") as out:
        for row in runs(args, opened):
            row |= {"source": source, "target": target, **shares(row, figures)}
            out.write(json.dumps(row) + "\n")
            out.flush()


def runs(args: argparse.Namespace, opened: Any) -> Iterable[dict[str, Any]]:
    from gradfix.methods.method import NotHere
    from gradfix.methods.methods import METHODS
    from gradfix.methods.yardsticks import tokens_seen, trained_weights
    from gradfix.training.costs import Work
    from gradfix.training.oldindex import keep_index
    from gradfix.vectors.scale import dialled

    trial = opened.trial
    size, tokens = trained_weights(trial.bound), tokens_seen(trial)
    texts = 2 * BATCH * args.steps
    full = Work(forward=texts, backward=texts, steps=args.steps).flops(size, tokens)
    for seed in args.seeds:
        drawn = random.Random(seed).sample(list(opened.splits.train), REAL)
        unlabelled = [{"text": row["text"]} for row in drawn]
        trial.splits = replace(opened.splits, unlabelled=unlabelled)
        trial.define(trial.set_name(0, seed), [])
        wanted = [(name, shots) for name in args.methods for shots in args.shots if shots or name in ("best", "bico")]
        for name, shots in wanted:
            if time.time() - args.began > args.limit or (name == "bico" and shots):
                continue
            support = trial.support(shots, seed)
            trial.open_bill()
            begin = time.perf_counter()
            try:
                outcome = turned(trial, support) if name == "bico" else METHODS[name].run(trial, support)
            except NotHere:
                continue
            work = trial.bill.total(time.perf_counter() - begin)
            row: dict[str, Any] = {
                "method": name, "shots": shots, "seed": seed, "alpha": outcome.alpha,
                **{key: outcome.parts[key] for key in ("start", "start_alpha", "steps") if key in outcome.parts},
                "seconds": work.seconds, "cost": work.flops(size, tokens) / full,
            }  # fmt: skip
            with dialled(trial.model, outcome.update if outcome.update is not None else {}) as dial:
                dial.turn(outcome.alpha)
                row |= {"test": trial.score("test").as_json(), "validation": trial.score("held").as_json()}
                if name == "best":
                    kept = keep_index(trial.bound, trial.teacher(), unlabelled, opened.splits.test, seed)
                    row["keep_index"] = kept.as_json()
            yield row


def turned(trial: Any, support: Any) -> Any:
    """The vector in the target's coordinates, as it is: what no label and no training gives."""
    from gradfix.methods import trained
    from gradfix.methods.method import Outcome

    return Outcome(trained.turned(trial, support, "bico"), 1.0)


def shares(row: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """The share of the target's own gain, on test and on validation."""
    found: dict[str, Any] = {"time": row["seconds"] / figures["seconds"]}
    for split, name in (("test", "share"), ("validation", "validation_share")):
        before, after = (figures[split][when]["accuracy"] for when in ("before", "after"))
        found[name] = round((row[split]["accuracy"] - before) / (after - before), 4)
    return {
        **found,
        "untouched": figures["test"]["before"]["accuracy"],
        "fine_tuned": figures["test"]["after"]["accuracy"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds by group, pair, budget and method."""
    group = {pair: name for name, pairs in PAIRS.items() for pair in pairs}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        pair = row["source"], row["target"]
        found["/".join((group[pair], " -> ".join(pair), str(row["shots"]), row["method"]))].append(row)
    return {key: _means(ones) for key, ones in sorted(found.items())}


def _means(ones: list[dict[str, Any]]) -> dict[str, Any]:
    means = {name: round(fmean(one[name] for one in ones), 4) for name in ("share", "validation_share", "cost", "time")}
    kept = [one["keep_index"]["kept"] for one in ones if "keep_index" in one]
    told = {"runs": len(ones), "nDCG@10": round(fmean(one["test"]["accuracy"] for one in ones), 2), **means}
    return {**told, **({"kept": round(fmean(kept), 4)} if kept else {})}


if __name__ == "__main__":
    main()
