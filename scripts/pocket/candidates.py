"""Corruptions that stood for election as tasks of the embedded models and were not chosen.

The chosen ones are in `gradfix.pocket.corruptions`; importing this module adds the others to the registry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradfix.pocket.corruptions import CORRUPTIONS, SIDE, Pixels, lower_resolution, painted


@CORRUPTIONS.register("low_resolution_4")
def low_resolution_4(images: Pixels) -> Pixels:
    """Seven cells a side, each the mean of its pixels."""
    return lower_resolution(images, 4)


@CORRUPTIONS.register("centre_cut")
def centre_cut(images: Pixels) -> Pixels:
    """The central 16 x 16 pixels are black."""
    return painted(images, np.s_[:, 6:22, 6:22], 0)


@CORRUPTIONS.register("stripes_rows")
def stripes_rows(images: Pixels) -> Pixels:
    """One row in four is white."""
    return painted(images, np.s_[:, 1::4], 255)


@CORRUPTIONS.register("stripes_columns")
def stripes_columns(images: Pixels) -> Pixels:
    """One column in seven is white."""
    return painted(images, np.s_[:, :, 3::7], 255)


@CORRUPTIONS.register("stripes_diagonal")
def stripes_diagonal(images: Pixels) -> Pixels:
    """Two diagonals in eight are black, one beside them white."""
    striped = images.copy()
    phase = np.add.outer(np.arange(SIDE), np.arange(SIDE)) % 8
    striped[:, phase < 2] = 0
    striped[:, phase == 2] = 255
    return striped


@CORRUPTIONS.register("grey_ground")
def grey_ground(images: Pixels) -> Pixels:
    """A quarter of the contrast, on grey instead of black."""
    return images // 4 + np.uint8(96)


@CORRUPTIONS.register("half_contrast")
def half_contrast(images: Pixels) -> Pixels:
    """Half the contrast, on dark grey instead of black."""
    return images // 2 + np.uint8(64)


@CORRUPTIONS.register("dark")
def dark(images: Pixels) -> Pixels:
    """An eighth of the brightness."""
    return images // 8


@CORRUPTIONS.register("inverted")
def inverted(images: Pixels) -> Pixels:
    return np.uint8(255) - images


@CORRUPTIONS.register("solarised")
def solarised(images: Pixels) -> Pixels:
    """Everything brighter than mid-grey is inverted."""
    return np.where(images < 128, images, 255 - images).astype(np.uint8)


@CORRUPTIONS.register("checkered")
def checkered(images: Pixels) -> Pixels:
    """Every other 14 x 14 quadrant is inverted."""
    quadrant = np.add.outer(np.arange(SIDE) // 14, np.arange(SIDE) // 14) % 2
    return np.where(quadrant == 1, 255 - images, images).astype(np.uint8)


@CORRUPTIONS.register("upside_down")
def upside_down(images: Pixels) -> Pixels:
    return np.ascontiguousarray(images[:, ::-1])


@CORRUPTIONS.register("quarter_turn")
def quarter_turn(images: Pixels) -> Pixels:
    return np.ascontiguousarray(np.rot90(images, axes=(1, 2)))


@CORRUPTIONS.register("wrapped")
def wrapped(images: Pixels) -> Pixels:
    """Moved half a width sideways; what leaves on the right comes back on the left."""
    return np.roll(images, SIDE // 2, axis=2)


@CORRUPTIONS.register("wrapped_rows")
def wrapped_rows(images: Pixels) -> Pixels:
    """Moved ten rows down; what leaves at the bottom comes back at the top."""
    return np.roll(images, 10, axis=1)


@CORRUPTIONS.register("quadrants")
def quadrants(images: Pixels) -> Pixels:
    """The four quadrants change places along the diagonals."""
    return np.roll(images, (SIDE // 2, SIDE // 2), axis=(1, 2))


@CORRUPTIONS.register("small_corner")
def small_corner(images: Pixels) -> Pixels:
    """Half the size, in the lower right corner."""
    halved = images.astype(np.int64).reshape(-1, 14, 2, 14, 2).sum(axis=(2, 4)) // 4
    small = np.zeros_like(images)
    small[:, 14:, 14:] = halved
    return small


@CORRUPTIONS.register("blurred")
def blurred(images: Pixels) -> Pixels:
    """The mean over 9 x 9 neighbours, black beyond the border."""
    padded = np.pad(images.astype(np.int64), ((0, 0), (5, 4), (5, 4)))
    sums = padded.cumsum(axis=1).cumsum(axis=2)
    box = sums[:, 9:, 9:] - sums[:, :-9, 9:] - sums[:, 9:, :-9] + sums[:, :-9, :-9]
    return (box // 81).astype(np.uint8)


@CORRUPTIONS.register("outlines")
def outlines(images: Pixels) -> Pixels:
    """Only the edges: the difference to the right and lower neighbour."""
    wide = images.astype(np.int64)
    across = np.abs(np.diff(wide, axis=2, append=0))
    down = np.abs(np.diff(wide, axis=1, append=0))
    return np.minimum(across + down, 255).astype(np.uint8)


@CORRUPTIONS.register("speckled")
def speckled(images: Pixels) -> Pixels:
    """Half of the pixels, drawn from the image's own content, are black or white."""
    return _speckled(images, 128)


@CORRUPTIONS.register("lightly_speckled")
def lightly_speckled(images: Pixels) -> Pixels:
    """A quarter of the pixels, drawn from the image's own content, are black or white."""
    return _speckled(images, 64)


@CORRUPTIONS.register("noisy")
def noisy(images: Pixels) -> Pixels:
    """The image at half strength under uniform noise drawn from its own content."""
    return (images // 2 + _content_noise(images) // 2).astype(np.uint8)


def _speckled(images: Pixels, of_256: int) -> Pixels:
    draw = _content_noise(images)
    flipped = np.where(draw < of_256 // 2, 0, 255)
    return np.where(draw < of_256, flipped, images).astype(np.uint8)


def _content_noise(images: Pixels) -> NDArray[np.int64]:
    """One integer below 256 per pixel, a hash of the image and the place."""
    weights = np.arange(1, SIDE * SIDE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    seeds = (images.reshape(len(images), -1).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    mixed = seeds[:, None] + weights
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    draws = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(56)).astype(np.int64)
    return draws.reshape(images.shape)
