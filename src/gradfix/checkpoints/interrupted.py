"""What an interrupted run leaves for the next one: how far an output got, and intermediate state.

A journal lies in the staging folder beside the files it tells of and goes away when that becomes the output; the
next run with the same inputs goes on after the last whole tensor. Nothing is believed unless the bytes on disk still
have the recorded hash, and no line of the journal behind one that is damaged. Intermediate state (tensors and what they
belong to) carries the hash of all of it: what the run ends in would carry a flipped bit along unseen."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfix._version import __version__
from gradfix.checkpoints.hashes import ContentHash, holds
from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.checkpoints.weights import raw_bytes
from gradfix.checkpoints.write import JOURNAL, save_tensors
from gradfix.errors import CorruptInput

CONTENT = "content"


class Journal:
    """One line per tensor written and per file finished, appended as it happens, from any thread."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.path = staging / JOURNAL
        self._tensors: dict[str, list[dict[str, Any]]] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._turn = threading.Lock()
        records, size = _read(self.path)
        for record in records:
            self._keep(record)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(size)  # lines added behind a damaged one would not be believed either

    def _keep(self, record: dict[str, Any]) -> None:
        if "tensor" in record:
            self._tensors.setdefault(record["file"], []).append(record)
        else:
            self._finished[record["file"]] = record

    def finished(self, file: str) -> str | None:
        """The hash of a file that is whole."""
        record = self._finished.get(file)
        path = self.staging / file
        if record is None or not path.is_file() or not holds(path, record["hash"]):
            return None
        return str(record["hash"])

    def tensors(self, file: str) -> list[dict[str, Any]]:
        """What was recorded of each tensor of the file, in the order they were written."""
        return self._tensors.get(file, [])

    def reached(self, file: str) -> tuple[int, str] | None:
        """How many bytes of the file were written when its last whole tensor was, and their hash."""
        found = self.tensors(file)
        return (int(found[-1]["bytes"]), found[-1]["hash"]) if found else None

    def restart(self, file: str) -> None:
        """What was recorded of this file does not hold; it is written from its beginning."""
        with self._turn:
            if self._tensors.pop(file, None) is None:
                return
            self._finished.pop(file, None)
            self._file.truncate(0)  # a file's tensors come before the word that it is whole, here as well
            for record in [*(r for some in self._tensors.values() for r in some), *self._finished.values()]:
                self._append(record)

    def add(self, file: str, size: int, digest: str, **about: Any) -> None:
        """A tensor (where `tensor` names it) or the whole file is written."""
        record = {"file": file, "bytes": size, "hash": digest, **about}
        with self._turn:
            self._keep(record)
            self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        text = json.dumps(record)
        self._file.write(f"{_check(text)} {text}\n".encode())

    def close(self) -> None:
        self._file.close()


def _check(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of an earlier run, up to the first line that a kill cut off or a disk damaged, and their bytes."""
    records: list[dict[str, Any]] = []
    size = 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return records, size
    for line in lines:
        check, _, text = line.decode(errors="replace").partition(" ")
        if not text.endswith("\n") or check != _check(text[:-1]):
            break
        records.append(json.loads(text))
        size += len(line)
    return records, size


def journal_key(*parts: Any) -> str | None:
    """What the shards depend on; None where one of the parts is, an input that cannot be recognised again."""
    if None in parts:
        return None
    return hashlib.sha256(json.dumps([__version__, *parts], default=str).encode()).hexdigest()


def save_state(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Complete or absent, with the hash of all of it inside."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = _begun(about)
    for name, tensor in held.items():
        _add(content, name, tensor)
    save_tensors(path, held, {**about, CONTENT: content.text()})


class State:
    """A file of `save_state`; `about` is read at once, the tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = SafetensorsFile(path)
        except CorruptInput:
            raise self.damaged() from None
        self.about = {name: text for name, text in self._file.metadata.items() if name != CONTENT}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors; a file that is not as it was written is an error at the end, so come to the end first."""
        content = _begun(self.about)
        for name in self._file.names_in_file_order():
            tensor = self._file.read(name)
            _add(content, name, tensor)
            yield name, tensor
        if content.text() != self._file.metadata.get(CONTENT):
            raise self.damaged()

    def damaged(self) -> CorruptInput:
        return CorruptInput(
            f"{self.path}, kept by an interrupted run, is damaged. Delete it and run the same command again."
        )


def _begun(about: Mapping[str, str]) -> ContentHash:
    content = ContentHash()
    content.update(repr(sorted(about.items())).encode())
    return content


def _add(content: ContentHash, name: str, tensor: Tensor) -> None:
    content.update(f"\n{name}\t{tuple(tensor.shape)}\t{tensor.dtype}\n".encode())
    content.update(raw_bytes(tensor))
