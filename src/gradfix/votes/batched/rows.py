"""Which rows of an activation belong to which sample.

Model code is free to flatten (samples x tokens), to put tokens first, or to split images into windows, and
shapes alone do not tell which. So the engine asks autograd once: with only one sample's loss switched on, the
output gradient of a layer is non-zero in that sample's rows alone. A layout that explains what was seen is kept;
where none does, the samples are mixed and the layer cannot vote in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Samples lie along `dim`; `rows` consecutive (or, `interleaved`, strided) entries belong to each."""

    dim: int
    rows: int
    interleaved: bool = False

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        return self.dim < len(shape) and shape[self.dim] == samples * self.rows

    def split(self, tensor: Tensor, samples: int) -> Tensor:
        """The same entries with the samples first: (samples, ..., rows, ...)."""
        if self.rows == 1:
            return tensor.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        if self.interleaved:
            return tensor.unflatten(self.dim, (self.rows, samples)).movedim(self.dim + 1, 0)
        return tensor.unflatten(self.dim, (samples, self.rows)).movedim(self.dim, 0)

    def take(self, tensor: Tensor, sample: int) -> Tensor:
        """One sample's entries, the dimension kept."""
        if self.interleaved:
            return tensor.unflatten(self.dim, (self.rows, -1)).select(self.dim + 1, sample)
        return tensor.narrow(self.dim, sample * self.rows, self.rows)


def candidates(shape: Sequence[int], samples: int) -> list[Layout]:
    """Every layout the shape allows, the most usual first."""
    exact = [Layout(dim, 1) for dim, size in enumerate(shape) if size == samples]
    flat = [
        (dim, size // samples) for dim, size in enumerate(shape) if size > samples and size % samples == 0
    ]
    return exact + [Layout(dim, rows, mixed) for dim, rows in flat for mixed in (False, True)]


def explain(
    layouts: Sequence[Layout], samples: int, seen: Sequence[tuple[Sequence[int], Tensor]]
) -> Layout | None:
    """The first layout under which the gradient of each probed group of samples stays within their rows.

    `seen` pairs a group with the mask of non-zero output gradients under the losses of that group alone. Where
    nothing was seen, only the usual layout is believed."""
    if not any(bool(mask.any()) for _, mask in seen):
        return next((layout for layout in layouts if layout == Layout(0, 1)), None)
    for layout in layouts:
        if all(_inside(layout, mask, group, samples) for group, mask in seen):
            return layout
    return None


def _inside(layout: Layout, mask: Tensor, group: Sequence[int], samples: int) -> bool:
    by_sample = layout.split(mask, samples).flatten(1).any(1)
    by_sample[list(group)] = False
    return not bool(by_sample.any())


def probes(samples: int) -> list[list[int]]:
    """Samples to switch on, one at a time; never only the first, whose number a pooled first token shares."""
    return [[1], [0]] if samples == 2 else [[1], [samples - 1]]


def proofs(samples: int) -> list[list[int]]:
    """Groups of samples to switch on such that any two samples are told apart: by the digits of their numbers."""
    digits = range(max(1, (samples - 1).bit_length()))
    halves = [[n for n in range(samples) if n >> digit & 1 == side] for digit in digits for side in (1, 0)]
    return [half for half in halves if half]


def support(gradient: Tensor, samples: int) -> Tensor:
    """Where a gradient is not zero; dimensions that cannot hold the samples are reduced to one entry."""
    mask = (gradient != 0) | torch.isnan(gradient)
    others = tuple(dim for dim, size in enumerate(mask.shape) if size % samples)
    return mask.any(others, keepdim=True) if others else mask
