"""Weights as named tensors that are read when asked for: what every format and every view of one is.

Nothing here knows how a file is found or which formats there are; that is `open`'s business."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, file_identity

CHUNK = 1 << 18

Source = str | os.PathLike[str] | Mapping[str, Tensor] | nn.Module


class Checkpoint(ABC):
    """Named tensors that are read when asked for: a format defines `read` or `span`, the other follows."""

    path: Path | None = None
    notes: tuple[str, ...] = ()  # what a reader of the result should know about this input

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo: ...

    def span(self, name: str, first: int, count: int) -> Tensor:
        """Entries first .. first + count of the flattened tensor."""
        return self.read(name).reshape(-1)[first : first + count]

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        """The tensor as flat pieces; memory stays at one piece for safetensors files."""
        entries = self.info(name).numel
        for first in range(0, entries, elements):
            yield self.span(name, first, min(elements, entries - first))

    def read(self, name: str) -> Tensor:
        info = self.info(name)
        return torch.cat([*self.chunks(name), torch.empty(0, dtype=info.dtype)]).view(info.shape)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        """The file that holds this tensor as it is, and its name there; None where it is computed."""
        return None

    def identity(self) -> Any:
        """By what an interrupted run recognises its inputs again, as JSON; None where it cannot."""
        return None

    def layout(self) -> dict[str, list[str]] | None:
        """The safetensors files that hold the tensors, and the tensors of each in order; None where there are none."""
        return None

    @property
    def files(self) -> list[Path]:
        return []

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(self.info(name).nbytes for name in self.names())

    def state(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.names()}

    def fingerprint(self) -> str:
        """sha256 over names, dtypes, shapes and bytes: the same for every container format."""
        digest, names = hashlib.sha256(), sorted(self.names())
        for name, content in zip(names, self._tensor_hashes(names), strict=True):
            digest.update(tensor_line(name, self.info(name), content))
        return digest.hexdigest()

    def _tensor_hashes(self, names: list[str]) -> Iterable[str]:
        return map(self._tensor_hash, names)

    def _tensor_hash(self, name: str) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(raw_bytes(chunk))
        return digest.hexdigest()

    def __contains__(self, name: object) -> bool:
        return name in set(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else f"<{len(self)} tensors in memory>"


def raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def tensor_line(name: str, info: TensorInfo, content: str) -> bytes:
    return f"{name}\t{info.dtype}\t{list(info.shape)}\t{content}\n".encode()


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file or the shards of a folder."""

    def __init__(self, path: Path, shards: list[SafetensorsFile]) -> None:
        self.path = path
        self.shards = shards
        self._home = {name: shard for shard in shards for name in shard.names_in_file_order()}

    def names(self) -> list[str]:
        return list(self._home)

    def info(self, name: str) -> TensorInfo:
        return self._home[name].entries[name].info

    def read(self, name: str) -> Tensor:
        return self._home[name].read(name)

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        return self._home[name].chunks(name, elements)

    def span(self, name: str, first: int, count: int) -> Tensor:
        return self._home[name].span(name, first, count)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return self._home[name], name

    def _tensor_hashes(self, names: list[str]) -> Iterable[str]:
        with ThreadPoolExecutor() as pool:  # one core would take longer than a small training
            return list(pool.map(self._tensor_hash, names))

    def identity(self) -> Any:
        return [file_identity(path) for path in self.files]

    def layout(self) -> dict[str, list[str]] | None:
        return {shard.path.name: shard.names_in_file_order() for shard in self.shards}

    @property
    def files(self) -> list[Path]:
        return [shard.path for shard in self.shards]

    def __contains__(self, name: object) -> bool:
        return name in self._home


class MemoryCheckpoint(Checkpoint):
    """Tensors that are already there: a state dict, a module, an unpickled file."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path | None = None) -> None:
        self._tensors = dict(tensors)
        self.path = path
        self.module: nn.Module | None = None

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        flat = self.read(name).reshape(-1)  # once: it is a copy where the tensor is a view of another
        return (flat[first : first + elements] for first in range(0, flat.numel(), elements))

    @property
    def files(self) -> list[Path]:
        return [self.path] if self.path is not None and self.path.is_file() else []

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


class Renamed(Checkpoint):
    """Another checkpoint under other names."""

    def __init__(self, whole: Checkpoint, original: dict[str, str]) -> None:
        self.whole, self.original = whole, original
        self.path, self.notes = whole.path, whole.notes

    def names(self) -> list[str]:
        return list(self.original)

    def info(self, name: str) -> TensorInfo:
        return self.whole.info(self.original[name])

    def read(self, name: str) -> Tensor:
        return self.whole.read(self.original[name])

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        return self.whole.chunks(self.original[name], elements)

    def span(self, name: str, first: int, count: int) -> Tensor:
        return self.whole.span(self.original[name], first, count)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return self.whole.stored(self.original[name])

    def identity(self) -> Any:
        whole = self.whole.identity()
        return None if whole is None else [whole, self.original]

    @property
    def files(self) -> list[Path]:
        return self.whole.files

    def __contains__(self, name: object) -> bool:
        return name in self.original
