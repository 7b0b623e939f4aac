"""python benchmarks/plan_card.py [--votes benchmarks/results/votes_h200.json] [--json benchmarks/results/plan_card.json]

Hold the passes that `gradfix plan` walks through without weights against the peak memory that `benchmarks/votes.py`
measured on a card, for the same models and batches. Needs no card. Peaks are beyond the weights, votes included."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def rehearsal(name: str, dtype: Any) -> Any:
    """The benchmark's own model and loss, without weights."""
    import torch

    from benchmarks.vote_models import MODELS
    from gradfix.commands.plan import Rehearsal

    with torch.device("meta"):
        model, loss, batch = MODELS[name](1)
    model = model.to(dtype).eval()

    def score(model: Any, samples: int) -> Any:
        kinds = {n: dtype if t.is_floating_point() else t.dtype for n, t in batch.items()}
        return loss(model, {n: torch.zeros(samples, *t.shape[1:], dtype=kinds[n]) for n, t in batch.items()})

    return Rehearsal(model, score, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--votes", type=Path, default=ROOT / "benchmarks" / "results" / "votes_h200.json")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "plan_card.json")
    arguments = parser.parse_args()
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch

    measured = json.loads(arguments.votes.read_text())
    rows = []
    for row in measured["rows"]:
        model = rehearsal(row["model"], getattr(torch, row["dtype"]))
        for engine, count in (("batched", row["micro_batch"]), ("loop", 1)):
            if "peak_bytes" not in row["schemes"].get(engine, {}):
                continue
            walked = model.walk(count)
            planned = (walked.bare if engine == "batched" else walked.memory) + row["parameters"]
            found = row["schemes"][engine]["peak_bytes"]
            rows.append(
                {
                    "model": row["model"],
                    "dtype": row["dtype"],
                    "engine": engine,
                    "samples_at_once": count,
                    "planned_gb": round(planned / 1e9, 3),
                    "measured_gb": round(found / 1e9, 3),
                    "ratio": round(planned / found, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    about = {"measured_with": measured["versions"], "walked_with": {"torch": torch.__version__}}
    arguments.json.write_text(json.dumps({"rows": rows, **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
