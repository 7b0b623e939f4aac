"""The hash of a file: which algorithm, how it is written, how it is checked. Decided here and nowhere else.

A hash is written with its algorithm in front, `blake3:<hex>`: BLAKE3 takes a third of sha256's time, and hashing
is the largest part of a stream's work. A bare hex string is a sha256, as older manifests and votes carry; it is
checked by computing a sha256. Inputs are hashed while they stream by: a file that is read anyway costs no second
read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from torch import Tensor

from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.checkpoints.weights import Checkpoint, raw_bytes
from gradfix.errors import CorruptInput

ALGORITHM = "blake3"
BLOCK_BYTES = 1 << 18  # read and hashed while it lies in the processor's cache


class Digest(Protocol):
    """What hashlib and blake3 have in common; both release the GIL while they work."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class ContentHash:
    """The hash of bytes that arrive in order; `text()` may be asked at any time."""

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        self._prefix = "" if algorithm == "sha256" else f"{algorithm}:"
        self._digest: Digest = hashlib.sha256() if algorithm == "sha256" else blake3()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._digest.update(data)

    def text(self) -> str:
        return self._prefix + self._digest.hexdigest()


class FileHash:
    """A file's hash, collected from ranges while they are read.

    What a range skips is read here, what came too late has been, and `text` reads what nobody asked for: every byte is
    hashed once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = ContentHash()
        self._next = 0

    def update(self, offset: int, data: memoryview | bytes) -> None:
        if offset > self._next:
            self._catch_up(offset)
        if offset == self._next:
            self._content.update(data)
            self._next += len(data)

    def text(self) -> str:
        self._catch_up(self.path.stat().st_size)
        return self._content.text()

    def _catch_up(self, end: int) -> None:
        """Read and hash what lies before `end`."""
        if self._next >= end:
            return
        block = memoryview(bytearray(min(BLOCK_BYTES, end - self._next)))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._next)
            while self._next < end and (count := file.readinto(block[: end - self._next])):
                self._content.update(block[:count])
                self._next += count


class OrderedHash:
    """The hash of a file whose parts come from several threads: each part is hashed once, in the file's order.

    `ends` are the sizes whose hash will be asked for later, when more may have been hashed."""

    def __init__(self, ends: Iterable[int] = ()) -> None:
        self._content = ContentHash()
        self._ends = set(ends)
        self._texts: dict[int, str] = {}
        self._early: dict[int, bytes | memoryview] = {}
        self._next = 0
        self._turn = threading.Lock()

    def update(self, offset: int, data: bytes | memoryview) -> None:
        """A part that comes early waits for those before it; one that was there already is not hashed again."""
        with self._turn:
            if offset >= self._next and data:
                self._early[offset] = data
            while (part := self._early.pop(self._next, None)) is not None:
                self._content.update(part)
                self._next += len(part)
                if self._next in self._ends:
                    self._texts[self._next] = self._content.text()

    def text(self, size: int) -> str:
        """The hash of the first `size` bytes, which must have been hashed."""
        with self._turn:
            return self._content.text() if size == self._next else self._texts[size]


def hash_file(path: Path, algorithm: str = ALGORITHM) -> str:
    content = ContentHash(algorithm)
    block = bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            content.update(view[:count])
    return content.text()


def holds(path: Path, recorded: str) -> bool:
    """Has the file the recorded hash, in the algorithm it was recorded with?"""
    return hash_file(path, algorithm_of(recorded)) == recorded


def algorithm_of(recorded: str) -> str:
    """The algorithm a hash was written with; one that this version does not know cannot be checked."""
    name, colon, _ = recorded.partition(":")
    if not colon:
        return "sha256"
    if name != ALGORITHM:
        raise CorruptInput(f"a file was hashed with {name[:40]!r}, which this gradfix does not know; update it.")
    return name


def hexadecimal(recorded: str) -> str:
    return recorded.rpartition(":")[2]


def file_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(map(str, checkpoint.files), pool.map(hash_file, checkpoint.files), strict=True))


class InputHashes:
    """Hashes of files, taken by whoever reads them, right after reading: another thread would have to be woken
    for every piece, which costs more than it saves."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}

    def chunks(self, checkpoint: Checkpoint, name: str, elements: int) -> Iterator[Tensor]:
        """`checkpoint.chunks`, hashed on the way where the tensor lies in a file as it is."""
        stored = checkpoint.stored(name)
        if stored is None or stored[0].path not in self._hashes:
            return readable(checkpoint.chunks(name, elements), checkpoint)
        return readable(self._hashed(*stored, elements), stored[0].path)

    def _hashed(self, shard: SafetensorsFile, key: str, elements: int) -> Iterator[Tensor]:
        content = self._hashes[shard.path]
        offset = shard.entries[key].start
        if offset == shard.header_bytes:
            with open(shard.path, "rb") as file:
                content.update(0, file.read(offset))
        for piece in shard.chunks(key, elements):
            content.update(offset, raw_bytes(piece))
            offset += piece.numel() * piece.dtype.itemsize
            yield piece

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The hash of each of the checkpoint's files; what has not been read in order is read now.

        Pickled folders, which are read whole, are known by their content instead."""
        if not checkpoint.files and checkpoint.path is not None:
            return {"tensors": checkpoint.fingerprint()}
        return {path.name: self._of_file(path) for path in checkpoint.files}

    def _of_file(self, path: Path) -> str:
        try:
            return self._hashes[path].text() if path in self._hashes else hash_file(path)
        except OSError as error:
            raise _unreadable(path, error) from error


def readable(pieces: Iterator[Tensor], source: object) -> Iterator[Tensor]:
    """The pieces of an input; one that cannot be read is its own fault, not that of the output it is read for."""
    try:
        yield from pieces
    except OSError as error:
        raise _unreadable(source, error) from error


def _unreadable(source: object, error: OSError) -> CorruptInput:
    why = (error.strerror or str(error)).lower()
    return CorruptInput(f"{source} cannot be read ({why}). Check its disk, or copy it again.")
