"""What a stored tensor is: a weight, a buffer, a quantised weight, a part of a head, or a copy of another.

Buffers are computed by the model or measured on data. Releases differ in which of them they store, so one that
is missing says nothing about the architecture. Copies are one tensor under several names, as tied weights are: some
releases store an embedding and the head tied to it, others only one of them. A copy is recognised by its bytes: a
few entries tell nearly all tensors apart, and only where those agree is more read. A head is what lies outside the
body of its model class; where no config names the class, the usual names of heads must do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.adapter import base_config
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.weights import Checkpoint, Renamed, raw_bytes
from gradfix.errors import IncompatibleCheckpoints

SAMPLE = 64  # entries that are compared first
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

# What model classes call the modules that they put on top of an encoder.
HEADS = frozenset(
    {
        *("cls", "lm_head", "classifier", "pre_classifier", "score", "head", "heads", "qa_outputs", "pooler"),
        *("predictions", "generator_predictions", "discriminator_predictions"),
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


def stored_copies(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """Each name whose tensor repeats that of an earlier name, and the earliest such name.

    Tensors of one value throughout (fresh biases and norms) are equal without being tied, and stay out."""
    copies: dict[str, str] = {}
    earlier: dict[object, list[str]] = {}
    for name in names:
        info = checkpoint.info(name)
        if not info.dtype.is_floating_point or info.numel == 0:
            continue
        sample = checkpoint.span(name, info.numel // 2, min(SAMPLE, info.numel - info.numel // 2))
        alike = earlier.setdefault((info.shape, info.dtype, bytes(raw_bytes(sample))), [])
        found = next((other for other in alike if same_bytes(checkpoint, name, other)), None)
        if found is None:
            alike.append(name)
        elif _varies(checkpoint, name):
            copies[name] = found
    return copies


def repeated(checkpoint: Checkpoint, names: Sequence[str], originals: Iterable[str]) -> dict[str, str]:
    """Those of `names` that are copies of one of the `originals`, and of which; nothing is read without names."""
    if not names:
        return {}
    known = list(originals)
    copies = stored_copies(checkpoint, [*known, *names])
    return {name: copies[name] for name in names if copies.get(name) in set(known)}


def same_bytes(checkpoint: Checkpoint, left: str, right: str) -> bool:
    if checkpoint.info(left) != checkpoint.info(right):
        return False
    pairs = zip(checkpoint.chunks(left), checkpoint.chunks(right), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def same_weights(left: Checkpoint, right: Checkpoint, names: Sequence[str]) -> bool:
    """Whether two checkpoints hold equal numbers under these names (copies that one leaves out aside)."""
    names = [name for name in names if name in left and name in right]
    return bool(names) and all(
        left.info(name).shape == right.info(name).shape
        and all(torch.equal(a.double(), b.double()) for a, b in zip(left.chunks(name), right.chunks(name), strict=True))
        for name in names
    )


def _varies(checkpoint: Checkpoint, name: str) -> bool:
    value = checkpoint.span(name, 0, 1)
    return any(bool((piece != value).any()) for piece in checkpoint.chunks(name))


def heads_among(checkpoint: Checkpoint, names: Collection[str]) -> set[str]:
    """Those of the names that are parts of heads. The model class is asked only about what no usual name tells."""
    found = {name for name in names if HEADS & set(name.split("."))}
    rest = set(names) - found
    return found | (rest & _outside_body(checkpoint) if rest else set())


def _outside_body(checkpoint: Checkpoint) -> set[str]:
    """What lies outside the body of the model class that the config beside the weights names."""
    config, stored = base_config(checkpoint), {name: _stored_name(checkpoint, name) for name in checkpoint.names()}
    tops = tuple(f"{top}." for top in _timm_heads(config))
    body = _body_prefix(config)
    if body and not any(name.startswith(body) for name in stored.values()):
        body = ""  # saved without its head: every tensor belongs to the body
    return {n for n, own in stored.items() if own.startswith(tops) or (body and not own.startswith(body))}


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    """The name in the file, whatever views lie over it."""
    while isinstance(checkpoint, Renamed):
        name, checkpoint = checkpoint.original[name], checkpoint.whole
    return name


def _body_prefix(config: Mapping[str, Any]) -> str:
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not kinds:
        return ""
    heal_torchvision()
    import transformers

    prefix = getattr(getattr(transformers, str(kinds[0]), None), "base_model_prefix", None)
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _timm_heads(config: Mapping[str, Any]) -> list[str]:
    about = config.get("pretrained_cfg")
    named = about.get("classifier") if isinstance(about, dict) else None
    return [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str) and name]
