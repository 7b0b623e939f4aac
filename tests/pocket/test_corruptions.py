"""Corruptions are functions of one image: deterministic, shape-keeping, independent of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import scripts.pocket.candidates  # noqa: F401  the corruptions that were not chosen
from hypothesis import given, settings, strategies as st
from scripts.pocket.writing import quantise

from gradfix.pocket import shipped
from gradfix.pocket.corruptions import CORRUPTIONS
from gradfix.pocket.shipped import restore


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_every_corruption_keeps_its_contract(name):
    images, _ = shipped.read_images("validation")
    images = images[::25]
    before = images.copy()
    result = CORRUPTIONS[name](images)
    assert result.dtype == np.uint8 and result.shape == images.shape
    assert (images == before).all()
    assert all((CORRUPTIONS[name](image[None])[0] == row).all() for image, row in zip(images, result))
    assert name == "clean" or (result != images).any()


@given(seed=st.integers(0, 2**32 - 1), levels=st.floats(2, 10))
@settings(max_examples=25, deadline=None)
def test_restored_differences_are_within_half_a_step(seed, levels):
    generator = np.random.default_rng(seed)
    base = {"b": generator.normal(size=(3, 5)).astype(np.float32), "a": np.zeros(4, np.float32)}
    tuned = {"b": base["b"] + generator.normal(size=(3, 5)).astype(np.float32) / 100, "a": base["a"]}
    coded = quantise(base, tuned, levels)
    assert coded[0].dtype == np.int8
    restored = restore(base, coded)
    assert np.abs(restored["b"] - tuned["b"]).max() <= coded[1][1] * 0.5001 + 1e-6
    assert (restored["a"] == base["a"]).all()
