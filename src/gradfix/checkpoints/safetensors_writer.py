"""Write one safetensors file in pieces, hashed on the way, and go on with one that was begun earlier."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfix.checkpoints.hashes import BackgroundHash
from gradfix.checkpoints.open import raw_bytes
from gradfix.checkpoints.safetensors_file import CODES, TensorInfo
from gradfix.errors import UnsafeResult

REREAD_BYTES = 1 << 20
FLUSH_BYTES = 1 << 28


class SafetensorsWriter:
    """One safetensors file, written tensor by tensor in pieces; the sha256 comes with it.

    With `after` (a size and the sha256 of so many bytes), a file begun earlier is gone on with if its
    beginning holds; `resumed` says whether it did."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        after: tuple[int, str] | None = None,
    ) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, info in tensors.items():
            header[name] = {
                "dtype": CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.nbytes],
            }
            offset += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._expected = 8 + len(text) + offset
        self.size = self._flushed = 0
        self._flusher = ThreadPoolExecutor(max_workers=1)
        self._flushing: Future[None] | None = None
        self._digest = BackgroundHash()
        self.resumed = after is not None and self._go_on(*after)
        if not self.resumed:
            self._digest = BackgroundHash()
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self.write_bytes(len(text).to_bytes(8, "little") + text)

    def _go_on(self, size: int, sha256: str) -> bool:
        if not self.path.is_file() or not 0 < size <= self.path.stat().st_size:
            return False
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        self._file.truncate(size)
        while data := self._file.read(REREAD_BYTES):
            self._digest.update(data)
        self.size = size
        if self._digest.hexdigest() == sha256:
            return True
        self._file.close()
        self._digest.close()
        self.size = 0
        return False

    def write(self, piece: Tensor) -> None:
        """The piece must not change afterwards: it is hashed a little later."""
        self.write_bytes(raw_bytes(piece))

    def write_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if view:
            self._digest.update(view)
        while view:
            done = self._file.write(view)
            view = view[done:]
            self.size += done
        if self.size - self._flushed >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Let the disk begin while there is more to come, instead of waiting for all of it at the end."""
        if self._flushing is None or self._flushing.done():
            self._flushed = self.size
            self._flushing = self._flusher.submit(os.fdatasync, self._file.fileno())

    def sha256(self) -> str:
        """Of what has been written so far."""
        return self._digest.hexdigest()

    def close(self) -> str:
        """Flush to disk and return the sha256."""
        if self.size != self._expected:
            raise UnsafeResult(
                f"{self.path.name}: wrote {self.size} bytes of {self._expected}; this is a bug."
            )
        if self._flushing is not None:
            self._flushing.result()
        os.fsync(self._file.fileno())
        self._file.close()
        return self.sha256()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flusher.shutdown(wait=True)
        self._file.close()
        self._digest.close()
