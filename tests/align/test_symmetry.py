"""A permuted model computes the same function: for every family, over its full symmetry."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.align.models import MAKERS, make
from tests.align.symmetry import random_alignment, same_function_error


def in_float32(inputs):
    if isinstance(inputs, dict):
        return {name: in_float32(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(in_float32(value) for value in inputs)
    return inputs.float() if inputs.is_floating_point() else inputs


@pytest.mark.parametrize("name", MAKERS)
def test_a_random_symmetry_leaves_the_function_unchanged(name):
    model, inputs = make(name)
    alignment = random_alignment(model, seed=1)
    assert alignment.identity_share() < 0.3
    assert same_function_error(model, alignment, inputs) < 1e-10
    assert same_function_error(model.float(), alignment, in_float32(inputs)) < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_every_group_really_moves_weights(name):
    """A group that moved nothing would pass any test of the function."""
    model, _ = make(name)
    weights = dict(model.named_parameters())
    drawn = random_alignment(model, seed=1)
    for group, stack in drawn.groups.items():
        only = {other: torch.arange(s.shape[1]).repeat(s.shape[0], 1) for other, s in drawn.groups.items()}
        moved = dataclasses.replace(drawn, groups={**only, group: stack}).apply(weights)
        if drawn.identity_share(group) < 1:
            assert any(not torch.equal(moved[n], weights[n]) for n in weights), group


def test_rotary_positions_forbid_permuting_inside_query_and_key_heads():
    model, inputs = make("llama")
    alignment = random_alignment(model, seed=1)
    assert not [name for name in alignment.groups if name.endswith(".qk")]
    free = dataclasses.replace(alignment.layout, family=dataclasses.replace(alignment.layout.family, rope=False))
    stacks = free.stacks({name: tuple(p.shape) for name, p in model.named_parameters()})
    groups = {name: torch.rand(stack).argsort(1) for name, stack in stacks.items()}
    broken = dataclasses.replace(alignment, layout=free, groups=groups)
    assert same_function_error(model, broken, inputs) > 1e-4


@pytest.mark.parametrize("name", ["vit", "bert", "t5", "llama", "gpt2", "clip", "open_clip"])
def test_per_junction_residuals_are_another_function_and_say_so(name):
    model, inputs = make(name)
    alignment = random_alignment(model, residual="per-junction", seed=1)
    assert not alignment.keeps_function
    assert "different function" in alignment.report()
    assert same_function_error(model, alignment, inputs) > 1e-4
    assert len([group for group in alignment.groups if "residual@" in group]) >= 5


def test_hidden_states_of_a_model_without_a_head_come_out_permuted():
    model, inputs = make("bert_backbone")
    alignment = random_alignment(model, seed=1)
    plain = same_function_error(model, alignment, None, forward=lambda m: (m(**inputs).last_hidden_state,))
    assert plain > 0.01
    assert same_function_error(model, alignment, inputs) < 1e-10


def test_the_check_leaves_the_model_as_it_was():
    model, inputs = make("vit")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    same_function_error(model, random_alignment(model), inputs)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
