"""`make bench`: every benchmark this machine can run, one after the other.

    python -m benchmarks [NAME ...]

Names are those of BENCHMARKS; without any, all of them run. GPU benchmarks run where there is one, and the field test
where GRADFIX_FIELDTEST names its folder. Comparisons with mergekit want GRADFIX_MERGEKIT_PYTHON, an interpreter that
has it."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

BENCHMARKS: dict[str, list[str]] = {
    "votes": ["--models", "vit-s", "vit-s-short", "--samples", "16", "--threads", "2", "--device", "cpu",
              "--json", "benchmarks/results/votes_cpu.json"],
    "align": [],
    "merge": [],
    "stream": [],
    "lora_stream": [],
    "plan": [],
    "plan_card": [],
    "plan_large": [],
    "pocket": [],
}  # fmt: skip
if torch.cuda.is_available():
    BENCHMARKS["votes_gpu"] = ["--suite", "--json", "benchmarks/results/votes_gpu.json"]
if "GRADFIX_FIELDTEST" in os.environ:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    BENCHMARKS["fieldtest"] = ["--fieldtest", os.environ["GRADFIX_FIELDTEST"], "--device", device]


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    failed = []
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"no benchmark called {name!r}; there are: {', '.join(BENCHMARKS)}")
        module = "votes" if name == "votes_gpu" else name
        print(f"== {name}", flush=True)
        words = [sys.executable, "-m", f"benchmarks.{module}", *BENCHMARKS[name]]
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
