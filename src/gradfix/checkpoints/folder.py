"""The parts of a checkpoint folder around its tensors (shard layout, index, side files), and new weights in its shape."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix._version import __version__
from gradfix.checkpoints.hashes import file_hashes
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.checkpoints.weights import Checkpoint
from gradfix.checkpoints.write import refuse_inside, staged_folder, write_manifest
from gradfix.errors import UnsafeResult
from gradfix.system.processor import onednn_is_faster

SHARD_BYTES = 5 * 2**30
MODULE_BYTES = 2**28  # a dense layer behind an encoder is far smaller, another model far larger
NOT_COPIED = (
    ".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".pkl", ".pickle",
    ".joblib", ".py",
)  # fmt: skip


def versions() -> dict[str, Any]:
    """What the bits of a result depend on besides its inputs."""
    found = {"gradfix": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors", "numpy", "torchvision"):  # it reads images, where it is
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {
        "arch": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "products": "oneDNN" if onednn_is_faster() else "torch",
    }
    return {"versions": found, "machine": machine}


def device_name(device: torch.device) -> str:
    """The device as it changes bits: two cards of one kind are the same, two kinds are not."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def layout_of(target: Checkpoint, added: Sequence[str], info: Callable[[str], TensorInfo]) -> dict[str, list[str]]:
    """Output files and their tensors: the target's own shards, or new ones when it is no safetensors folder.

    Tensors that are `added` to the target's stand at the end."""
    own = target.layout()
    if own is not None:
        layout = {_weight_name(file, len(own)): names for file, names in own.items()}
        last = list(layout)[-1]
        layout[last] = [*layout[last], *added]
        return layout
    names = sorted(target.names(), key=lambda n: (-target.info(n).dtype.itemsize, n))
    shards: list[list[str]] = [[]]
    size = 0
    for name in [*names, *added]:
        bytes_ = info(name).nbytes
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


def _weight_name(file: str, shards: int) -> str:
    """Loaders look for model.safetensors; a lone file under another name is renamed to it."""
    known = ("model.safetensors", "open_clip_model.safetensors")
    return file if shards > 1 or file in known else "model.safetensors"


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


def copy_adapter_files(target: Checkpoint, staging: Path) -> None:
    """The target's side files beside an adapter, its config only where the tokenizer is chosen by it.

    transformers takes a folder with a config for a whole model, and would look for weights in it."""
    copy_side_files(target, staging)
    if (staging / "config.json").is_file() and not _chosen_by_config(staging):
        (staging / "config.json").unlink()


def _chosen_by_config(folder: Path) -> bool:
    from transformers.models.auto import tokenization_auto as auto

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return True
    overruled = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
    return not named or kind in overruled or auto.TOKENIZER_MAPPING_NAMES.get(kind) == "MistralCommonBackend"


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


def save_like(
    source: Checkpoint,
    model: nn.Module,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    details: Mapping[str, Any] | None = None,
    extras: Callable[[Path], None] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model's weights under the source's on-disk names; tensors the model lacks are the source's own.

    `parameters` are the weights where the model holds only slices of them."""
    refuse_inside(out, [source.path] if source.path is not None else [])
    if parameters is None:
        parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, value in parameters.items():
        if not bool(torch.isfinite(value).all()):
            raise UnsafeResult(f"weight {name!r} is not finite after training; lower the learning rate.")
    named = name_map(model, source.names()).to_disk(parameters)
    added = {name: value for name, value in named.items() if name not in source}

    def info(name: str) -> TensorInfo:
        if name in named:  # a head that was replaced may have another shape than the source's
            return TensorInfo(tuple(named[name].shape), dtype)
        about = source.info(name)
        return TensorInfo(about.shape, dtype) if about.dtype.is_floating_point else about

    layout = layout_of(source, list(added), info)
    need = sum(info(name).nbytes for names in layout.values() for name in names)
    with staged_folder(out, overwrite=overwrite, need_bytes=need) as staging:
        hashes = {}
        for file, names in layout.items():
            with SafetensorsWriter(staging / file, {n: info(n) for n in names}, {"format": "pt"}) as writer:
                for name in names:
                    writer.write(_tensor(name, named, source).to(info(name).dtype))
                hashes[file] = writer.close()
        write_index(staging, layout, need)
        copy_side_files(source, staging)
        if extras is not None:
            extras(staging)
        content = {
            "format": 1, "kind": "finetune", **versions(), "details": dict(details or {}),
            "inputs": {"source": {"path": str(source), "hashes": file_hashes(source)}},
        }  # fmt: skip
        write_manifest(staging, content, hashes)


def _tensor(name: str, named: Mapping[str, Tensor], source: Checkpoint) -> Tensor:
    return named[name] if name in named else source.read(name)
