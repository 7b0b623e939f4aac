"""Parts of a benchmark in processes of their own: small models leave cores and devices waiting for Python."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any


def begun(out: Path, name: str) -> dict[str, Any]:
    """Ready for models, on one thread; and what a results file holds so far, which is added to."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    torch.set_num_threads(1)
    content: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    content["command"] = f"python -m benchmarks.{name}"
    return content


def in_parallel(module: str, shared: Sequence[object], parts: Iterable[Sequence[object]], jobs: int) -> None:
    """`python -m MODULE SHARED --part PART` for every part, `jobs` at a time; the first failure ends it all."""
    waiting, running = list(parts), []
    while waiting or running:
        while waiting and len(running) < jobs:
            words = [sys.executable, "-m", module, *shared, "--part", *waiting.pop(0)]
            running.append(subprocess.Popen([str(word) for word in words]))
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            if process.returncode:
                raise SystemExit(f"a part failed: {process.args}")


def in_forks(
    prepare: Callable[[], None], run: Callable[..., None], parts: Iterable[tuple[str, ...]], jobs: int
) -> list[tuple[str, ...]]:
    """`run(*part)` for every part in `jobs` copies of this process, which has imported everything and touched no device.

    A part that fails stops no other; those that failed are returned. Where a copy dies, the parts it may have taken with it
    are run once more."""
    prepare()
    failed, waiting = [], list(parts)
    for last in (False, True):
        lost = []
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), prepare) as pool:
            running = {pool.submit(run, *part): part for part in waiting}
            for future in as_completed(running):
                error = future.exception()
                if isinstance(error, BrokenProcessPool) and not last:
                    lost.append(running[future])
                elif error is not None:
                    failed.append(running[future])
                    print(f"failed: {' '.join(running[future])}", file=sys.stderr)
                    traceback.print_exception(error)
        waiting = lost
    return failed
