"""python -m tests.torture --share 1.0    (or: make torture N=1.0)

The whole fault series; a smaller share runs fewer cases of each. Every case runs in a forked child with a limit
of 30 seconds. Writes benchmarks/results/torture.json; the last line of output is its counts as JSON. The exit
status is 1 when anything was not as promised."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

FULL = {
    "safetensors": 2000,
    "pickles": 1000,
    "json": 500,
    "text data": 300,
    "parquet": 200,
    "images": 300,
    "yaml": 100,
    "kills mid-vote": 200,
    "kills mid-finetune": 30,
    "kills mid-compare": 60,
    "damaged states": 300,
    "kills mid-write": 100,
    "rival writers": 30,
}
RESULTS = Path("benchmarks") / "results" / "torture.json"


def prepare() -> None:
    """Import everything the children need once, before the first fork; compute nothing here."""
    import torch

    import tests.preloaded  # noqa: F401

    torch.set_num_threads(1)


def run(
    share: float, home: Path, only: set[str] | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Any]:
    """All series at this share, in the given folder."""
    prepare()
    from tests.reliability.world import make_world
    from tests.torture import crashes, inputs, kills, states

    world = make_world(home / "world")
    count = {name: max(1, round(share * cases)) for name, cases in FULL.items()}
    series: dict[str, Callable[[], Any]] = {
        "safetensors": lambda: inputs.safetensors_series(home, count["safetensors"]),
        "pickles": lambda: inputs.pickle_series(home, count["pickles"]),
        "json": lambda: inputs.json_series(home, count["json"], world),
        "text data": lambda: inputs.text_series(home, count["text data"]),
        "parquet": lambda: inputs.parquet_series(home, count["parquet"]),
        "images": lambda: inputs.image_series(home, count["images"]),
        "yaml": lambda: inputs.yaml_series(home, count["yaml"]),
        "kills mid-vote": lambda: kills.kills_mid_vote(home, count["kills mid-vote"], world),
        "kills mid-finetune": lambda: kills.kills_mid_finetune(home, count["kills mid-finetune"], world),
        "kills mid-compare": lambda: kills.kills_mid_compare(home, count["kills mid-compare"], world),
        "damaged states": lambda: states.damaged_states(home, count["damaged states"], world),
        "kills mid-write": lambda: crashes.kills_mid_write(home, count["kills mid-write"]),
        "failing writes": lambda: crashes.failing_writes(home),
        "rival writers": lambda: crashes.rival_writers(home, count["rival writers"]),
        "full disk": lambda: crashes.full_disk(home),
    }
    done = []
    for name, work in series.items():
        if only is None or name in only:
            done.append(work())
            say(f"{name}: {done[-1].counts} in {done[-1].seconds} s {done[-1].note}".rstrip())
            for fault in done[-1].faults:
                say(f"  {fault}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the full series")
    parser.add_argument("--only", nargs="*", help=f"some of: {', '.join(FULL)}, failing writes, full disk")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="gradfix-torture-", dir=memory if memory.is_dir() else None))
    began = time.time()
    try:
        done = run(given.share, home, set(given.only) if given.only else None, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    from gradfix.checkpoints.folder import versions

    counts = {series.name: series.counts for series in done}
    bad = sum(series.bad for series in done)
    content = {
        "command": f"make torture N={given.share:g}", "share": given.share, "bad": bad, "counts": counts,
        "series": [asdict(series) for series in done], "seconds": round(time.time() - began, 1),
        "system": platform.platform(terse=True), **versions(),
    }  # fmt: skip
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"bad": bad, **counts}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
