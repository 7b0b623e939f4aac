"""Save new weights in the shape of an existing checkpoint: its files, names, config and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.folder import copy_side_files, layout_of, versions, write_index
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, file_hashes
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.trio import Plan
from gradfix.checkpoints.write import SafetensorsWriter, refuse_inside, staged_folder, write_manifest
from gradfix.errors import UnsafeResult


def save_like(
    source: Checkpoint,
    model: nn.Module,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    details: Mapping[str, Any] | None = None,
    extras: Callable[[Path], None] | None = None,
) -> None:
    """Write the model's weights under the source's on-disk names; tensors the model lacks are the source's own."""
    refuse_inside(out, [source.path] if source.path is not None else [])
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, value in parameters.items():
        if not bool(torch.isfinite(value).all()):
            raise UnsafeResult(f"weight {name!r} is not finite after training; lower the learning rate.")
    named = name_map(model, source.names()).to_disk(parameters)
    added = {name: value for name, value in named.items() if name not in source}

    def info(name: str, _: object = None) -> TensorInfo:
        about = source.info(name) if name in source else TensorInfo(tuple(added[name].shape), dtype)
        return TensorInfo(about.shape, dtype) if about.dtype.is_floating_point else about

    plan = Plan([], {}, dict.fromkeys(added, "copied from the fine-tune"))
    layout = layout_of(source, plan, info, source)
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
