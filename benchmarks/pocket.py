"""The best recipe against tuned few-shot fine-tuning on the embedded models, both pairs, with and without validation.

    python -m benchmarks.pocket [--jobs 2] [--seeds 0 1 2] [--shots 5 20]

With validation everything is chosen on 150 images; without it by folds of the few-shot set. Scored on 400 test
images. Writes benchmarks/results/pocket.json."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.parts import in_parallel

RESULTS = Path(__file__).parent / "results" / "pocket.json"
METHODS = ("zero_shot", "few_shot", "best", "fine_tuned")
REGIMES = {"validation": "auto", "few_shot": "none"}
KEPT = ("pair", "method", "regime", "shots", "seed", "accuracy", "recovered", "seconds", "notes")


def main() -> None:
    from gradfix.checkpoints.folder import versions
    from gradfix.pocket import PAIRS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(*args.part)
        return
    with tempfile.TemporaryDirectory() as folder:
        parts = product([folder], PAIRS, REGIMES, args.shots, args.seeds)
        in_parallel("benchmarks.pocket", [], parts, args.jobs)
        files = sorted(Path(folder).glob("rows-*.json"))
        rows = [row for file in files for row in json.loads(file.read_text())]
    write(args.out, rows, versions())


def run_part(folder: str, pair: str, regime: str, shots: str, seed: str) -> None:
    import torch

    from gradfix import pocket
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from gradfix.data import load_data
    from gradfix.methods.comparison import compare
    from gradfix.methods.search import Search

    torch.set_num_threads(1)
    search = replace(Search.quick(), rates=(1e-4, 3e-4, 1e-3), steps=(10, 20, 40))
    with tempfile.TemporaryDirectory() as models:
        paths = pocket.materialise(models)
        dataset = load_data(paths["tasks"][pocket.PRIMARY])
        images = {"validation": 150, "test": 400}
        dataset = replace(dataset, splits={name: part[: images.get(name)] for name, part in dataset.splits.items()})
        results = compare(
            **paths[pair], data=dataset, task="classification", shots=[int(shots)], seeds=[int(seed)],
            methods=METHODS, validation=REGIMES[regime], search=search, batch_size=50, pair=pair, device="cpu",
        )  # fmt: skip
    rows = [{name: row[name] for name in KEPT} for row in results.rows]
    Path(folder, f"rows-{pair}-{regime}-{shots}-{seed}.json").write_text(json.dumps(rows))


def write(out: Path, rows: list[dict], about: dict) -> None:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault("/".join(str(row[name]) for name in ("pair", "regime", "shots", "method")), []).append(
            row["accuracy"]
        )
    summary = {name: round(fmean(values), 2) for name, values in groups.items()}
    content = {"command": "python -m benchmarks.pocket", **about, "summary": summary, "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
