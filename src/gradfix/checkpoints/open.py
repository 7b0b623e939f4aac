"""Find weights and open them lazily, as named tensors, wherever they live.

`open_checkpoint` takes a Hugging Face folder (single or sharded safetensors, or .bin), a
.safetensors, .pt or .bin file, a PEFT adapter folder, a hub id, an open_clip tag, a state dict or an nn.Module.
Only headers are read; no input is ever changed and no code in it is ever run."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.lora import open_adapter
from gradfix.checkpoints.safetensors_file import CODES, MAX_HEADER_BYTES, SafetensorsFile
from gradfix.checkpoints.weights import (
    CHUNK,
    Checkpoint,
    MemoryCheckpoint,
    SafetensorsCheckpoint,
    Source,
    raw_bytes,
)
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown

__all__ = [
    "CHUNK", "Checkpoint", "MemoryCheckpoint", "SafetensorsCheckpoint", "Source", "open_checkpoint", "raw_bytes",
    "read_index", "resolve",
]  # fmt: skip

INDEX_SUFFIX = ".index.json"
# Looked for in this order inside a folder.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
OPEN_CLIP = "open_clip:"  # its published weights by name: open_clip:ViT-B-16/laion2b_s34b_b88k
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


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
    if text.startswith(OPEN_CLIP):
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
        if base is None:
            raise UsageError(f"{folder} is a LoRA adapter: it needs the base it was trained on (--base).")
        return open_adapter(folder, open_checkpoint(base), open_checkpoint)
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


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors only: torch's weights-only reader refuses whatever would run code.

    What is left to refuse are records and views that claim more than the file holds."""
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_records(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CorruptInput:
        raise
    except pickle.UnpicklingError as error:
        told = re.search(r"Unpickler error: (.*?)(?:\.\s|\n|$)", str(error))
        reason = " ".join((told[1] if told else str(error)).split())[:160]
        raise CorruptInput(
            f"{path} cannot be read as plain weights ({reason}). gradfix never runs code from a checkpoint; "
            "save it as safetensors in the program that made it."
        ) from None
    except Exception as error:  # damaged bytes make the readers raise almost anything
        raise CorruptInput(f"{path} is damaged or not a torch file ({type(error).__name__}).") from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise CorruptInput(f"{path} holds no state dict; found {type(loaded).__name__}.")
    loaded = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    for name, value in loaded.items():
        _refuse_hollow(path, name, value)
    if loaded and all(name.startswith("module.") for name in loaded):
        loaded = {name.removeprefix("module."): value for name, value in loaded.items()}
    if not loaded:
        raise CorruptInput(f"{path} holds no tensors.")
    return loaded


def _check_records(path: Path) -> None:
    """torch stores its records as they are; a compressed one can claim any size.

    The checksums are read here because torch does not look at them in files that it maps."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > path.stat().st_size:
                raise CorruptInput(
                    f"{path}: record {record.filename!r} is compressed or larger than the file; torch writes no "
                    "such files. Save it again as safetensors."
                )
        damaged = archive.testzip()
    if damaged is not None:
        raise CorruptInput(
            f"{path}: record {damaged!r} has another checksum than was written. Copy it again."
        )


def _refuse_hollow(path: Path, name: str, value: Tensor) -> None:
    """A view can claim more entries than the file holds (stride 0), or none of them (meta)."""
    if value.layout is not torch.strided or value.is_quantized:
        return  # refused by name with the other entries
    if value.is_meta or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise CorruptInput(
            f"{path}: tensor {name!r} claims {value.numel():,} entries that the file does not hold."
        )


def split_tag(text: str) -> tuple[str, str]:
    architecture, _, tag = text.removeprefix(OPEN_CLIP).partition("/")
    if not architecture or not tag:
        raise UsageError(
            f"{text!r} must read {OPEN_CLIP}ARCHITECTURE/TAG, e.g. {OPEN_CLIP}ViT-B-16/laion2b_s34b_b88k."
        )
    return architecture, tag


def tag_settings(text: str) -> dict[str, Any]:
    """What open_clip knows about a tag: where the file is, and how images were normalised."""
    library = import_open_clip()
    architecture, tag = split_tag(text)
    settings = library.get_pretrained_cfg(architecture, tag)
    if not settings:
        tags = library.list_pretrained_tags_by_model(architecture)
        kind = f"pretrained tag of {architecture}" if tags else "open_clip model"
        choices = tags or sorted({name for name, _ in library.list_pretrained()})
        raise UsageError(unknown(kind, tag if tags else architecture, choices))
    return dict(settings)


def tag_file(text: str) -> Path:
    """The local file of a tag, downloaded if need be."""
    library = import_open_clip()
    settings = tag_settings(text)
    try:
        return Path(library.download_pretrained(settings))
    except Exception as error:  # the hub client, urllib and hash checks each raise their own kind
        raise CorruptInput(
            f"{text} could not be downloaded ({type(error).__name__}). Download the file and give its path instead."
        ) from None


def import_open_clip() -> Any:
    heal_torchvision()
    try:
        import open_clip
    except ImportError:
        raise UsageError("this is an open_clip model; install gradfix[vision] to use it.") from None
    return open_clip
