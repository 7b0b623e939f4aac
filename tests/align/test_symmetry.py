"""A permuted model computes the same function: for every family, over its full symmetry."""

from __future__ import annotations

import pytest
import torch
from align_models import MAKERS, make

from gradfix.align import random_alignment, same_function_error


@pytest.mark.parametrize("name", MAKERS)
def test_a_random_symmetry_leaves_the_function_unchanged(name):
    model, inputs = make(name)
    alignment = random_alignment(model, seed=1)
    assert alignment.identity_share() < 0.3
    assert same_function_error(model, alignment, inputs) < 1e-10
    assert same_function_error(model.float(), alignment, _float(inputs)) < 1e-5


def _float(inputs):
    if isinstance(inputs, dict):
        return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value.float() if value.is_floating_point() else value for value in inputs)
    return inputs.float() if isinstance(inputs, torch.Tensor) else inputs
