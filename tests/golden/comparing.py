"""What `gradfix compare` and `transport --method` choose and reach: float64 on small trained models,
float32 on the embedded ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.golden.command import do
from tests.golden.folders import Words

ROW = ("accuracy", "alpha", "margin", "validation_score", "regime", "samples", "rate", "steps", "start_alpha")
VERDICT = ("method", "next", "transport", "best_on_test", "test_agrees", "regime", "shots", "seeds", "advice")
OPEN = ("regime", "samples")
METHODS = ("best", "few_shot", "veto")
EMBEDDED = ("naive", "gradfix", "veto")
IMAGES = {"train": 200, "validation": 60, "test": 100}


def inputs(home: Path) -> Words:
    return (
        "--base", home / "base", "--tuned", home / "tuned", "--target", home / "target",
        "--data", home / "data", "--task", "classification", "--dtype", "fp64", "--shots", 4,
    )  # fmt: skip


def figures(file: Path, tied: tuple[str, ...] = ()) -> dict[str, Any]:
    """Rows and verdict. Of a `tied` method, where several alphas reach one accuracy, the choice is left open."""
    results = json.loads(file.read_text(encoding="utf-8"))
    rows = {
        f"{row['method']}, seed {row['seed']}": {
            key: row[key] for key in ROW if key in row and (row["method"] not in tied or key in OPEN)
        }
        for row in results["rows"]
    }
    verdict = {key: results["verdict"][key] for key in VERDICT}
    return {"rows": rows, "titles": results["titles"], "verdict": verdict}


def compared(home: Path, place: Path) -> dict[str, Any]:
    """All methods with a validation split, and one by folds over two seeds."""
    file = place / "all.json"
    do("compare", *inputs(home), "--target-tuned", home / "target-tuned", "--json", file)
    folds = place / "folds.json"
    do("compare", *inputs(home), "--validation", "none", "--seeds", 0, 1, "--methods", "gradfix",
       "--json", folds)  # fmt: skip
    return {"all methods": figures(file, tied=("magnitude", "oracle")), "by folds": figures(folds)}


def by_method(home: Path, place: Path) -> dict[str, Any]:
    """`gradfix transport --method`, for methods that are more than a mask."""
    found = {}
    for method in METHODS:
        out, file = place / method, place / f"{method}.json"
        do("transport", *inputs(home), "--method", method, "--out", out, "--json", file)
        result = json.loads(file.read_text(encoding="utf-8"))
        found[method] = {
            "files": sorted(path.name for path in out.iterdir()),
            "alpha": result["alpha"],
            "margin": result["margin"],
            "regime": result["regime"],
            "before": {"accuracy": result["test_before"]["accuracy"]},
            "after": {"accuracy": result["test_after"]["accuracy"]},
        }
    return found


def embedded(home: Path, place: Path) -> dict[str, Any]:
    """The related pair of `gradfix demo` on fewer images and with the methods that train nothing."""
    import pyarrow.parquet as pq

    do("demo", "--unpack", place / "demo")
    tasks = sorted(path.name for path in (place / "demo" / "tasks").iterdir())
    whole, few = place / "demo" / "tasks" / "top_cut", place / "few"
    few.mkdir()
    shutil.copy(whole / "task.json", few)
    for split, count in IMAGES.items():
        pq.write_table(pq.read_table(whole / f"{split}.parquet").slice(0, count), few / f"{split}.parquet")
    pair = place / "demo" / "related"
    do("compare", "--base", pair / "base", "--tuned", pair / "tuned", "--target", pair / "target",
       "--target-tuned", pair / "target_tuned", "--data", few, "--task", "classification", "--shots", 3,
       "--batch-size", 50, "--methods", *EMBEDDED, "--json", place / "few.json")  # fmt: skip
    return {"tasks": tasks, **figures(place / "few.json", tied=("veto",))}
