"""Open weights lazily, as named tensors, wherever they live.

`open_checkpoint` takes a Hugging Face folder (single or sharded safetensors, or .bin), a
.safetensors, .pt or .bin file, a PEFT adapter folder, a hub id, a state dict or an nn.Module.
Only headers are read; no input is ever changed and no code in it is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.hashes import hash_file
from gradfix.checkpoints.open_clip_tags import PREFIX, tag_file
from gradfix.checkpoints.pickled import load_pickle
from gradfix.checkpoints.safetensors_file import (
    CODES,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    TensorInfo,
    file_identity,
)
from gradfix.errors import CorruptInput, UsageError

INDEX_SUFFIX = ".index.json"
# Looked for in this order inside a folder.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
CHUNK = 1 << 18

Source = str | os.PathLike[str] | Mapping[str, Tensor] | nn.Module


class Checkpoint(ABC):
    """Named tensors that are read when asked for."""

    path: Path | None = None
    notes: tuple[str, ...] = ()  # what a reader of the result should know about this input

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo: ...

    @abstractmethod
    def read(self, name: str) -> Tensor: ...

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        """The tensor as flat pieces; memory stays at one piece for safetensors files."""
        flat = self.read(name).reshape(-1)
        for first in range(0, flat.numel(), elements):
            yield flat[first : first + elements]

    def span(self, name: str, first: int, count: int) -> Tensor:
        """Entries first .. first + count of the flattened tensor."""
        return self.read(name).reshape(-1)[first : first + count]

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        """The file that holds this tensor as it is, and its name there; None where it is computed."""
        return None

    def identity(self) -> Any:
        """By what an interrupted run recognises its inputs again, as JSON; None where it cannot."""
        return None

    @property
    def files(self) -> list[Path]:
        return []

    def state(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.names()}

    def fingerprint(self) -> str:
        """sha256 over names, dtypes, shapes and bytes: the same for every container format."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            digest.update(tensor_line(name, self.info(name), self._tensor_hash(name)))
        return digest.hexdigest()

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

    def identity(self) -> Any:
        return [file_identity(path) for path in self.files]

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

    @property
    def files(self) -> list[Path]:
        return [self.path] if self.path is not None and self.path.is_file() else []

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


class Part(Checkpoint):
    """Some tensors of another checkpoint, read through it."""

    def __init__(self, whole: Checkpoint, names: list[str]) -> None:
        self.whole, self._names = whole, names
        self.path = whole.path

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        return self.whole.info(name)

    def read(self, name: str) -> Tensor:
        return self.whole.read(name)

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        return self.whole.chunks(name, elements)

    def span(self, name: str, first: int, count: int) -> Tensor:
        return self.whole.span(name, first, count)

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return self.whole.stored(name)

    def identity(self) -> Any:
        whole = self.whole.identity()
        return None if whole is None else [whole, self._names]

    @property
    def files(self) -> list[Path]:
        return self.whole.files


