"""What `best` takes with a device to itself, beside a fine-tune of 400 steps of 64 on the same device.

    python -m benchmarks.recipe_seconds --fieldtest FOLDER [--device cuda] [--pairs e5-l12:gte-l12 ...] [--tasks tweets pairs ...]

FOLDER holds models/, packed/ with unpack.py, and tasks/. Seconds are those of the method as `transport` and `compare` run it, models open, seed
by seed; the first of a process pays for what is loaded once. Old fine-tunes are of a few steps only: how good they are changes
no cost. The fine-tune is timed over a few steps and multiplied: by `gradfix finetune`, and as plain torch steps. "pairs" is the
retriever's task: 500 texts of `banking` alone, beside 400 steps of 64 pairs. Adds to benchmarks/results/recipe_seconds.json under
the device's name."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from benchmarks.any_base import folder_of
from benchmarks.parts import begun

PAIRS, TASKS = ("minilm-l6:gte-l6", "e5-l12:gte-l12"), ("tweets", "movie", "pairs")
RETRIEVAL, TEXTS = "banking", 500
STEPS, BATCH, RATE = 400, 64, 2e-5
RESULTS = Path(__file__).parent / "results" / "recipe_seconds.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fieldtest", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--timed", type=int, default=40, help="steps of the fine-tune that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    content = begun(args.out, "recipe_seconds")
    import torch

    from gradfix.checkpoints.folder import device_name, versions

    told = content.setdefault(device_name(torch.device(args.device)), {})
    told |= versions()
    with tempfile.TemporaryDirectory() as folder:
        for task in args.tasks:
            for pair in args.pairs:
                found = told[f"{task}/{pair}"] = measured(args, Path(folder), task, *pair.split(":"))
                print(task, pair, json.dumps(found), flush=True)
                args.out.write_text(json.dumps(content, indent=1) + "\n")


def measured(args: argparse.Namespace, work: Path, task: str, source: str, target: str) -> dict[str, Any]:
    from gradfix.data import load_data
    from gradfix.methods.opening import Opened, Request
    from gradfix.methods.trial import Passes
    from gradfix.tasks.embedding import EmbeddingTask
    from gradfix.tasks.zero_shot import ZeroShot

    retrieval = task == "pairs"
    data = load_data(args.fieldtest / "tasks" / (RETRIEVAL if retrieval else task))
    base, onto = (folder_of(SimpleNamespace(fieldtest=args.fieldtest, work=work), one) for one in (source, target))
    kind = EmbeddingTask(data.labels) if retrieval else ZeroShot(data.labels)
    train = data.splits["train"]
    tuned = work / f"{source}-{task}"
    if not tuned.is_dir():
        tune(kind, base, train, tuned, args.device)
    whole = {name: STEPS / args.timed * seconds for name, seconds in fine_tunes(kind, onto, train, args).items()}
    drawn = random.Random(0).sample(list(train), TEXTS)
    opened = Opened(
        Request(
            base=base, tuned=tuned, target=onto, data=data, task="embedding" if retrieval else "zero-shot", validation="none",
            finetune=False, unlabelled=[{"text": row["text"]} for row in drawn] if retrieval else None, device=args.device,
            passes=Passes(batch_size=256),
        )
    )  # fmt: skip
    opened.trial.judged = False
    seconds = [taken(opened.trial, 0 if retrieval else args.shots, seed, args.device) for seed in args.seeds]
    usual = fmean(seconds[1:])
    return {
        "seconds": usual, "first": seconds[0], "each": seconds[1:], "fine_tune": whole,
        "share": {name: usual / took for name, took in whole.items()},
    }  # fmt: skip


def taken(trial: Any, shots: int, seed: int, device: str) -> float:
    from gradfix.methods.methods import METHODS

    support = trial.support(shots, seed)
    trial.open_bill()
    began = _now(device)
    METHODS["best"].run(trial, support)
    return _now(device) - began


def tune(kind: Any, base: Path, train: Any, out: Path, device: str, steps: int = 20) -> None:
    from gradfix.checkpoints.folder import save_like
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.training.finetuning import finetune

    bound = kind.open(base, device=device)
    finetune(bound, train, steps=steps, batch_size=BATCH, lr=RATE)
    save_like(open_checkpoint(base), bound.model, out, extras=bound.save_extras)


def fine_tunes(kind: Any, onto: Path, train: Any, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of some steps on the target, by ours and as plain torch takes them; a few before are not timed."""
    import torch

    from gradfix.training.finetuning import finetune

    warm, found = 2, dict[str, float]()
    bound = kind.open(onto, device=args.device)
    finetune(bound, train, steps=warm, batch_size=BATCH, lr=RATE)
    began = _now(args.device)
    finetune(bound, train, steps=args.timed, batch_size=BATCH, lr=RATE)
    found["gradfix"] = _now(args.device) - began
    if not hasattr(bound, "head"):  # a retriever's batches are pairs, which are made elsewhere
        return found
    optimizer = torch.optim.AdamW(bound.model.parameters(), lr=RATE)
    for step in range(warm + args.timed):
        if step == warm:
            began = _now(args.device)
        batch = bound.collate(random.Random(step).sample(list(train), BATCH))
        bound.loss(bound.model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["torch"] = _now(args.device) - began
    return found


def _now(device: str) -> float:
    """Seconds of the clock with a card to itself; of the processor elsewhere, where others may share the machine."""
    import torch

    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
