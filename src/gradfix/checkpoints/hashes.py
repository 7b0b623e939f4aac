"""Hash the inputs while they stream by: the sha256 of a file that is read anyway costs no second read."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from gradfix.checkpoints.open import Checkpoint, SafetensorsCheckpoint, raw_bytes
from gradfix.checkpoints.safetensors_file import FileHash, sha256_file

WAITING = 6  # pieces that may wait for the hashing thread


class BackgroundHash:
    """A sha256 that is computed in a thread of its own (hashlib releases the GIL), a few pieces behind."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def update(self, data: memoryview | bytes) -> None:
        """`data` must not change afterwards."""
        if len(self._pending) >= WAITING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._digest.update, data))

    def hexdigest(self) -> str:
        while self._pending:
            self._pending.popleft().result()
        return self._digest.hexdigest()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class InputHashes:
    """Collects hashes in a thread of its own (hashlib releases the GIL)."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> InputHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def chunks(self, checkpoint: Checkpoint, name: str, elements: int) -> Iterator[Tensor]:
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            yield from checkpoint.chunks(name, elements)
            return
        shard = checkpoint.shard_of(name)
        entry = shard.entries[name]
        digest = self._hashes[shard.path]
        if entry.start == shard.header_bytes:
            with open(shard.path, "rb") as file:
                digest.update(0, file.read(shard.header_bytes))
        offset = entry.start
        for piece in shard.chunks(name, elements):
            self._submit(digest.update, offset, raw_bytes(piece))
            offset += piece.numel() * piece.dtype.itemsize
            yield piece

    def _submit(self, update: Callable[..., None], offset: int, data: memoryview) -> None:
        if len(self._pending) >= WAITING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(update, offset, data))

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {
            path.name: self._hashes[path].hexdigest() if path in self._hashes else sha256_file(path)
            for path in checkpoint.files
        }
