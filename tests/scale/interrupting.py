"""Stop a streaming run at a chosen byte, by a signal that asks or by one that does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

Progress = Callable[[int], None]


def stop_after(limit: int, how: str) -> Progress:
    """A `progress` that ends the run once so many bytes have been written."""
    done = 0

    def progress(amount: int) -> None:
        nonlocal done
        done += amount
        if done >= limit:
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

    return progress


def interrupt(work: Callable[[Progress], object], limit: int, how: str) -> None:
    """Run `work` until it has written `limit` bytes; a SIGKILL hits a forked child."""
    if how == "SIGINT":
        with pytest.raises(KeyboardInterrupt):
            work(stop_after(limit, how))
        return
    child = os.fork()
    if child == 0:
        work(stop_after(limit, how))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
