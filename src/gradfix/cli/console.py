"""Everything the command line prints: tables, progress, errors. Plain when it is not a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradfix.system.processes import leads

PIPED = 100_000  # columns of a pager or a file: nothing is folded there
QUICK_SECONDS = 5.0  # a run that takes no longer has no progress to tell
EVERY_SECONDS = 10.0  # between two lines about one step
READABLE = 12  # the narrowest first column worth folding into


def out() -> Console:
    return Console() if sys.stdout.isatty() else Console(soft_wrap=True, width=PIPED)


def say_error(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("gradfix:", "bold red"), " ", _plain(message)))


def say_notes(notes: Sequence[str]) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for note in notes:
        console.print(Text.assemble(("note:", "yellow"), " ", _plain(note)))


class Printer:
    """Where a command's result goes: JSON to a file or to standard output, and words for people.

    With JSON on standard output nothing else is printed there; notes and progress go to standard error. A process that
    works for another one says and writes nothing."""

    def __init__(self, json_path: str | None, quiet: bool) -> None:
        self.json_path, self.quiet = json_path, quiet or not leads()
        self._silent = self.quiet or json_path == "-"

    def json(self, content: Any) -> None:
        self.text(json.dumps(content, indent=1, default=str) + "\n")

    def text(self, text: str) -> None:
        """JSON that is text already."""
        if not leads():
            return
        if self.json_path == "-":
            sys.stdout.write(text)
        elif self.json_path is not None:
            from gradfix.checkpoints.write import write_text

            write_text(Path(self.json_path), text)

    def say(self, message: str) -> None:
        if not self._silent:
            out().print(Text(_plain(message)), highlight=False)

    def would(self, sentence: str) -> None:
        """What a dry run found."""
        self.json({"dry_run": True, "summary": sentence})
        self.say(sentence)

    def notes(self, notes: Sequence[str]) -> None:
        if not self.quiet:
            say_notes(notes)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not self._silent:
            table(title, header, rows)

    @contextlib.contextmanager
    def stages(self) -> Iterator[Callable[..., None]]:
        """A spinner that names the current step; without a terminal a line for every finished one."""
        console = Console(stderr=True)
        if self.quiet:
            yield lambda *_: None
        elif not console.is_terminal:
            log = StepLog()
            yield log
            log.finish()
        else:
            with console.status("starting") as status:
                yield lambda text, lane="": status.update(Text(_plain(text)))

    @contextlib.contextmanager
    def bar(self, name: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
        """A progress bar with the time left; without a terminal a line now and then, and one at the end."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if self.quiet or not shown:
            yield lambda _: None
        elif not console.is_terminal:
            log = StepLog()
            log(name)
            yield _Count(log, name, total)
            log.finish()
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task(name, total=total)
                yield lambda amount: progress.advance(task, amount)


class StepLog:
    """Progress for a file: a line for every finished step with its seconds, and for a long one where it stands.

    Steps of different lanes run side by side. A run of a few seconds says nothing: what is said first is held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._began, self._said = clock, clock(), clock()
        self._waiting: list[str] = []
        self._steps: dict[str, tuple[str, float]] = {}

    def __call__(self, step: str, lane: str = "") -> None:
        """The last step of the lane is done, this one begins."""
        if lane:
            self._end("")
        self._end(lane)
        self._steps[lane] = (step, self.clock())

    def update(self, text: str) -> None:
        """How far the step is; said now and then."""
        now = self.clock()
        if now - self._said >= EVERY_SECONDS:
            self._say(text, now)

    def finish(self) -> None:
        for lane in list(self._steps):
            self._end(lane)

    def _end(self, lane: str) -> None:
        if lane in self._steps:
            step, begun = self._steps.pop(lane)
            self._say(f"{step}: {self.clock() - begun:.1f} s", self.clock())

    def _say(self, line: str, now: float) -> None:
        self._said = now
        self._waiting.append(line)
        if now - self._began < QUICK_SECONDS:
            return
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        for waiting in self._waiting:
            console.print(Text(_plain(waiting)))
        self._waiting.clear()


class _Count:
    """Counts units for the log; the pace so far says how long the rest takes."""

    def __init__(self, log: StepLog, name: str, total: int | None) -> None:
        from gradfix.system.meter import Countdown

        self.name, self.total, self.done = name, total, 0
        self.log, self.countdown = log, Countdown(log.update)

    def __call__(self, amount: int) -> None:
        self.done += amount
        if self.total is None:
            self.log.update(f"{self.name} {self.done}")
        else:
            self.countdown(self.name, self.done, self.total)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = out()
    plain = [[_plain(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*plain)]
    if sum(widths[1:]) + 2 * len(widths[1:]) + min(widths[0], READABLE) > console.width:
        _records(console, title, plain)
        return
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(zip(*plain)):
        numeric = index > 0 and all(cell[:1] in "0123456789+-." for cell in column[1:])
        made.add_column(column[0], justify="right" if numeric else "left", overflow="fold", no_wrap=index > 0)
    for row in plain[1:]:
        made.add_row(*map(Text, row))
    console.print(made)


def _records(console: Console, title: str, plain: Sequence[Sequence[str]]) -> None:
    """A table too wide for the terminal, row by row: every cell on a line of its own, nothing cut off."""
    console.print(Text(title, style="bold"))
    for row in plain[1:]:
        console.print(Text(row[0], style="bold"))
        for name, cell in zip(plain[0][1:], row[1:]):
            console.print(Text(f"  {name}: {cell}" if name else f"  {cell}"))


def _plain(text: str) -> str:
    """Names come from files: no escape sequence of theirs reaches the terminal, and bytes that are no
    Unicode are spelled out."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return shown.encode("utf-8", "backslashreplace").decode()


def asker() -> Callable[[str, str | None, Sequence[str]], str] | None:
    """Questions on the terminal; None where nobody sits there."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    from rich.prompt import Prompt

    def ask(question: str, default: str | None, choices: Sequence[str]) -> str:
        return Prompt.ask(Text(question), choices=list(choices) or None, default=default or "") or ""

    return ask
