"""Build a model without its weights, split it over the processes, and read each process's part from the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.slices import load_slices
from gradfix.votes.sharded import SignReduceScatter, shard


@dataclass(frozen=True)
class Sharded:
    """A split model, its sign-carrying communication, and its names on disk (taken before it was split)."""

    model: nn.Module
    signs: SignReduceScatter
    names: NameMap


@torch.no_grad()
def build_sharded(
    make: Callable[[], nn.Module],
    checkpoint: Checkpoint,
    mesh: DeviceMesh,
    device: str | torch.device,
    *,
    compute: torch.dtype | None = None,
    recompute: bool = False,
) -> Sharded:
    """`make()` builds the model from its config; its weights are never allocated in full anywhere."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):  # buffers such as rotary tables are computed, not loaded
        model = make()
    getattr(model, "tie_weights", _nothing)()
    model.eval()
    names = name_map(model, checkpoint.names())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    signs = shard(model, mesh, compute=compute, recompute=recompute)
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        stored = checkpoint.read(name) if name in checkpoint else buffers[name]
        buffer.copy_(stored)
    load_slices(model, names, checkpoint)
    return Sharded(model, signs, names)


def _nothing() -> None:
    """For models that know no tied weights."""
