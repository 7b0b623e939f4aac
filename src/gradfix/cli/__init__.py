"""The command line: parse, call one workflow, print.

Heavy libraries are imported inside the commands, so `gradfix --help` answers at once. Every library error
becomes one line on stderr and its exit code; nothing ends in a traceback unless GRADFIX_DEBUG is set."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import Any

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run and exit with the documented code."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run and return the exit code."""
    from gradfix.cli.console import say_error
    from gradfix.errors import GradfixError

    _quieten()
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        say_error(
            "interrupted; inputs are untouched and no half-written output is left. Finished parts of vote, "
            f"finetune, compare and reproduce are kept. To go on: {shlex.join(['gradfix', *argv])}"
        )
        return INTERRUPTED
    except GradfixError as error:
        say_error(" ".join(str(error).split()))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
        return 8
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own usage errors
            say_error(f"{error.format_message()} `gradfix --help` lists commands, `gradfix COMMAND --help` options.")
            return 2
        if os.environ.get("GRADFIX_DEBUG"):
            raise
        from gradfix.commands.guard import out_of_memory

        if out_of_memory(error):
            say_error(
                "out of memory. A smaller --batch-size (or --auto-batch), --dtype bf16 or --engine loop needs less."
            )
            return 8
        text = " ".join(str(error).split())[:300]
        say_error(f"internal error: {type(error).__name__}: {text} (GRADFIX_DEBUG=1 shows where; please report it).")
        return 1


def _dispatch(argv: list[str]) -> int:
    from gradfix.cli.commands import COMMANDS, build
    from gradfix.cli.options import expand_lists

    kind = next((COMMANDS[word][0] for word in argv if word in COMMANDS), None)
    asked = argv[:1] if argv and argv[0] in COMMANDS else list(COMMANDS)
    parser = build(asked, explained=kind if {"-h", "--help"} & set(argv) else None)
    code = int(parser(args=expand_lists(argv, kind), standalone_mode=False, prog_name="gradfix") or 0)
    if code == INTERRUPTED:  # the parser turns Ctrl-C into a silent exit code
        raise KeyboardInterrupt
    return code


def _as_note(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning is one line for the user, without the source line that raised it."""
    from gradfix.cli.console import say_notes

    say_notes([" ".join(str(message).split())])


def _quieten() -> None:
    """Other libraries' bars and warnings would bury our own lines; spinning threads would starve each other."""
    warnings.showwarning = _as_note
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
