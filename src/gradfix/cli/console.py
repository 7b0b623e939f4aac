"""Everything the command line prints: tables, progress, errors. Plain when it is not a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def out() -> Console:
    return Console(soft_wrap=not sys.stdout.isatty())


def say_error(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("gradfix:", "bold red"), " ", _plain(message)))


def say(message: str, quiet: bool = False) -> None:
    if not quiet:
        out().print(Text(_plain(message)), highlight=False)


def say_notes(notes: Sequence[str], quiet: bool) -> None:
    if not quiet:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        for note in notes:
            console.print(Text.assemble(("note:", "yellow"), " ", _plain(note)))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], quiet: bool = False) -> None:
    if quiet:
        return
    made = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for index, name in enumerate(header):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index > 0)
    for row in rows:
        made.add_row(*(Text(_plain(str(cell))) for cell in row))
    out().print(made)


def _plain(text: str) -> str:
    """Names come from files: no escape sequence of theirs reaches the terminal, and bytes that are no
    Unicode are spelled out."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return shown.encode("utf-8", "backslashreplace").decode()


def write_json(content: Any, path: str | None) -> None:
    write_text_or_stdout(json.dumps(content, indent=1, default=str) + "\n", path)


def write_text_or_stdout(text: str, path: str | None) -> None:
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        from gradfix.checkpoints.write import write_text

        write_text(Path(path), text)


@contextlib.contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner that names the current step; silent when stderr is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update


@contextlib.contextmanager
def bar(name: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left; silent when stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda amount: progress.advance(task, amount)
