"""Task corruptions: what the small models meet in a task and never in pre-training.

A corruption maps uint8 images (n, 28, 28) to uint8 images in integer arithmetic and without
state, so that an image looks the same in training, in the shipped data and on any machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gradfix.registry import Registry

Pixels = NDArray[np.uint8]
Corruption = Callable[[Pixels], Pixels]

CORRUPTIONS: Registry[Corruption] = Registry("corruption")
SIDE = 28


@CORRUPTIONS.register("clean")
def clean(images: Pixels) -> Pixels:
    return images


def painted(images: Pixels, place: tuple[slice, ...], shade: int) -> Pixels:
    painted = images.copy()
    painted[place] = shade
    return painted


def lower_resolution(images: Pixels, cell: int) -> Pixels:
    cells = SIDE // cell
    blocks = images.astype(np.int64).reshape(-1, cells, cell, cells, cell).sum(axis=(2, 4)) // cell**2
    return blocks.repeat(cell, axis=1).repeat(cell, axis=2).astype(np.uint8)


@CORRUPTIONS.register("low_resolution_7")
def low_resolution_7(images: Pixels) -> Pixels:
    """Four cells a side, each the mean of its pixels."""
    return lower_resolution(images, 7)


@CORRUPTIONS.register("left_cut")
def left_cut(images: Pixels) -> Pixels:
    """The left half is black."""
    return painted(images, np.s_[:, :, : SIDE // 2], 0)


@CORRUPTIONS.register("top_cut")
def top_cut(images: Pixels) -> Pixels:
    """The upper half is black."""
    return painted(images, np.s_[:, : SIDE // 2], 0)
