"""Rows of activations of two models, side by side: what one model saw where the other saw the same.

With the same tokens or patches rows pair by position. Other tokenizers and patch sizes cut a sample into other
pieces; then both sides are averaged over the same stretches of the text, or the same cells of the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Batch = Mapping[str, Tensor]
TOGETHER = 2**26  # entries of matrices that are decomposed at once


class SideBySide:
    """The same samples as two models read them: which rows answer to which is found once for all that is captured."""

    def __init__(self, batches: tuple[Batch, Batch]) -> None:
        self.batches = batches

    def __call__(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Two captured tensors (samples, ..., units) as matrices with equal numbers of rows."""
        pair = ours, theirs
        if ours.dim() == theirs.dim() == 2:
            return pair
        masks = [_mask(tensor, batch) for tensor, batch in zip(pair, self.batches, strict=True)]
        if ours.shape[:-1] == theirs.shape[:-1] and self._alike:
            if masks[0] is None:
                return ours.flatten(0, -2), theirs.flatten(0, -2)
            return ours.flatten(0, -2)[self._seen.to(ours.device)], theirs.flatten(0, -2)[self._seen.to(theirs.device)]
        cells = [tensor.flatten(0, -3) for tensor in pair]
        if masks[0] is None and masks[1] is None and "pixel_values" in self.batches[0]:
            sides = [_patches_in_a_row(tensor, batch) for tensor, batch in zip(cells, self.batches, strict=True)]
            first, second = (_grid(tensor, side, min(sides)) for tensor, side in zip(cells, sides, strict=True))
        else:
            size = min(tensor.shape[1] for tensor in cells)
            first, second = (_stretches(tensor, mask, size) for tensor, mask in zip(cells, masks, strict=True))
        return first.flatten(0, 1), second.flatten(0, 1)

    @cached_property
    def _alike(self) -> bool:
        return _same_pieces(*self.batches)

    @cached_property
    def _seen(self) -> Tensor:
        """The rows that are no padding; to find them the host waits for the device."""
        return self.batches[0]["attention_mask"].flatten().nonzero().flatten()


def _same_pieces(first: Batch, second: Batch) -> bool:
    """Whether both models read the same tokens, or images of one size."""
    if "input_ids" in first and "input_ids" in second:
        ours, theirs = first["input_ids"], second["input_ids"]
        return ours.shape == theirs.shape and torch.equal(ours.cpu(), theirs.cpu())
    return ("input_ids" in first) == ("input_ids" in second)


def _mask(captured: Tensor, batch: Batch) -> Tensor | None:
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    mask = mask.flatten(0, -2).bool()
    return mask if tuple(mask.shape) == tuple(captured.flatten(0, -3).shape[:2]) else None


