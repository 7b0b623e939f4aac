"""Threads for work that comes in small pieces: one torch thread each, several pieces at a time.

Torch's own threads share every single operation; on a piece they mostly wait for each other (on a busy
machine fifty times as long as they work), and sums depend on their number."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MOST_WORKERS = 4
LARGE_BLOCK = 8 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside the block; the number before comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PieceWorkers(ThreadPoolExecutor):
    """Workers for `ahead`, one per core but for the `spare` ones; each runs torch on one thread."""

    def __init__(self, spare: int = 0) -> None:
        self.count = max(1, min((os.cpu_count() or 1) - spare, MOST_WORKERS))
        super().__init__(self.count, initializer=torch.set_num_threads, initargs=(1,))
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Pieces are freed and asked for all the time, and glibc gives freed memory back to the system, to be fetched
    again page by page: a tenth of a stream's time. It stops once it has seen a large block come and go."""
    torch.empty(LARGE_BLOCK, dtype=torch.uint8)


def ahead(pool: PieceWorkers, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map` in order, a few items ahead of the caller: memory stays at those few."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > pool.count:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
