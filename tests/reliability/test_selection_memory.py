"""Choosing examples takes the memory its documentation says."""

from __future__ import annotations

import tracemalloc

import kmedoids  # noqa: F401  imported before memory is counted
import numpy as np

from gradfix.vectors.selection import select


def test_medoids_hold_one_float32_matrix() -> None:
    count = 3000
    features = np.random.default_rng(0).normal(size=(count, 4))
    tracemalloc.start()
    try:
        select(features, [0] * count, 2, "k-medoids")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    block = 3 * 1024 * count * 8  # the float64 rows on their way into it
    assert peak < 4 * count**2 + block + 2**22
