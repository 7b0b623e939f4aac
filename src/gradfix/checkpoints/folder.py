"""The parts of a checkpoint folder around its tensors: identity, shard layout, index, side files."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gradfix._version import __version__
from gradfix.checkpoints.hashes import hash_file, hexadecimal
from gradfix.checkpoints.open import Checkpoint, SafetensorsCheckpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.trio import Plan

BY_FILES, BY_SHA256 = "blake3:", "files:"  # how a fingerprint of files begins, now and in older votes
SHARD_BYTES = 5 * 2**30
MODULE_BYTES = 2**28  # a dense layer behind an encoder is far smaller, another model far larger
NOT_COPIED = (
    ".index.json",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".pkl",
    ".pickle",
    ".joblib",
    ".py",
)


def target_fingerprint(target: Checkpoint, files: Mapping[str, str] | None = None) -> str:
    """The identity votes are tied to: file hashes for checkpoints on disk, content for those in memory."""
    if not target.files:
        return target.fingerprint()
    return _of_files(BY_FILES, files or {path.name: hash_file(path) for path in target.files})


def is_target(recorded: str, target: Checkpoint, files: Mapping[str, str] | None = None) -> bool:
    """Was this fingerprint taken of these weights? Those of older votes are sha256 and cost one reading."""
    if recorded.startswith(BY_SHA256):
        older = {path.name: hash_file(path, "sha256") for path in target.files}
        return bool(older) and recorded == _of_files(BY_SHA256, older)
    return recorded == target_fingerprint(target, files)


def comparable(fingerprints: Iterable[str]) -> bool:
    """Do these fingerprints differ only if the weights do? Those of files in two algorithms tell nothing."""
    kinds = {next((kind for kind in (BY_FILES, BY_SHA256) if f.startswith(kind)), "") for f in fingerprints}
    return not kinds >= {BY_FILES, BY_SHA256}


def _of_files(kind: str, hashes: Mapping[str, str]) -> str:
    return kind + "+".join(hexadecimal(hashes[name])[:32] for name in sorted(hashes))


def versions() -> dict[str, Any]:
    """What the bits of a result depend on besides its inputs."""
    found = {"gradfix": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {
        "arch": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
    }
    return {"versions": found, "machine": machine}


def device_name(device: torch.device) -> str:
    """The device as it changes bits: two cards of one kind are the same, two kinds are not."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def layout_of(
    target: Checkpoint, plan: Plan, info: Callable[..., TensorInfo], tuned: Checkpoint
) -> dict[str, list[str]]:
    """Output files and their tensors: the target's own shards, or new ones when it is no safetensors folder."""
    added = [
        name
        for name, what in plan.extra.items()
        if what.startswith("copied") and name not in set(target.names())
    ]
    if isinstance(target, SafetensorsCheckpoint):
        layout = {
            _weight_name(shard.path, len(target.shards)): shard.names_in_file_order()
            for shard in target.shards
        }
        last = list(layout)[-1]
        layout[last] = [*layout[last], *added]
        return layout
    names = sorted(target.names(), key=lambda n: (-target.info(n).dtype.itemsize, n))
    shards: list[list[str]] = [[]]
    size = 0
    for name in [*names, *added]:
        bytes_ = info(name, tuned if name in added else None).nbytes
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}


def write_index(staging: Path, layout: Mapping[str, list[str]], total: int, *, always: bool = False) -> None:
    """The shard index, where there is more than one shard."""
    if len(layout) > 1 or always:
        weight_map = {name: file for file, names in layout.items() for name in names}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (staging / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _weight_name(path: Path, shards: int) -> str:
    """Loaders look for model.safetensors; a lone file under another name is renamed to it."""
    known = ("model.safetensors", "open_clip_model.safetensors")
    return path.name if shards > 1 or path.name in known else "model.safetensors"


def copy_side_files(target: Checkpoint, staging: Path) -> None:
    """Config, tokenizer and processor files of the target; never its weights, code or hidden files.

    The modules that sentence-transformers puts behind an encoder go along too, with their small weights."""
    if target.path is None or not target.path.is_dir():
        return
    weights = {path.name for path in target.files}
    for path in sorted(target.path.iterdir()):
        if path.name not in weights and is_side_file(path):
            shutil.copyfile(path, staging / path.name)
    for module in _modules_behind(target.path):
        for path in sorted(module.rglob("*")):
            if is_side_file(path) or _is_small_weight(path):
                copy = staging / path.relative_to(target.path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def is_side_file(path: Path) -> bool:
    skip = path.name.endswith(NOT_COPIED) or path.name.startswith(".")
    return path.is_file() and not skip and path.name not in ("gradfix.json", "README.md")


def _is_small_weight(path: Path) -> bool:
    return path.is_file() and path.suffix in (".safetensors", ".bin") and path.stat().st_size <= MODULE_BYTES


def _modules_behind(folder: Path) -> list[Path]:
    """The subfolders that modules.json names, such as 1_Pooling; a path that leads elsewhere is none."""
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        names = sorted({str(module["path"]) for module in listed})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    plain = [name for name in names if name and name == Path(name).name and not name.startswith(".")]
    modules = [folder / name for name in plain]
    return [module for module in modules if module.is_dir() and not module.is_symlink()]
