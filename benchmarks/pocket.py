"""The best recipe against tuned few-shot fine-tuning on the embedded models, both pairs.

    python -m benchmarks.pocket [--seeds 0 1 2] [--shots 5 20]

Everything is chosen on 150 validation images; scored on 400 test images. Writes benchmarks/results/pocket.json."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

RESULTS = Path(__file__).parent / "results" / "pocket.json"
METHODS = ("zero_shot", "few_shot", "best", "fine_tuned")
KEPT = ("pair", "method", "shots", "seed", "accuracy", "recovered", "seconds", "notes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 20])
    args = parser.parse_args()
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch

    from gradfix import pocket
    from gradfix.checkpoints.folder import versions
    from gradfix.comparison.running import compare
    from gradfix.comparison.searching import Search
    from gradfix.data import load_data

    torch.set_num_threads(1)
    search = replace(Search.quick(), rates=(1e-4, 3e-4, 1e-3), steps=(10, 20, 40))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = pocket.materialise(folder)
        dataset = load_data(paths["tasks"][pocket.PRIMARY])
        images = {"validation": 150, "test": 400}
        dataset = replace(
            dataset, splits={name: part[: images.get(name)] for name, part in dataset.splits.items()}
        )
        for pair in pocket.PAIRS:
            results = compare(
                **paths[pair], data=dataset, task="classification", shots=args.shots, seeds=args.seeds,
                methods=METHODS, search=search, batch_size=50, pair=pair,
            )  # fmt: skip
            rows += [{name: row[name] for name in KEPT} for row in results.rows]
    write(rows, versions())


def write(rows: list[dict], about: dict) -> None:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(f"{row['pair']}/{row['shots']}/{row['method']}", []).append(row["accuracy"])
    summary = {name: round(fmean(values), 2) for name, values in groups.items()}
    content = {"command": "python -m benchmarks.pocket", **about, "summary": summary, "rows": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
