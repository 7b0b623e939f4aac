"""Votes of a model that no device holds: FSDP2 with a reduce-scatter that carries signs instead of gradients.

Every process asks one sample per step; the backward pass leaves each with its own slice of the summed signs,
one byte per weight on the wire. FSDP has several ways to deliver a gradient in pieces, late or not at all,
and all of them would give wrong votes in silence: so every fold is counted, and anything but exactly one per
weight and step is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.system.modules import left_as_it_was
from gradfix.system.processes import Group, together
from gradfix.vectors.signvotes import Tally
from gradfix.votes.collect import BAD_SAMPLE_SHARE, voting_parameters
from gradfix.votes.distributed.parallel import Batches
from gradfix.votes.distributed.slots import Slots
from gradfix.votes.engines.loop import Batch, Loss, take
from gradfix.votes.resume import resumable, weights_key

MOST_IN_INT8 = 127
IN_PIECES = "its gradient came in pieces: a layer that is used more than once, or reentrant checkpointing."


class SignReduceScatter(ReduceScatter):
    """Sum the signs of all processes' gradients; `voice` 0 takes part without voting."""

    def __init__(self) -> None:
        self.voice = 1

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
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
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    recompute: bool = False,
) -> SignReduceScatter:
    """Split the model over the mesh, block by block; works on a model without weights (meta device).

    `compute` is the dtype of the passes where it is not the weights' own; `recompute` keeps no activations
    inside the blocks."""
    refuse_untied(model)
    signs = SignReduceScatter()
    # bf16 counts to 256 only, and the sums travel in the dtype of the reduction
    reduce = torch.float32 if mesh.size() > MOST_IN_INT8 else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    if recompute:
        _recompute(model)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(signs)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
    return signs


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


@dataclass
class ShardedVotes:
    """This process's slices of the votes, under module names."""

    tally: Tally
    count: int
    notes: list[str] = field(default_factory=list)


def collect_sharded(
    group: Group,
    model: nn.Module,
    signs: SignReduceScatter,
    loss: Loss,
    batches: Batches,
    *,
    shelf: Slots | None = None,
    identity: str = "",
    progress: Callable[[int], None] | None = None,
) -> ShardedVotes:
    """One sample per process and step; every process keeps its slice of every tensor's votes.

    With `shelf`, finished steps are saved there and skipped when the same call runs again; `identity` then names
    what the votes depend on besides model and batches."""
    if not len(batches.rows):
        raise DataError("no samples to vote with; check the data and --shots.")
    refuse_untied(model)
    parameters = voting_parameters(model)
    tally = Tally({name: _local(parameter) for name, parameter in parameters.items()})  # type: ignore[misc]
    folds: Counter[str] = Counter()
    handles = [
        parameter.register_post_accumulate_grad_hook(_fold(name, tally, folds))
        for name, parameter in parameters.items()
    ]
    notes: list[str] = []
    steps = _own_samples(group, batches)
    if shelf is not None:
        steps = resumable(shelf, tally, steps, key=_key(group, model, identity), bad=notes)
    try:
        with left_as_it_was(model):
            for first, sample in steps:
                _step(group, model, signs, loss, sample, (first, len(batches.rows)), tally, folds, notes)
                if progress is not None:
                    progress(1)
    finally:
        for handle in handles:
            handle.remove()
    found = sorted(text for some in group.gather(notes) for text in some)
    with together(group):
        if len(found) > BAD_SAMPLE_SHARE * len(batches.rows):
            raise DataError(
                f"{len(found)} of {len(batches.rows)} samples give a loss that is not finite, first {found[0]}."
            )
    silent = group.gather(not any(bool(buffer.any()) for _, buffer in tally.items()))
    with together(group):
        if all(silent):
            raise UnsafeResult("every weight abstained: no gradient reached any parameter.")
    return ShardedVotes(tally, len(batches.rows) - len(found), found)


def _step(
    group: Group,
    model: nn.Module,
    signs: SignReduceScatter,
    loss: Loss,
    sample: Batch,
    place: tuple[int, int],
    tally: Tally,
    folds: Counter[str],
    notes: list[str],
) -> None:
    """All processes fold one sample each; those beyond the last sample take part without voting."""
    first, count = place
    number = first + group.rank
    with torch.enable_grad():
        value = loss(model, sample).sum()
    finite = bool(torch.isfinite(value))
    signs.voice = int(finite and number < count)
    if not finite and number < count:
        notes.append(f"sample {number}: loss is {float(value)}")
    tally.reserve(min(group.size, count - first))
    folds.clear()
    value.backward()
    check_folds(folds, tally)
    check_finished(model)


def _own_samples(group: Group, batches: Batches) -> Iterator[tuple[int, Batch]]:
    """Per step the number of its first sample and the sample of this process."""
    for first in range(0, len(batches.rows), group.size):
        yield first, sample_at(batches, min(first + group.rank, len(batches.rows) - 1))


def _key(group: Group, model: nn.Module, identity: str) -> str:
    """What this process's part of the votes depends on; every process looks at its own slices of the weights."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    kinds = sorted({tensor.device.type for tensor in tensors.values()})
    about = repr(("sharded", identity, group.rank, group.size, kinds))
    return weights_key({name: _local(tensor) for name, tensor in tensors.items()}, about)


def sample_at(batches: Batches, number: int) -> Batch:
    """One sample with the padding of the batch it would be in, as one process sees it."""
    index, row = divmod(number, batches.size)
    return take(batches[index], slice(row, row + 1))


def check_folds(folds: Counter[str], tally: Tally) -> None:
    """Exactly one finished gradient per weight and step; each wrong number has its usual cause."""
    for name in tally.parameters:
        if folds[name] == 1:
            continue
        if not folds:
            cause = "no gradient arrived at all: is gradient synchronisation switched off?"
        elif folds[name] == 0:
            cause = (
                "its gradient never arrived: the layer took no part in the loss, or its sync is switched off."
            )
        else:
            cause = "its gradient came in pieces: a layer that is used more than once, or reentrant checkpointing."
        raise UnsafeResult(f"weight {name!r} was folded {folds[name]} times in one step; {cause}")


def check_finished(model: nn.Module) -> None:
    """After a step nothing may be left over: a part of a gradient that came after its fold is in no vote."""
    for name, parameter in model.named_parameters():
        late = not hasattr(parameter, "to_local") or parameter.grad is not None
        if late:
            raise UnsafeResult(
                f"weight {name!r} got a part of its gradient after it was folded; {IN_PIECES} "
                "Recompute without reentrant checkpointing."
            )
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for group in getattr(state, "_fsdp_param_groups", None) or []:
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)
                if (
                    whole is not None and whole.grad is not None
                ) or held.unsharded_accumulated_grad is not None:
                    raise UnsafeResult(f"a gradient was left behind unfolded in a step; {IN_PIECES}")


def _fold(name: str, tally: Tally, folds: Counter[str]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        buffer = tally[name]
        buffer.sub_(_local(parameter.grad).to(buffer.dtype))
        parameter.grad = None
        folds[name] += 1

    return hook


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
