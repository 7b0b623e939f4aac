"""Free text on a real small language model: the share of the fine-tune's gain in loss that arrives on another base.

    python -m scripts.stories --base BASE --out STORIES --device cuda
    python -m benchmarks.free_text --base BASE --stories STORIES [--work WORK] [--device cuda] [--jobs 16] [--seeds 0 1 2]

BASE is fine-tuned on three open tasks (all weights, and a LoRA), then moved onto its siblings: another seed of its shape,
another width and depth, another tokenizer. 16 labelled prompts, without and with 500 unlabelled ones; nothing is chosen on
test. The siblings are fine-tuned in full to know how much there was to gain. Writes benchmarks/results/free_text.json."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parts import in_forks

TARGETS = ("same", "shape", "tokenizer")
TASKS = ("latin", "title", "words")
SHOTS, REAL = 16, 500
BASELINES = ("naive", "few_shot_lora", "gradfix", "veto")
TUNING = {"steps": 500, "batch_size": 32, "lr": 2e-4, "weight_decay": 0.0}
LORA = {"rate": 1e-3, "rank": 16}
RESULTS = Path(__file__).parent / "results" / "free_text.json"
MEANS = ("share", "loss", "exact", "token_f1", "general_loss", "divergence", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("free-text-work"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=TUNING["steps"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--kinds", nargs="+", default=["labels", "real", "lora", "baselines"])
    parser.add_argument("--sources", nargs="*", default=["full", "lora"], help="how BASE is fine-tuned")
    parser.add_argument("--stage", choices=("all", "tune", "move"), default="all")
    parser.add_argument(
        "--speech", type=json.loads, default={"best": {}}, help="settings of the recipe by name, as JSON"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.began = time.time()
    args.work.mkdir(parents=True, exist_ok=True)
    failed = []
    if args.stage in ("all", "tune"):
        wanted = [*(("base", source) for source in args.sources), *((target, "full") for target in args.targets)]
        parts = [(model, kind, task) for (model, kind), task in product(wanted, args.tasks)]
        missing = [part for part in parts if not (args.work / "-".join(part) / "figures.json").exists()]
        failed += in_forks(prepare, partial(tune_part, args), missing, args.jobs)
    if args.stage in ("all", "move"):
        runs = [(kind, name) for kind in args.kinds for name in (args.speech if kind != "baselines" else [""])]
        cells = product(runs, args.seeds, args.tasks, args.targets)
        parts = [(*run, str(seed), *where) for run, seed, *where in cells]
        failed += in_forks(prepare, partial(move_part, args), parts, args.jobs)
        write(args)
    if failed:
        raise SystemExit(f"{len(failed)} parts failed; the same command runs what is missing")


def prepare() -> None:
    """Import what every part needs, on one thread, and touch no device."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other check would
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import gradfix.methods.methods
    import gradfix.methods.opening
    import gradfix.training.finetuning  # noqa: F401


