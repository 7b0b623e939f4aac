"""Hash the inputs while they stream by: the sha256 of a file that is read anyway costs no second read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from gradfix.checkpoints.open import Checkpoint, SafetensorsCheckpoint, raw_bytes
from gradfix.checkpoints.safetensors_file import FileHash, sha256_file


class InputHashes:
    """Collects hashes in a thread of its own (hashlib releases the GIL)."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []

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
        if len(self._pending) >= 16:
            self._pending.pop(0).result()
        self._pending.append(self._pool.submit(update, offset, data))

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {
            path.name: self._hashes[path].hexdigest() if path in self._hashes else sha256_file(path)
            for path in checkpoint.files
        }
