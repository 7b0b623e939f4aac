"""Stored copies: one tensor that a checkpoint holds under several names, as tied weights are.

Some releases store an embedding and the head tied to it, others only one of them. A copy is recognised by its
bytes: a few entries tell nearly all tensors apart, and only where those agree is more read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradfix.checkpoints.open import Checkpoint, raw_bytes

SAMPLE = 64


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


def _varies(checkpoint: Checkpoint, name: str) -> bool:
    value = checkpoint.span(name, 0, 1)
    return any(bool((piece != value).any()) for piece in checkpoint.chunks(name))
