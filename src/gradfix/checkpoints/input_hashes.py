"""Hash the inputs while they stream by: a file that is read anyway costs no second read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from gradfix.checkpoints.hashes import FileHash, hash_file
from gradfix.checkpoints.open import Checkpoint, raw_bytes
from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.errors import CorruptInput


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
