"""Stop or fail at the N-th operation that changes a disk.

Installed in a forked child: files opened for writing, writes, syncs, renames and new folders are counted, and
the given action happens right before operation N."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from typing import Any

WRITING = set("wax+")


class Counter:
    """Counts operations; calls `action` once, before the one with this number (from 1)."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.at, self.action, self.seen = at, action, 0

    def tick(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.action()


class Watched:
    """A file whose writes are counted."""

    def __init__(self, file: Any, counter: Counter) -> None:
        self._file, self._counter = file, counter

    def write(self, data: Any) -> Any:
        self._counter.tick()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Watched:
        self._file.__enter__()
        return self

    def __exit__(self, *about: Any) -> Any:
        return self._file.__exit__(*about)


def install(counter: Counter) -> None:
    """For the rest of this process."""
    real_open = builtins.open

    def watched_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if not set(mode) & WRITING:
            return real_open(file, mode, *more, **options)
        counter.tick()
        return Watched(real_open(file, mode, *more, **options), counter)

    builtins.open = watched_open  # type: ignore[assignment]
    io.open = watched_open  # type: ignore[assignment]
    for name in ("mkdir", "rename", "replace", "fsync", "fdatasync", "sendfile"):
        setattr(os, name, _counted(getattr(os, name), counter))
    real_low = os.open

    def low_open(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            counter.tick()
        return real_low(path, flags, *more, **options)

    os.open = low_open


def _counted(function: Callable[..., Any], counter: Counter) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        counter.tick()
        return function(*arguments, **options)

    return counted


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
