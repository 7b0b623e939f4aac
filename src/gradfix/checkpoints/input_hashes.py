"""Hash the inputs while they stream by: a file that is read anyway costs no second read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from gradfix.checkpoints.hashes import FileHash, hash_file
from gradfix.checkpoints.open import Checkpoint, raw_bytes

WAITING = 6  # pieces that may wait for the hashing thread


class InputHashes:
    """Collects hashes in a thread of its own (the GIL is released meanwhile)."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> InputHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def chunks(self, checkpoint: Checkpoint, name: str, elements: int) -> Iterator[Tensor]:
        """`checkpoint.chunks`, hashed on the way where the tensor lies in a file as it is."""
        stored = checkpoint.stored(name)
        if stored is None or stored[0].path not in self._hashes:
            yield from checkpoint.chunks(name, elements)
            return
        shard, key = stored
        digest = self._hashes[shard.path]
        offset = shard.entries[key].start
        if offset == shard.header_bytes:
            self._submit(digest.update, 0, _beginning(shard.path, offset))
        for piece in shard.chunks(key, elements):
            self._submit(digest.update, offset, raw_bytes(piece))
            offset += piece.numel() * piece.dtype.itemsize
            yield piece

    def _submit(self, update: Callable[..., None], offset: int, data: memoryview | bytes) -> None:
        if len(self._pending) >= WAITING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(update, offset, data))

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The hash of each of the checkpoint's files; what has not been read in order is read now."""
        while self._pending:
            self._pending.popleft().result()
        return {
            path.name: self._hashes[path].text() if path in self._hashes else hash_file(path)
            for path in checkpoint.files
        }


def _beginning(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)
