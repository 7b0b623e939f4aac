"""The command line in this process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def say(*words: object) -> Said:
    """Run one command and listen; the exit code is what the shell would see."""
    from gradfix.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def do(*words: object) -> None:
    """Run one command that must succeed."""
    said = say(*words, "--quiet")
    assert said.code == 0, f"{words} ended with {said.code}: {said.err}"
