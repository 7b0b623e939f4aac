"""How far a long copy got, in words: bytes done, bytes in all (where they are known), time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

GIB = 2**30
EVERY_SECONDS = 0.25


class Meter:
    """Call it with the bytes of each piece; it says where things stand a few times a second."""

    def __init__(
        self,
        total: int | None,
        say: Callable[[str], None],
        what: str = "writing",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.say, self.what, self.clock = total, say, what, clock
        self.done = 0
        self._begin: float | None = None
        self._begun_with = 0
        self._said = float("-inf")

    def __call__(self, amount: int) -> None:
        now = self.clock()
        self.done += amount
        if self._begin is None:  # what an earlier run had written says nothing about this run's speed
            self._begin, self._begun_with = now, self.done
        if now - self._said >= EVERY_SECONDS or self.done == self.total:
            self._said = now
            self.say(self.text(now))

    def text(self, now: float) -> str:
        if self.total is None:
            return f"{self.what} {self.done / GIB:.2f} GiB"
        line = f"{self.what} {self.done / GIB:.2f} of {self.total / GIB:.2f} GiB"
        spent = now - (self._begin if self._begin is not None else now)
        moved = self.done - self._begun_with
        if spent <= 0 or moved <= 0 or self.done >= self.total:
            return line
        return f"{line}, {math.ceil((self.total - self.done) * spent / moved)} s left"
