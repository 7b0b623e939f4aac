"""One safetensors file, read by ranges.

The header is checked by the safetensors library; the tensors are then read with plain
positioned reads into a caller-sized buffer. Memory stays at one chunk whatever the size of
the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradfix.errors import CorruptInput

MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A tensor's place in its file."""

    info: TensorInfo
    start: int
    stop: int


class SafetensorsFile:
    """Named tensors of one file; the header is read once, at construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries, self.metadata, self.header_bytes = _read_header(path)
        self.size = path.stat().st_size

    def names_in_file_order(self) -> list[str]:
        return sorted(self.entries, key=lambda name: self.entries[name].start)

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        with open(self.path, "rb", buffering=0) as file:
            return _read_range(file.fileno(), entry, 0, entry.info.numel, self.path).view(entry.info.shape)

    def span(self, name: str, first: int, count: int) -> Tensor:
        """Entries first .. first + count of the flattened tensor."""
        with open(self.path, "rb", buffering=0) as file:
            return _read_range(file.fileno(), self.entries[name], first, count, self.path)

    def chunks(self, name: str, elements: int) -> Iterator[Tensor]:
        """The tensor as flat pieces of at most `elements` entries."""
        entry = self.entries[name]
        with open(self.path, "rb", buffering=0) as file:
            for first in range(0, entry.info.numel, elements):
                count = min(elements, entry.info.numel - first)
                yield _read_range(file.fileno(), entry, first, count, self.path)


def file_identity(path: Path) -> list[Any]:
    """A file that is replaced or changed gets another inode or change time."""
    status = os.stat(path)
    return [os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_range(descriptor: int, entry: Entry, first: int, count: int, path: Path) -> Tensor:
    itemsize = entry.info.dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=entry.info.dtype)
    buffer = torch.empty(count * itemsize, dtype=torch.uint8)
    view = buffer.numpy().data
    offset = entry.start + first * itemsize
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise CorruptInput(f"{path} ends early; it shrank while being read. Copy it again.")
        done += got
    return buffer.view(entry.info.dtype)


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str], int]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CorruptInput(
                    f"{path} is not a complete safetensors file: header of {length} bytes in a file of "
                    f"{size}. Download or copy it again."
                )
            header = file.read(length)
        with safe_open(path, framework="pt"):
            pass  # the library's own validation: offsets, overlaps, sizes
    except FileNotFoundError:
        raise CorruptInput(f"{path} does not exist.") from None
    except (IsADirectoryError, PermissionError) as error:
        raise CorruptInput(f"{path} cannot be read ({error.strerror}).") from None
    except SafetensorError as error:
        raise CorruptInput(f"{path} is not a valid safetensors file: {_short(error)}.") from None
    try:
        fields = json.loads(header)
        metadata = fields.pop("__metadata__", None) or {}
        entries = {name: _entry(name, value, 8 + length, path) for name, value in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CorruptInput):
            raise
        raise CorruptInput(f"{path} has a malformed safetensors header: {_short(error)}.") from None
    return entries, metadata, 8 + length


def _entry(name: str, value: dict[str, object], data_start: int, path: Path) -> Entry:
    code = str(value["dtype"])
    if code not in DTYPES:
        raise CorruptInput(f"{path}: tensor {name!r} has dtype {code}, which gradfix cannot read.")
    shape = tuple(int(size) for size in value["shape"])  # type: ignore[attr-defined]
    start, stop = (int(x) for x in value["data_offsets"])  # type: ignore[attr-defined]
    info = TensorInfo(shape, DTYPES[code])
    if stop - start != info.nbytes:
        raise CorruptInput(f"{path}: tensor {name!r} holds {stop - start} bytes, its shape needs {info.nbytes}.")
    return Entry(info, data_start + start, data_start + stop)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
