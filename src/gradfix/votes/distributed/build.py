"""Build a model without its weights, split it over the processes, and read each process's part from the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.slices import load_slices
from gradfix.errors import CorruptInput
from gradfix.votes.distributed.sharded import SignReduceScatter, shard


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
    model = build_empty(make, checkpoint)
    names = name_map(model, checkpoint.names())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    signs = shard(model, mesh, compute=compute, recompute=recompute)
    model.to_empty(device=device)
    fill_buffers(model, checkpoint, buffers)
    load_slices(model, names, checkpoint)
    return Sharded(model, signs, names)


def build_empty(make: Callable[[], nn.Module], checkpoint: Checkpoint) -> nn.Module:
    """The config's model without weights, tied as its own loader would tie it for this file.

    A file that holds two tied tensors with different values (T5 1.1, whose config cannot say so) unties them."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    # No random numbers that nobody reads; buffers such as rotary tables are computed, not loaded.
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = make()
    stored = name_map(model, checkpoint.names()).renamed  # of all tensors: none are tied yet
    getattr(model, "tie_weights", _nothing)()
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        twin = first.setdefault(id(parameter), name)
        if twin != name and not _same(stored.get(name), stored.get(twin), checkpoint):
            module, _, own = name.rpartition(".")
            separate = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            model.get_submodule(module)._parameters[own] = separate
            config: Any = getattr(model, "config", None)
            if config is not None:
                config.tie_word_embeddings = False
    return model.eval()


def _same(one: str | None, other: str | None, checkpoint: Checkpoint) -> bool:
    """Does the file hold at most one of the two tensors, or both with the same values?"""
    if one is None or other is None or one not in checkpoint or other not in checkpoint:
        return True
    if checkpoint.info(one) != checkpoint.info(other):
        return False
    return all(map(torch.equal, checkpoint.chunks(one), checkpoint.chunks(other)))


def fill_buffers(model: nn.Module, checkpoint: Checkpoint, computed: Mapping[str, Tensor]) -> None:
    """What the file stores of the buffers, and for those that are never stored what the model computed."""
    stored = {name for name in computed if name in checkpoint}
    for prefix, module in model.named_modules():
        for own in module._buffers.keys() - module._non_persistent_buffers_set:
            name = f"{prefix}.{own}" if prefix else own
            if name in computed and name not in stored:
                raise CorruptInput(
                    f"{checkpoint} holds no buffer {name!r} under this name. Vote without --sharded and --offload: "
                    "the model's own loader may find it."
                )
    for name, buffer in model.named_buffers():
        buffer.copy_(checkpoint.read(name) if name in stored else computed[name])


def _nothing() -> None:
    """For models that know no tied weights."""
