"""How far an interrupted output got: the next run with the same inputs goes on after the last whole tensor.

The journal lies in the staging folder beside the files it tells of and goes away before the manifest is
written. Nothing is believed unless the bytes on disk still have the recorded sha256."""

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

JOURNAL = ".journal.jsonl"


class Journal:
    """One line per tensor written and per file finished, appended as it happens."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.path = staging / JOURNAL
        self._tensors: dict[str, list[dict[str, Any]]] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._read()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def _read(self) -> None:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return
        for line in lines:
            try:
                record = json.loads(line)
                known = {key: record[key] for key in ("file", "bytes", "sha256")}
            except (ValueError, KeyError, TypeError):
                continue  # the line the kill cut off
            if "tensor" in record:
                self._tensors.setdefault(known["file"], []).append(record)
            else:
                self._finished[known["file"]] = record

    def finished(self, file: str) -> str | None:
        """The sha256 of a file that is whole."""
        record = self._finished.get(file)
        path = self.staging / file
        if record is None or not path.is_file() or sha256_file(path) != record["sha256"]:
            return None
        return str(record["sha256"])

    def tensors(self, file: str) -> list[dict[str, Any]]:
        """What was recorded of each tensor of the file, in the order they were written."""
        return self._tensors.get(file, [])

    def reached(self, file: str) -> tuple[int, str] | None:
        """How many bytes of the file were written when its last whole tensor was, and their sha256."""
        found = self.tensors(file)
        return (int(found[-1]["bytes"]), str(found[-1]["sha256"])) if found else None

    def restart(self, file: str) -> None:
        """What was recorded of this file does not hold; it is written from its beginning."""
        if self._tensors.pop(file, None) is not None:
            kept = [*self._finished.values(), *(r for some in self._tensors.values() for r in some)]
            self._file.truncate(0)
            for record in kept:
                self._append(record)

    def add(self, file: str, size: int, sha256: str, **record: Any) -> None:
        """A tensor (where `tensor` names it) or the whole file is written."""
        self._append({"file": file, "bytes": size, "sha256": sha256, **record})

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def journal_key(checkpoints: Iterable[Checkpoint], *settings: Any) -> str | None:
    """What the shards depend on; None where an input is not on disk and cannot be recognised again."""
    about: list[Any] = [__version__, *settings]
    for checkpoint in checkpoints:
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            return None
        about += [file_identity(path) for path in checkpoint.files]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()


def file_identity(path: Path) -> list[Any]:
    """A file that is replaced or changed gets another inode or change time."""
    status = os.stat(path)
    return [os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
