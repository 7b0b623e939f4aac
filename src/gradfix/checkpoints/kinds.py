"""What a stored tensor is, by its name, dtype and shape: a weight, a buffer, or a quantised weight.

Buffers are computed by the model or measured on data. Releases differ in which of them they store, so one that
is missing says nothing about the architecture."""

from __future__ import annotations

from collections.abc import Iterable

from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.errors import IncompatibleCheckpoints

# Buffers of batch norm: floating tensors on disk, but measured on data, never learned by gradients.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# The last part of the names of tensors that model classes compute for themselves.
COMPUTED = frozenset(
    {
        *("position_ids", "token_type_ids", "relative_position_index", "relative_coords_table"),
        *("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"),
        *("masked_bias", "attn_mask", "causal_mask", "_float_tensor"),
    }
)


def is_buffer(name: str, info: TensorInfo) -> bool:
    """Is this no weight? Integers count where they are too small to be packed weights."""
    last = name.rpartition(".")[2]
    causal_mask = last == "bias" and len(info.shape) == 4 and info.shape[:2] == (1, 1)  # GPT-2's attn.bias
    small = not info.dtype.is_floating_point and len(info.shape) < 2
    return last in COMPUTED or causal_mask or small


def refuse_quantised(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """One-byte floats are quantised whatever they are called, integers where they are called a weight."""
    for name in checkpoint.names() if names is None else names:
        refuse_narrow(checkpoint, name, checkpoint.info(name))


def refuse_narrow(checkpoint: Checkpoint, name: str, info: TensorInfo) -> None:
    integer_weight = not info.dtype.is_floating_point and len(info.shape) >= 2 and name.endswith("weight")
    if integer_weight or (info.dtype.is_floating_point and info.dtype.itemsize == 1):
        raise quantised(checkpoint, name, info)


def quantised(checkpoint: Checkpoint, name: str, info: TensorInfo) -> IncompatibleCheckpoints:
    return IncompatibleCheckpoints(
        f"tensor {name!r} of {checkpoint} is {info.dtype}: quantised weights cannot be transported. "
        "Use the unquantised release."
    )
