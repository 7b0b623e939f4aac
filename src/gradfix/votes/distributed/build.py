"""Build a model without its weights and split it over processes: each reads its own part from the files.

FSDP2 with a reduce-scatter that carries signs instead of gradients: the backward pass leaves each process with its
slice of the summed signs, one byte per weight on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.slices import load_slices
from gradfix.errors import CorruptInput, UnsafeResult, UsageError
from gradfix.system.processes import Group

MOST_IN_INT8 = 127


class SignReduceScatter(ReduceScatter):
    """Sum the signs of all processes' gradients; `voice` 0 takes part without voting."""

    def __init__(self) -> None:
        self.voice = 1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        kind = torch.int8 if group.size() <= MOST_IN_INT8 else torch.int32
        signs = torch.zeros_like(input_tensor, dtype=kind)
        if self.voice:
            signs.copy_(input_tensor.sign())
        summed = torch.empty_like(output_tensor, dtype=kind)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name
        reduce_scatter(summed, signs, group=group, op=dist.ReduceOp.SUM)
        output_tensor.copy_(summed)


def mesh_of(group: Group, device: str, replicas: int = 1) -> DeviceMesh:
    """All processes in one row, or `replicas` rows that each hold the whole model (HSDP)."""
    kind = torch.device(device).type
    if replicas < 1 or group.size % replicas:
        raise UsageError(f"{group.size} processes cannot hold {replicas} replicas of the model.")
    if group.size // replicas < 2:
        raise UsageError(
            "a sharded vote needs at least two processes per replica: FSDP sends nothing between fewer, and "
            "nothing would be signed. Vote without --sharded, or start more processes."
        )
    if replicas == 1:
        return init_device_mesh(kind, (group.size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, group.size // replicas), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module, mesh: DeviceMesh, *, compute: torch.dtype | None = None, recompute: bool = False
) -> SignReduceScatter:
    """Split the model over the mesh, block by block; works on a model without weights (meta device).

    `compute` is the dtype of the passes where it is not the weights' own; `recompute` keeps no activations
    inside the blocks."""
    signs = SignReduceScatter()
    # bf16 counts to 256 only, and the sums travel in the dtype of the reduction
    reduce = torch.float32 if mesh.size() > MOST_IN_INT8 else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for module in _split(model, recompute, {"mesh": mesh, "mp_policy": policy}):
        module.set_custom_reduce_scatter(signs)
        module.set_reduce_scatter_unused_params(True)
    return signs


def shard_for_lessons(model: nn.Module, mesh: DeviceMesh, *, recompute: bool = False) -> None:
    """The same with gradients that are added up; between passes, when weights are moved and compared, all lie in slices."""
    _split(model, recompute, {"mesh": mesh}, reshard_after_forward=True)


def _split(model: nn.Module, recompute: bool, settings: dict[str, Any], **root: Any) -> list[FSDPModule]:
    refuse_untied(model)
    if recompute:
        _recompute(model)
    for block in blocks(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings, **root)
    found: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in found:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: children of the outermost module lists."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(item for item in child if next(item.parameters(), None) is not None)
            else:
                walk(child)

    walk(model)
    return found


def _recompute(model: nn.Module) -> None:
    from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]

    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False  # a cache would grow once more in the second forward pass
    for block in blocks(model):
        checkpoint(block)


def refuse_untied(model: nn.Module) -> None:
    """A weight that the config ties but the loader delivered twice would vote in two halves."""
    config = getattr(model, "config", None)
    inner = getattr(model, "get_input_embeddings", lambda: None)()
    outer = getattr(model, "get_output_embeddings", lambda: None)()
    if not getattr(config, "tie_word_embeddings", False) or inner is None or outer is None:
        return
    if inner.weight is not outer.weight:
        raise UnsafeResult(
            "the config ties input and output embeddings, but the model holds two tensors: each would vote on "
            "half of the gradient. Load the model with its weights tied (model.tie_weights())."
        )


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
    return _built(make, checkpoint, device, lambda model: shard(model, mesh, compute=compute, recompute=recompute))


@torch.no_grad()
def build_for_lessons(
    make: Callable[[], nn.Module], checkpoint: Checkpoint, mesh: DeviceMesh, device: str | torch.device
) -> nn.Module:
    """The same for a model that learns or teaches."""
    return _built(make, checkpoint, device, lambda model: shard_for_lessons(model, mesh)).model


def _built(
    make: Callable[[], nn.Module], checkpoint: Checkpoint, device: Any, split: Callable[[nn.Module], Any]
) -> Any:
    model = build_empty(make, checkpoint)
    names = name_map(model, checkpoint.names())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    signs = split(model)
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
    getattr(model, "tie_weights", lambda: None)()
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