def write(args: argparse.Namespace) -> None:
    from gradfix.checkpoints.folder import versions

    paths = [path for name in ("", *args.speech) for path in sorted(args.work.glob(f"rows-{name}-*"))]
    tuned = {path.parent.name: json.loads(path.read_text()) for path in sorted(args.work.glob("*/figures.json"))}
    rows = [with_share(json.loads(line), tuned) for path in paths for line in path.open() if line.endswith("\n")]
    result = {
        "command": "python -m benchmarks.free_text", "device": args.device, "seconds": time.time() - args.began,
        **versions(), "tuned": tuned, "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["summary"].items():
        print(key, value)


def with_share(row: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """How much of what a full fine-tune of the target gains in loss per token."""
    ends = tuned[f"{row['target']}-full-{row['task']}"]
    zero, best = (ends[name]["loss"] for name in ("zero_shot", "fine_tuned"))
    return {**row, "share": round((zero - row["loss"]) / (zero - best), 4)}


def folder_of(args: argparse.Namespace, model: str) -> Path:
    return Path(args.base if model == "base" else args.stories / model)


def tune_part(args: argparse.Namespace, model: str, kind: str, task: str) -> None:
    from gradfix.checkpoints.folder import save_like
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.data import load_data
    from gradfix.tasks.causal import Causal
    from gradfix.tasks.scoring import evaluate
    from gradfix.training.finetuning import finetune
    from gradfix.training.retained import Outside

    source, out = folder_of(args, model), args.work / f"{model}-{kind}-{task}"
    dataset = load_data(args.stories / "tasks" / task)
    bound = Causal().open(source, device=args.device)
    outside = Outside.of(bound, json.loads((args.stories / "tasks" / "general.json").read_text()))

    def figures() -> dict[str, float]:
        found = evaluate(bound.model, bound, bound.scoring_batches(dataset.splits["test"], 64))
        return {"loss": found["loss"], "exact": found["accuracy"], **(outside.measure(bound) or {})}

    before, begin = figures(), time.perf_counter()
    if kind == "lora":
        tune_lora(args, bound, dataset.splits["train"], out)
    else:
        finetune(bound, dataset.splits["train"], **{**TUNING, "steps": args.steps})
        save_like(open_checkpoint(source), bound.model, out, overwrite=True)
    found = {"zero_shot": before, "seconds": time.perf_counter() - begin}
    found["fine_tuned"] = figures()
    (out / "figures.json").write_text(json.dumps(found))


def tune_lora(args: argparse.Namespace, bound: Any, rows: Any, out: Path) -> None:
    """As people do it: peft's own model, trained on the answers, saved by peft."""
    from peft import LoraConfig, get_peft_model

    from gradfix.training.steps import Training, draws, warmed

    paths = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(bound.model, LoraConfig(r=LORA["rank"], lora_alpha=LORA["rank"], target_modules=paths))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    training = Training(
        parameters, lambda step: warmed(step, LORA["rate"], args.steps, 40), lambda *_: SystemExit("NaN")
    )
    for step, places in zip(range(args.steps), draws(len(rows), TUNING["batch_size"], 0)):
        training.step(step, [bound.loss(model, bound.collate([rows[place] for place in places])).mean()])
    model.save_pretrained(out)
    model.merge_and_unload()


def move_part(args: argparse.Namespace, kind: str, name: str, seed: str, task: str, target: str) -> None:
    """One fine-tune onto one base, as `transport` runs it."""
    import torch

    from gradfix.data import load_data
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.search import Search
    from gradfix.methods.trial import Passes

    whole = args.work / f"rows-{name}-{kind}-{task}-{target}-{seed}.jsonl"
    if whole.exists() or time.time() - args.began > args.limit:
        return
    dataset = load_data(args.stories / "tasks" / task)
    source = "lora" if kind == "lora" else "full"
    opened = Opened(
        Request(
            base=args.base, tuned=args.work / f"base-{source}-{task}", target=folder_of(args, target),
            data=dataset, task="causal", validation="none", finetune=False, device=args.device,
            unlabelled=dataset.splits["validation"][:REAL] if kind == "real" else None,
            passes=Passes(batch_size=args.batch), speech=speech_of(args.speech.get(name, {})), search=Search(folds=3),
        )
    )  # fmt: skip
    opened.trial.judged = False
    outside = figures_of(args, opened.trial, task)
    methods = {"baselines": BASELINES, "lora": ("copy_adapter", "best")}.get(kind, ("best",))
    where = {"task": task, "target": target, "source": source, "inputs": "real" if kind == "real" else "labels"}
    part = whole.with_suffix(".part")
    with part.open("w") as out:
        for row in runs(opened, methods, int(seed), outside):
            row["method"] = name if row["method"] == "best" else row["method"]
            line = json.dumps({**where, **row})
            print(line, flush=True)
            out.write(line + "\n")
            out.flush()
    part.rename(whole)
    if args.device == "cuda":
        torch.cuda.empty_cache()


def speech_of(given: dict[str, Any]) -> Any:
    from gradfix.training.free_text import Speech

    speech = Speech(**{name: value for name, value in given.items() if not isinstance(value, dict)})
    parts = {name: replace(getattr(speech, name), **value) for name, value in given.items() if isinstance(value, dict)}
    return replace(speech, **parts)


def figures_of(args: argparse.Namespace, trial: Any, task: str) -> Any:
    """Test answers, stories that no task shows, and prompts of the other tasks."""
    from gradfix.methods.speaking import SpokenFigures
    from gradfix.training.retained import Outside

    general = json.loads((args.stories / "tasks" / "general.json").read_text())
    others = [name for name in TASKS if name != task]
    lines = [(args.stories / "tasks" / name / "test.jsonl").read_text().splitlines()[:16] for name in others]
    prompts = [json.loads(line)["prompt"] for some in lines for line in some]
    spoken = SpokenFigures(trial, trial.splits.test, general)
    elsewhere = Outside.of(trial.bound, prompts)

    def take() -> dict[str, float]:
        found = spoken.take()
        measured = elsewhere.measure(trial.bound) or {}
        return {
            "token_f1": found["token_f1"], "match": found["generated_match"], "general_loss": found["general_loss"],
            "divergence": measured["divergence"],
        }  # fmt: skip

    return take


def runs(opened: Any, methods: tuple[str, ...], seed: int, outside: Any) -> Iterator[dict[str, Any]]:
    from gradfix.methods.method import NotHere
    from gradfix.methods.methods import METHODS as KNOWN
    from gradfix.training.lowrank import moved_by

    trial = opened.trial
    for name in methods:
        support = trial.support(SHOTS, seed)
        trial.open_bill()
        begin = time.perf_counter()
        try:
            outcome = KNOWN[name].run(trial, support)
        except NotHere:  # across shapes
            continue
        seconds = time.perf_counter() - begin
        with moved_by(trial.model, outcome.update if outcome.update is not None else {}, outcome.alpha):
            score = trial.score("test")
            figures = outside()
        told = ("start", "start_alpha", "rate", "steps", "divergence", "train")
        parts = {f"recipe_{key}": outcome.parts[key] for key in told if key in outcome.parts}
        yield {
            "method": name, "seed": seed, "loss": score.loss, "exact": score.accuracy,
            "alpha": outcome.alpha, "seconds": round(seconds, 2), **figures, **parts,
        }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By target, inputs, source and method: the mean over tasks of the means over seeds."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found["/".join(row[name] for name in ("target", "inputs", "source", "method"))][row["task"]].append(row)
    return {
        key: {
            "runs": {task: len(ones) for task, ones in sorted(tasks.items())},
            **{name: round(fmean(fmean(one[name] for one in ones) for ones in tasks.values()), 4) for name in MEANS},
        }
        for key, tasks in sorted(found.items())
    }


if __name__ == "__main__":
    main()
