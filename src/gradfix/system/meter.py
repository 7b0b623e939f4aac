"""How far a long job got, in words: bytes or units done, how many in all (where that is known), time left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

GIB = 2**30
EVERY_SECONDS = 0.25
SOON_SECONDS = 2.0  # before that nobody asks how long it will take
Heard = Callable[[int, int | None], None]
_hearing: ContextVar[Heard | None] = ContextVar("who hears of training steps", default=None)


def telling_more(say: Callable[[str], None]) -> Callable[[str], None]:
    """How to tell more about the step that was announced; whoever makes no difference is told as of a step."""
    more: Callable[[str], None] = getattr(say, "update", say)
    return more


class Meter:
    """Call it with the bytes of each piece; it says where things stand a few times a second."""

    def __init__(
        self,
        total: int | None,
        say: Callable[[str], None],
        what: str = "writing",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.say, self.what, self.clock = total, telling_more(say), what, clock
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


class Countdown:
    """Says what is done now, how many units are done, and the time left by the pace so far."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock = say, clock
        self._begin: float | None = None
        self._begun_with = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.say(self.text(what, done, total))

    def text(self, what: str, done: int, total: int) -> str:
        now = self.clock()
        if self._begin is None:
            self._begin, self._begun_with = now, done
        return f"{what} ({done}/{total}{self._left(now, done, total)})"

    def _left(self, now: float, done: int, total: int) -> str:
        assert self._begin is not None
        spent, made = now - self._begin, done - self._begun_with
        if spent < SOON_SECONDS or made <= 0 or done >= total:
            return ""
        return f", about {span((total - done) * spent / made)} left"


@contextlib.contextmanager
def steps_told(say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Whatever trains inside says now and then which step it is at, and how long the rest takes."""
    token = _hearing.set(_Steps(telling_more(say), clock))
    try:
        yield
    finally:
        _hearing.reset(token)


def step_taken(done: int, total: int | None) -> None:
    """A training step is over; nobody need be listening."""
    heard = _hearing.get()
    if heard is not None:
        heard(done, total)


class _Steps:
    """Training after training: each begins at its first step. Short ones say nothing."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.say, self.clock = say, clock
        self._last, self._begun, self._said = math.inf, 0.0, 0.0
        self._countdown = Countdown(say, clock)

    def __call__(self, done: int, total: int | None) -> None:
        now = self.clock()
        if done <= self._last:
            self._countdown, self._begun, self._said = Countdown(self.say, self.clock), now, now
        self._last = done
        line = f"training step {done}" if total is None else self._countdown.text("training step", done, total)
        if now - self._begun >= SOON_SECONDS and now - self._said >= EVERY_SECONDS:
            self._said = now
            self.say(line)


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
