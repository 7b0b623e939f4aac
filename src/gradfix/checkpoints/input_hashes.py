"""Hash the inputs while they stream by: a file that is read anyway costs no second read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradfix.checkpoints.hashes import FileHash, hash_file
from gradfix.checkpoints.open import Checkpoint, raw_bytes


class InputHashes:
    """Hashes of files, taken by whoever reads them, right after reading: another thread would have to be woken
    for every piece, which costs more than it saves."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self._hashes = {path: FileHash(path) for c in checkpoints for path in c.files}

    def chunks(self, checkpoint: Checkpoint, name: str, elements: int) -> Iterator[Tensor]:
        """`checkpoint.chunks`, hashed on the way where the tensor lies in a file as it is."""
        stored = checkpoint.stored(name)
        if stored is None or stored[0].path not in self._hashes:
            yield from checkpoint.chunks(name, elements)
            return
        shard, key = stored
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
        """The hash of each of the checkpoint's files; what has not been read in order is read now."""
        return {
            path.name: self._hashes[path].text() if path in self._hashes else hash_file(path)
            for path in checkpoint.files
        }
