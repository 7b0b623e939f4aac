"""Run cases in forked children: a crash by signal, a hang or a runaway allocation ends the child, not the series.

Forking a parent that has torch imported takes milliseconds, so thousands of cases are cheap."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradfix.errors import GradfixError

HANG_SECONDS = 30.0
SPARE_BYTES = 6 * 2**30
PER_CHILD = 40
CODES = {2, 3, 4, 5, 6, 7, 8}
GOOD = ("same", "refused")
BAD = ("wrong", "traceback", "signal", "hang", "execution")

Case = Callable[[], tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """`same` and `refused` are good; `wrong`, `traceback`, `signal`, `hang` and `execution` are not."""

    status: str
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.status in GOOD


def refusal(error: GradfixError) -> tuple[str, str]:
    """A typed error is good when it has a documented code and one line."""
    text = str(error)
    if error.exit_code not in CODES or not text.strip() or "\n" in text:
        return "wrong", f"exit code {error.exit_code}: {text[:200]}"
    return "refused", f"{error.exit_code} {text[:200]}"


def judged(work: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Do the work; a library error is a refusal, any other is what a user would see as a traceback."""
    try:
        return work()
    except GradfixError as error:
        return refusal(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]}"


def run_cases(cases: Sequence[Case], limit: float = HANG_SECONDS) -> list[Outcome]:
    """Every case once, in order, many to a child; a child that dies names the case it died in."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        first = len(outcomes)
        outcomes += _one_child(cases[first : first + PER_CHILD], limit)
    return outcomes


def _one_child(cases: Sequence[Case], limit: float) -> list[Outcome]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(cases, writer)
    os.close(writer)
    found: list[Outcome] = []
    waiting = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while len(found) < len(cases):
            if not select.select([pipe], [], [], limit)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return [*found, Outcome("hang", f"over {limit:g} s")]
            data = pipe.read(65536)
            if not data:
                break
            *lines, waiting = (waiting + data).split(b"\n")
            found += [Outcome(*json.loads(line)) for line in lines]
    _, status = os.waitpid(child, 0)
    if len(found) < len(cases):
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
        found.append(Outcome("signal", name))
    return found


def _work(cases: Sequence[Case], writer: int) -> None:
    """The child's whole life."""
    try:
        quieten()
        bound_memory()
        for case in cases:
            os.write(writer, json.dumps(judged(case)).encode() + b"\n")
    finally:
        os._exit(0)


def quieten() -> None:
    """What a library prints while it fails is not part of the case."""
    sink = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(sink, descriptor)
    warnings.simplefilter("ignore")


def bound_memory() -> None:
    """A file that claims terabytes must be refused; here it may not take the machine down either."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES,) * 2)


def start(work: Callable[[], object]) -> int:
    """Fork a child that does one thing; it exits 0, or with the code of the library error it met."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        quieten()
        work()
        code = 0
    except GradfixError as error:
        code = error.exit_code
    finally:
        os._exit(code)


def finish(child: int, limit: float = HANG_SECONDS) -> int:
    """Wait for a child: its exit code, minus the signal that ended it, or -1000 for a hang (it is killed)."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    kill(child)
    return -1000


def kill(child: int) -> bool:
    """SIGKILL; True when the child was still alive."""
    done, _ = os.waitpid(child, os.WNOHANG)
    if done:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@dataclass(frozen=True)
class Series:
    """What came out of one series: cases by outcome, and the first few that were not good."""

    name: str
    counts: dict[str, int]
    faults: list[str]
    seconds: float
    note: str = ""

    @classmethod
    def of(cls, name: str, outcomes: Sequence[Outcome], began: float, **extra: int) -> Series:
        counts = Counter(outcome.status for outcome in outcomes)
        faults = [f"{i}: {o.status}: {o.detail}" for i, o in enumerate(outcomes) if not o.good]
        return cls(name, {"cases": len(outcomes), **counts, **extra}, faults[:20], round(time.time() - began, 2))

    @property
    def bad(self) -> int:
        return sum(self.counts.get(status, 0) for status in BAD)
