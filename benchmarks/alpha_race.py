"""What racing for alpha costs in accuracy: the race's choice against the full grid's, on the field test.

    python -m benchmarks.alpha_race --fieldtest FOLDER --work WORK [--device cuda] [--jobs 10] [--seeds 0 1 2]

FOLDER and WORK are those of `benchmarks.fieldtest`; fine-tunes that WORK lacks are made. Every fine-tune is moved onto the
other encoder twice by the public `compare`: as it searches by default, and with `Search(full=True)`, which measures every
alpha on all examples. Rows that WORK has are kept. Writes benchmarks/results/alpha_race.json: every choice with its test
accuracy, and what the race gains (+) or loses (-) on average, in points."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.fieldtest import MODELS, REGIMES, TASKS, finetune_part, options
from benchmarks.parts import in_forks

METHODS = ("naive", "gradfix")
RESULTS = Path(__file__).parent / "results" / "alpha_race.json"


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--sources", nargs="+", default=list(MODELS))
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    tuning = [one for one in product(MODELS, args.tasks) if not (args.work / "-".join(one) / "config.json").exists()]
    failed = in_forks(prepare, partial(finetune_part, args), tuning, args.jobs) if tuning else []
    parts = product(args.tasks, args.sources, args.regimes, map(str, args.seeds))
    missing = [part for part in parts if not rows_of(args, part).exists()]
    failed += in_forks(prepare, partial(race_part, args), missing, args.jobs) if missing else []
    write(args, time.perf_counter() - begin)
    if failed:
        raise SystemExit(f"failed: {failed}")


def prepare() -> None:
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    import gradfix.methods.comparison
    import gradfix.tasks
    import gradfix.training.finetuning  # noqa: F401


def rows_of(args: argparse.Namespace, part: tuple[str, ...]) -> Path:
    return args.work / f"alpha-race-{'-'.join(part)}.json"


def race_part(args: argparse.Namespace, *part: str) -> None:
    from gradfix.methods.comparison import compare
    from gradfix.methods.search import Search

    task, source, regime, seed = part
    target = MODELS[1 - MODELS.index(source)]
    told: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for how, search in (("race", Search()), ("grid", Search(full=True))):
        results = compare(
            base=args.fieldtest / "models" / source, tuned=args.work / f"{source}-{task}",
            target=args.fieldtest / "models" / target, data=args.fieldtest / "tasks" / task, task="zero-shot",
            shots=args.shots, seeds=[int(seed)], methods=METHODS, finetune=False, search=search, batch_size=256,
            validation="auto" if regime == "validation" else "none", device=args.device,
        )  # fmt: skip
        told[how] = {(row["method"], row["shots"]): row for row in results.rows if row["method"] in METHODS}
    rows = [
        {
            "task": task, "source": source, "regime": regime, "shots": shots, "seed": int(seed), "method": method,
            **{f"{to}_{how}": told[how][method, shots][name]
               for to, name in (("alpha", "alpha"), ("test", "accuracy"), ("seconds", "seconds")) for how in told},
        }
        for method, shots in told["race"]
    ]  # fmt: skip
    rows_of(args, part).write_text(json.dumps(rows))


def write(args: argparse.Namespace, seconds: float) -> None:
    from gradfix.checkpoints.folder import versions

    rows = [row for path in sorted(args.work.glob("alpha-race-*.json")) for row in json.loads(path.read_text())]
    result = {
        "command": "python -m benchmarks.alpha_race", "device": args.device, "seconds": seconds, **versions(),
        "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, entry in result["summary"].items():
        print(key, json.dumps(entry))


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Points of the race above the grid, by regime, method and budget, and over all; and how often the alphas are equal."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for key in ("all", row["regime"], "/".join(str(row[name]) for name in ("regime", "method", "shots"))):
            groups[key].append(row)
    return {
        key: {
            "rows": len(group),
            "points": round(fmean(row["test_race"] - row["test_grid"] for row in group), 3),
            "same_alpha": round(fmean(row["alpha_race"] == row["alpha_grid"] for row in group), 3),
            "seconds_share": round(
                sum(row["seconds_race"] for row in group) / sum(row["seconds_grid"] for row in group), 3
            ),
        }
        for key, group in sorted(groups.items())
    }


if __name__ == "__main__":
    main()