def _stretches(tensor: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """Averages over `count` equal stretches of every sample; a token that lies in two counts in both, by its share."""
    length = (
        torch.full((len(tensor),), tensor.shape[1], device=tensor.device)
        if mask is None
        else mask.sum(1).to(tensor.device)
    )
    place = torch.arange(tensor.shape[1], device=tensor.device)
    edge = torch.arange(count + 1, device=tensor.device).to(tensor.dtype) / count * length[:, None]
    low, high = edge[:, :-1, None], edge[:, 1:, None]
    share = (torch.minimum(high, place + 1.0) - torch.maximum(low, place.to(tensor.dtype))).clamp(min=0)
    return share / share.sum(-1, keepdim=True).clamp(min=1e-9) @ tensor


def _patches_in_a_row(tensor: Tensor, batch: Batch) -> int:
    """The largest grid that the tokens can hold and that divides the picture; the others come before it.

    A class token and four registers beside four patches are nine tokens, and no three by three patches."""
    pixels = batch["pixel_values"]
    most = math.isqrt(tensor.shape[1])
    if pixels.dim() != 4:
        return most
    return next(side for side in range(most, 0, -1) if pixels.shape[-1] % side == 0)


def _grid(tensor: Tensor, side: int, size: int) -> Tensor:
    """The class token (zeros without one) and the patches averaged to a grid of `size` by `size` cells."""
    extra = tensor.shape[1] - side * side
    patches = tensor[:, extra:].transpose(1, 2).unflatten(2, (side, side))
    cells = functional.adaptive_avg_pool2d(patches, size).flatten(2).transpose(1, 2)
    first = tensor[:, :1] if extra else torch.zeros_like(tensor[:, :1])
    return torch.cat([first, cells], 1)


def polars(crosses: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """The polar factor of every matrix: on a card those of one shape together, because launching them takes longest."""
    shapes: dict[Any, list[Any]] = {}
    for place, cross in crosses.items():
        alone = place if cross.device.type == "cpu" else None
        shapes.setdefault((cross.shape, cross.dtype, cross.device, alone), []).append(place)
    found: dict[Any, Tensor] = {}
    for places in shapes.values():
        size = max(1, TOGETHER // crosses[places[0]].numel())
        for first in range(0, len(places), size):
            some = places[first : first + size]
            found |= dict(zip(some, polar(torch.stack([crosses[place] for place in some])), strict=True))
    return found


def polar(cross: Tensor) -> Tensor:
    """U V^T of the singular value decomposition: by matrix products alone, where these are faster than the decomposition.

    Directions that are not told from rounding (a millionth of the strongest one in float32) have no evidence behind
    them and fade out instead of being turned at random."""
    tall = cross.shape[-2] >= cross.shape[-1]
    x = cross if tall else cross.mT
    x = _by_decomposition(x) if x.device.type == "cpu" else _by_products(x)
    return x if tall else x.mT


def _by_products(x: Tensor) -> Tensor:
    return _risen(x / _room_above(_no_smaller_than_the_largest(x)))


def _by_decomposition(x: Tensor) -> Tensor:
    """What the products make of the singular values, one by one."""
    try:
        left, sizes, right = torch.linalg.svd(x, full_matrices=False)
    except RuntimeError:  # it did not converge, or there was nothing finite to decompose
        return _by_products(x)
    sizes = sizes / sizes[..., :1].clamp(min=torch.finfo(sizes.dtype).tiny)
    sizes = sizes / _room_above(torch.linalg.vector_norm(sizes, 16, dim=-1, keepdim=True))
    return (left * _risen(sizes[..., None, None])[..., 0, 0].unsqueeze(-2)) @ right


def _room_above(largest: Tensor) -> Tensor:
    return (1.01 * largest).clamp(min=torch.finfo(largest.dtype).tiny)


def _risen(x: Tensor) -> Tensor:
    """Singular values between 0 and 1 become 1; those that are nothing but rounding stay small."""
    sweeps, polish = (17, 8) if x.dtype == torch.float64 else (10, 6)
    for _ in range(sweeps):
        gram = x.mT @ x
        x = 3.4445 * x + x @ (2.0315 * gram @ gram - 4.7750 * gram)
    for _ in range(polish):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


def _no_smaller_than_the_largest(x: Tensor) -> Tensor:
    """The 16th root of the sum of 16th powers of the singular values: never below the largest, rarely far above.

    A power iteration falls short where its first vector misses the strongest direction (the gradients in front of a
    layer norm are orthogonal to a vector of ones), and then the iteration of `polar` runs away."""
    tiny = torch.finfo(x.dtype).tiny

    def norm(matrix: Tensor) -> Tensor:
        return torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)

    gram = x.mT @ (x / norm(x).clamp(min=tiny))
    sizes = []
    for _ in range(2):
        sizes.append(norm(gram).clamp(min=tiny))
        gram = gram / sizes[-1]
        gram = gram @ gram
    root = norm(gram)
    for size in reversed(sizes):
        root = size * root.sqrt()
    return (root * norm(x)).sqrt()
