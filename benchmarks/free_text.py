"""Free text on a real small language model: the share of the fine-tune's gain in loss that arrives on another base.

    python -m scripts.stories --base BASE --out STORIES --device cuda
    python -m benchmarks.free_text --base BASE --stories STORIES [--work WORK] [--device cuda] [--jobs 16] [--seeds 0 1 2]
    python -m benchmarks.free_text --stage write --rows ROWS [ROWS ...]

BASE is fine-tuned on three open tasks (all weights, and a LoRA), then moved onto its siblings: another seed of its shape,
another width and depth, another tokenizer. 16 labelled prompts, without and with 500 unlabelled ones; no run chooses on
test. The siblings are fine-tuned in full to know how much there was to gain. Every figure is a line of WORK/rows.jsonl as soon
as it is known; the same command runs what is missing, and benchmarks/results/free_text.json is written from those lines, of one
run or of several. Settings under other names than `best` (`--speech`) stand apart there, as variants."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parts import in_forks

TARGETS = ("same", "shape", "tokenizer")
TASKS = ("latin", "title", "words")
SHOTS, REAL = 16, 500
KINDS = {"labels": ("best",), "real": ("best",), "lora": ("copy_adapter", "best"), "train": ("best",),
         "train_real": ("best",), "few_shot": ("few_shot_lora",), "baselines": ("naive", "gradfix", "veto")}  # fmt: skip
WITHOUT_RECIPE = ("few_shot", "baselines")
LEAN, WITH_REAL = ("train", "train_real"), ("real", "train_real")
RUN = ("task", "target", "source", "inputs", "method", "seed")
DONE = "tuned"
TUNING = {"steps": 500, "batch_size": 32, "lr": 2e-4, "weight_decay": 0.0}
LORA = {"rate": 5e-4, "rank": 32, "alpha": 32, "steps": 400, "weight_decay": 0.01}
BESIDE = {"train": "full", "asking": {"batch": 64}}  # others on the card: what is free of it decides nothing
RESULTS = Path(__file__).parent / "results" / "free_text.json"
METHODS = {method for methods in KINDS.values() for method in methods}
MEANS = ("share", "loss", "exact", "token_f1", "general_loss", "divergence", "seconds")


def main() -> None:
    args = settings()
    failed = []
    if args.stage in ("all", "tune"):
        failed += in_forks(prepare, partial(tune_part, args), tunes(args), args.jobs)
    if args.stage in ("all", "move"):
        failed += in_forks(prepare, partial(move_part, args), moves(args), args.jobs)
    if args.stage in ("all", "write"):
        write(args)
    if failed:
        raise SystemExit(f"{len(failed)} parts failed; the same command runs what is missing")


def settings(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--work", type=Path, default=Path("free-text-work"))
    parser.add_argument("--rows", type=Path, nargs="+", help="figures of earlier runs; new ones go to the first file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=TUNING["steps"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--sources", nargs="*", default=["full", "lora"], help="how BASE is fine-tuned")
    parser.add_argument("--stage", choices=("all", "tune", "move", "write"), default="all")
    parser.add_argument(
        "--speech", type=json.loads, default={"best": {}}, help="settings of the recipe by name, as JSON"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--note", default="", help="how the figures came together, written beside them")
    args = parser.parse_args(words)
    if args.stage != "write" and not (args.base and args.stories):
        parser.error("--base and --stories are needed")
    args.began = time.time()
    args.rows = args.rows or [args.work / "rows.jsonl"]
    return args


def tunes(args: argparse.Namespace) -> list[tuple[str, ...]]:
    wanted = [*(("base", source) for source in args.sources), *((target, "full") for target in args.targets)]
    parts = [(model, kind, task) for (model, kind), task in product(wanted, args.tasks)]
    return [part for part in parts if not (args.work / "-".join(part) / DONE).exists()]


def moves(args: argparse.Namespace) -> list[tuple[str, ...]]:
    runs = [(kind, name) for kind in args.kinds for name in (args.speech if kind not in WITHOUT_RECIPE else [""])]
    return [(*run, str(seed), *where) for run, seed, *where in product(runs, args.seeds, args.tasks, args.targets)]


def tell(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """One more line, whole even where the run is killed and others write beside it."""
    line = json.dumps(figures) + "\n"
    args.rows[0].parent.mkdir(parents=True, exist_ok=True)
    file = os.open(args.rows[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    print(line, end="", flush=True)


def told(args: argparse.Namespace) -> tuple[dict[str, Any], dict[tuple[Any, ...], dict[str, Any]]]:
    """Figures of fine-tunes by name, and runs by what was run; where one was made twice, the last one."""
    lines = chain.from_iterable(path.open() for path in args.rows if path.exists())
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    tuned = {row["tuned"]: row for row in found if "tuned" in row}
    return tuned, {tuple(row[name] for name in RUN): row for row in found if "tuned" not in row}


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
    tuned, runs = told(args)
    rows = [with_share(row, tuned) for _, row in sorted(runs.items())]
    machines = sorted({json.dumps(row.pop("machine", None)) for row in (*tuned.values(), *rows)})
    tried = [row for row in rows if not measured(row)]
    rows = [row for row in rows if measured(row)]
    result = {
        "command": "python -m benchmarks.free_text", "note": args.note,
        "machines": [json.loads(machine) for machine in machines], "tuned": dict(sorted(tuned.items())),
        "summary": summary(rows), "rows": rows, "variants": tried,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["summary"].items():
        print(key, value)


def measured(row: dict[str, Any]) -> bool:
    """Whether a row is of a method as it is, and not of other settings that were tried."""
    return row["method"].partition(",")[0] in METHODS


def machine(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from gradfix.checkpoints.folder import versions

    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {"device": device, "processes": args.jobs, **versions()}


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

    name = f"{model}-{kind}-{task}"
    source, out = folder_of(args, model), args.work / name
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
    seconds = time.perf_counter() - begin
    tell(
        args,
        {"tuned": name, "zero_shot": before, "fine_tuned": figures(), "seconds": seconds, "machine": machine(args)},
    )
    (out / DONE).touch()


def tune_lora(args: argparse.Namespace, bound: Any, rows: Any, out: Path) -> None:
    """As people do it: peft's own model, trained on the answers, saved by peft. Words that no story has need the token table."""
    from peft import LoraConfig, get_peft_model

    from gradfix.training.steps import Training, draws, warmed

    paths = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"]
    config = LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=paths, task_type="CAUSAL_LM", ensure_weight_tying=True
    )
    model = get_peft_model(bound.model, config)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    steps = args.steps * LORA["steps"] // TUNING["steps"]
    training = Training(
        parameters, lambda step: warmed(step, LORA["rate"], steps, max(1, steps // 10)), lambda *_: SystemExit("NaN"),
        weight_decay=LORA["weight_decay"],
    )  # fmt: skip
    for step, places in zip(range(steps), draws(len(rows), TUNING["batch_size"], 0)):
        training.step(step, [bound.loss(model, bound.collate([rows[place] for place in places])).mean()])
    model.save_pretrained(out)


def move_part(args: argparse.Namespace, kind: str, name: str, seed: str, task: str, target: str) -> None:
    """One fine-tune onto one base, as `transport` runs it."""
    import torch

    from gradfix.data import load_data
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.search import Search
    from gradfix.methods.trial import Passes

    source = "lora" if kind == "lora" else "full"
    where = {"task": task, "target": target, "source": source, "inputs": "real" if kind in WITH_REAL else "labels"}
    label = f"{name}, --train lora" if kind in LEAN else name
    done = told(args)[1]
    known = {method for *which, method, number in done if which == list(where.values()) and number == int(seed)}
    methods = [method for method in KINDS[kind] if (label if method == "best" else method) not in known]
    if not methods or time.time() - args.began > args.limit:
        return
    dataset = load_data(args.stories / "tasks" / task)
    speech = speech_of({**BESIDE, **args.speech.get(name, {}), **({"train": "lora"} if kind in LEAN else {})})
    opened = Opened(
        Request(
            base=args.base, tuned=args.work / f"base-{source}-{task}", target=folder_of(args, target),
            data=dataset, task="causal", validation="none", finetune=False, device=args.device,
            unlabelled=dataset.splits["validation"][:REAL] if kind in WITH_REAL else None,
            passes=Passes(batch_size=args.batch), speech=speech, search=Search(folds=3),
        )
    )  # fmt: skip
    opened.trial.judged = False
    outside = figures_of(args, opened.trial, task)
    for row in runs(opened, methods, int(seed), outside):
        tell(
            args,
            {**where, **row, "method": label if row["method"] == "best" else row["method"], "machine": machine(args)},
        )
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


def runs(opened: Any, methods: list[str], seed: int, outside: Any) -> Iterator[dict[str, Any]]:
    import torch

    from gradfix.methods.method import NotHere
    from gradfix.methods.methods import METHODS as KNOWN
    from gradfix.training.lowrank import moved_by

    trial = opened.trial
    for name in methods:
        support = trial.support(SHOTS, seed)
        trial.open_bill()
        begin = time.perf_counter()
        on_card = next(trial.model.parameters()).is_cuda
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        try:
            outcome = KNOWN[name].run(trial, support)
        except NotHere:  # across shapes
            continue
        seconds = time.perf_counter() - begin
        peak = {"peak_mib": torch.cuda.max_memory_allocated() >> 20} if on_card else {}
        with moved_by(trial.model, outcome.update if outcome.update is not None else {}, outcome.alpha):
            score = trial.score("test")
            figures = outside()
        told = ("start", "start_alpha", "rate", "steps", "divergence", "train")
        parts = {f"recipe_{key}": outcome.parts[key] for key in told if key in outcome.parts}
        yield {
            "method": name, "seed": seed, "loss": score.loss, "exact": score.accuracy,
            "alpha": outcome.alpha, "seconds": round(seconds, 2), **peak, **figures, **parts,
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
