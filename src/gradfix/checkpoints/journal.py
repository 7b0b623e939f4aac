"""Finished shards of an interrupted output: the next run with the same inputs does not write them again.

The journal lies in the staging folder beside the shards it lists and goes away before the manifest is
written. A shard is believed only when its bytes still have the recorded sha256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradfix._version import __version__
from gradfix.checkpoints.open import Checkpoint, SafetensorsCheckpoint
from gradfix.checkpoints.safetensors_file import sha256_file
from gradfix.checkpoints.write import write_text

JOURNAL = ".journal.json"


class Journal:
    """What is known of each finished shard, saved after every one."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.path = staging / JOURNAL
        self.shards: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}  # no journal, or one that was never finished: write everything again

    def finished(self, file: str) -> dict[str, Any] | None:
        record = self.shards.get(file)
        path = self.staging / file
        if record is None or not path.is_file() or sha256_file(path) != record["sha256"]:
            return None
        return record

    def add(self, file: str, **record: Any) -> None:
        self.shards[file] = record
        write_text(self.path, json.dumps(self.shards))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def journal_key(checkpoints: Iterable[Checkpoint], *settings: Any) -> str | None:
    """What the shards depend on; None where an input is not on disk and cannot be recognised again."""
    about: list[Any] = [__version__, *settings]
    for checkpoint in checkpoints:
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            return None
        about += [_identity(path) for path in checkpoint.files]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()


def _identity(path: Path) -> list[Any]:
    """A file that is replaced or changed gets another inode or change time."""
    status = os.stat(path)
    return [os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
