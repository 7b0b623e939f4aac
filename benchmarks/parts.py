"""Parts of a benchmark in processes of their own: small models leave cores and devices waiting for Python."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence


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
) -> None:
    """`run(*part)` for every part in `jobs` copies of this process, which has imported everything and touched no device."""
    prepare()
    with multiprocessing.get_context("fork").Pool(jobs, initializer=prepare) as pool:
        waiting = [pool.apply_async(run, part) for part in parts]
        for one in waiting:
            one.get()