def open_checkpoint(source: Source | Checkpoint, *, base: Source | Checkpoint | None = None) -> Checkpoint:
    """Open weights of any supported kind; `base` is needed when the source is a LoRA adapter."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, nn.Module):
        return _from_module(source)
    if isinstance(source, Mapping):
        return _from_mapping(source, None)
    path = resolve(source)
    if path.is_dir():
        return _from_folder(path, base)
    return _from_file(path)


def resolve(source: str | os.PathLike[str]) -> Path:
    """A local path, or a hub id downloaded into the hub's own cache."""
    path = Path(source).expanduser()
    if os.path.exists(path):  # unlike Path.exists it also answers for names no system can hold
        return path
    text = os.fspath(source)
    if text.startswith(PREFIX):
        return tag_file(text)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) or os.path.exists(path.parent):
        raise CorruptInput(f"{text} does not exist: give a folder, a weights file or a hub id (owner/name).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = text.partition("@")
    try:
        return Path(
            snapshot_download(
                repo, revision=revision or None, ignore_patterns=["*.msgpack", "*.h5", "*.onnx"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        raise CorruptInput(
            f"{text} is no local path, and the hub did not deliver it ({type(error).__name__}). "
            "Check the spelling, log in, or download it first and give the folder."
        ) from None


def _from_module(module: nn.Module) -> MemoryCheckpoint:
    checkpoint = MemoryCheckpoint(dict(module.named_parameters()))
    checkpoint.module = module
    return checkpoint


def _from_mapping(tensors: Mapping[str, Any], path: Path | None) -> MemoryCheckpoint:
    where = str(path) if path else "the state dict"
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CorruptInput(f"{where}: entry {name!r} is {type(value).__name__}, not a tensor.")
        if value.layout is not torch.strided or value.is_quantized:
            raise CorruptInput(
                f"{where}: tensor {name!r} is sparse or quantised; gradfix needs dense weights."
            )
        if value.dtype not in CODES:
            raise CorruptInput(
                f"{where}: tensor {name!r} is {value.dtype}, which safetensors files of weights do not hold."
            )
    return MemoryCheckpoint(tensors, path)


def _from_folder(folder: Path, base: Source | Checkpoint | None) -> Checkpoint:
    if (folder / "adapter_config.json").is_file():
        from gradfix.checkpoints.lora import open_adapter

        if base is None:
            raise UsageError(f"{folder} is a LoRA adapter: it needs the base it was trained on (--base).")
        return open_adapter(folder, open_checkpoint(base))
    for name in WEIGHT_FILES:
        if (folder / name).is_file():  # before the index, as transformers does where a folder holds both
            return _from_file(folder / name, folder)
        if (folder / (name + INDEX_SUFFIX)).is_file():
            return _from_index(folder, folder / (name + INDEX_SUFFIX))
    found = sorted(folder.glob("*.safetensors")) or sorted(
        p for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES and p.name != "training_args.bin"
    )
    if len(found) == 1:
        return _from_file(found[0], folder)
    if not found:
        raise CorruptInput(
            f"{folder} holds no weights: expected model.safetensors or pytorch_model.bin in it."
        )
    raise CorruptInput(
        f"{folder} holds {len(found)} weight files and no index; give one of them, e.g. {found[0]}."
    )


def _from_index(folder: Path, index: Path) -> Checkpoint:
    weight_map = read_index(index)
    shards: list[SafetensorsFile] = []
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        wanted = {name for name, home in weight_map.items() if home == file}
        path = folder / file
        if not os.path.isfile(path):
            raise CorruptInput(f"{index} names shard {file}, which is not in the folder. Download it again.")
        if path.suffix == ".safetensors":
            shard = SafetensorsFile(path)
            _check_shard(index, file, wanted, set(shard.entries))
            shards.append(shard)
        else:
            loaded = load_pickle(path)
            _check_shard(index, file, wanted, set(loaded))
            tensors.update(loaded)
    if shards and tensors:
        raise CorruptInput(
            f"{index} mixes safetensors and pickled shards; convert the folder to one of them."
        )
    if shards:
        return SafetensorsCheckpoint(folder, shards)
    return _from_mapping(tensors, folder)


def read_index(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CorruptInput(f"{index} is larger than {MAX_HEADER_BYTES:,} bytes: no shard index.")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptInput(f"{index} is not a shard index: no readable weight_map in it.") from None
    for file in pairs.values():
        # Lexical on purpose: hub caches keep shards behind symlinks that leave the folder.
        if "/" in file or "\\" in file or file in ("", ".", "..") or "\0" in file:
            raise CorruptInput(f"{index} points outside its folder ({file!r}); refused.")
    if not pairs:
        raise CorruptInput(f"{index} lists no tensors.")
    return pairs


def _check_shard(index: Path, file: str, wanted: set[str], present: set[str]) -> None:
    if wanted != present:
        odd = sorted(wanted ^ present)[0]
        raise CorruptInput(f"{index} and shard {file} disagree about tensor {odd!r}. Download both again.")


def _from_file(path: Path, folder: Path | None = None) -> Checkpoint:
    if not path.is_file():
        raise CorruptInput(f"{path} is no regular file; weights are read from files and folders only.")
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(folder or path, [SafetensorsFile(path)])
    if path.suffix in PICKLE_SUFFIXES:
        checkpoint = _from_mapping(load_pickle(path), folder or path)
        if folder is not None:
            checkpoint.path = folder
        return checkpoint
    raise CorruptInput(f"{path}: unknown kind of weights file; expected .safetensors, .pt or .bin.")


def file_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    return {str(path): hash_file(path) for path in checkpoint.files}
