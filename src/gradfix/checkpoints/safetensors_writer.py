"""Write one safetensors file in pieces, hashed on the way, and go on with one that was begun earlier.

The disk is told to begin long before the end, so that closing the file waits for its last part only."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfix.checkpoints.hashes import OrderedHash
from gradfix.checkpoints.safetensors_file import CODES, TensorInfo
from gradfix.checkpoints.weights import raw_bytes
from gradfix.errors import UnsafeResult

REREAD_BYTES = 1 << 18
LARGE = 1 << 29
DONT_CACHE = 0x80  # RWF_DONTCACHE of Linux 6.14, which Python does not name yet
UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # an older kernel, or another file system
FLUSH_BYTES = 1 << 26


class SafetensorsWriter:
    """One safetensors file, written tensor by tensor in pieces; its hash comes with it.

    With `after` (a size and the hash of so many bytes), a file begun earlier is gone on with if its
    beginning holds; `resumed` says whether it did."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        after: tuple[int, str] | None = None,
    ) -> None:
        self.path = path
        header = _header(tensors, metadata)
        sizes = [info.nbytes for info in tensors.values()]
        ends = list(accumulate(sizes, initial=len(header)))
        self.starts = dict(zip(tensors, ends, strict=False))  # where each tensor begins
        self._ends, self._expected = ends, ends[-1]
        self._past_cache = self._expected >= LARGE and sys.platform == "linux"
        self.size = self._flushed = 0
        self._flusher = ThreadPoolExecutor(max_workers=1)
        self._flushing: Future[None] | None = None
        self.resumed = after is not None and self._go_on(*after)
        if not self.resumed:
            self._content = OrderedHash(ends)
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self._put(header)

    def _go_on(self, size: int, expected: str) -> bool:
        if not self.path.is_file() or not 0 < size <= self.path.stat().st_size:
            return False
        self._content = OrderedHash(self._ends)
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        self._file.truncate(size)
        offset = 0
        while data := self._file.read(REREAD_BYTES):
            self._content.update(offset, data)
            offset += len(data)
        if offset == size and self._content.text(size) == expected:
            self.size = size
            return True
        self._file.close()
        return False

    def hash(self, offset: int, piece: Tensor) -> None:
        """Hash a piece that will be written at this place; whoever computed it has it in the cache still."""
        self._content.update(offset, raw_bytes(piece))

    def write(self, piece: Tensor) -> None:
        """The next piece."""
        self._put(raw_bytes(piece))

    def reached(self) -> tuple[int, str]:
        """Size and hash of what has been written; asked for at the end of a tensor."""
        return self.size, self._content.text(self.size)

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._content.update(self.size, view)
        while view:
            done = self._append(view)
            view = view[done:]
            self.size += done
        if self.size - self._flushed >= FLUSH_BYTES:
            self._flush()

    def _append(self, view: memoryview) -> int:
        """Large files leave the page cache to the inputs: pages that are new to it cost more than the disk does."""
        if self._past_cache:
            try:
                return os.pwritev(self._file.fileno(), [view], self.size, DONT_CACHE)
            except (OSError, NotImplementedError) as error:
                if isinstance(error, OSError) and error.errno not in UNKNOWN:
                    raise
                self._past_cache = False
                self._file.seek(self.size)
        return self._file.write(view)

    def _flush(self) -> None:
        """Let the disk begin while there is more to come, instead of waiting for all of it at the end."""
        if self._flushing is None or self._flushing.done():
            if self._flushing is not None:
                self._flushing.result()  # a failed write is told of once: the flush at the end would not know
            self._flushed = self.size
            self._flushing = self._flusher.submit(os.fdatasync, self._file.fileno())

    def close(self) -> str:
        """Flush to disk and return the hash."""
        if self.size != self._expected:
            raise UnsafeResult(
                f"{self.path.name}: wrote {self.size} bytes of {self._expected}; this is a bug."
            )
        if self._flushing is not None:
            self._flushing.result()
        os.fsync(self._file.fileno())
        self._let_go()
        return self._content.text(self.size)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _let_go(self) -> None:
        self._flusher.shutdown(wait=True)
        self._file.close()


def _header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
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
    return len(text).to_bytes(8, "little") + text
