"""Every error gradfix raises on purpose.

Each class carries the exit code the command line ends with, so a script can tell
bad data from an unsafe result without reading the message. Messages are one line:
what went wrong, where, and the next step."""

from __future__ import annotations


class GradfixError(Exception):
    """Base of all library errors."""

    exit_code = 1


class UsageError(GradfixError, ValueError):
    """An option, a config key or a combination of them makes no sense."""

    exit_code = 2


class CorruptInput(GradfixError, ValueError):
    """A file is damaged, truncated, or not what its name says."""

    exit_code = 3


class IncompatibleCheckpoints(GradfixError, ValueError):
    """Weight sets do not share names, shapes or ancestry."""

    exit_code = 4


class DataError(GradfixError, ValueError):
    """The examples cannot be used: missing, mislabelled, overlapping or non-finite."""

    exit_code = 5


class UnsafeResult(GradfixError, RuntimeError):
    """The result would be empty, a silent no-op, or not finite."""

    exit_code = 6


class Locked(GradfixError, RuntimeError):
    """Another process is writing the same output."""

    exit_code = 7


class OutputError(GradfixError, OSError):
    """The output could not be written; nothing was left behind."""

    exit_code = 8
