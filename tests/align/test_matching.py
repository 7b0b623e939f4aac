"""The fast path against plain loops, and the promises of the search."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradfix.align.layout import config_of, layout_of
from gradfix.align.matching import Matching, best_pairing, pair_heads, spectra
from gradfix.align.spec import AxisPart
from gradfix.checkpoints.open import open_checkpoint
from tests.align.models import MAKERS, make
from tests.align.symmetry import random_alignment


def matching_of(name, whole_numbers=False):
    models = [make(name, seed).model for seed in (0, 1)]
    checkpoint = open_checkpoint(models[0])
    layout = layout_of(checkpoint, config=config_of(checkpoint))
    sides = [{n: p.detach() for n, p in model.named_parameters()} for model in models]
    if whole_numbers:
        sides = [{n: (50 * t).round().clamp(-9, 9) for n, t in side.items()} for side in sides]
    return Matching(layout, *sides)


def overlap_after(matching, group, copy, row, column):
    """Overlap of B's unit `row` with A's unit `column`, from whole permuted tensors and a mask."""
    copies, size = matching.stacks[group]
    shift = torch.arange(size).repeat(copies, 1)
    shift[copy] = (shift[copy] + column - row) % size
    total = 0.0
    for block in matching.blocks:
        for axis, part in enumerate(block.parts):
            if part.inner != group:
                continue
            moved = block.cut(matching.base)
            for other, there in enumerate(block.parts):
                groups = matching.groups if other != axis else {**matching.groups, group: shift}
                moved = moved.index_select(other, there.index(groups))
            groups, queries, inner = part.size
            keep = torch.zeros(groups, queries, inner, dtype=torch.bool)
            keep[copy, :, row] = True
            rows = keep.reshape(-1).nonzero()[:, 0]
            both = (block.cut(matching.target) * moved).index_select(axis, rows)
            total += both.sum().item()
    return total


@pytest.mark.parametrize("name", ["vit", "open_clip", "bert_vocabulary", "t5_gated", "llama", "gpt2"])
def test_gain_equals_the_plain_definition(name):
    """Whole numbers in float64: every sum is exact, so the two must be equal to the last bit."""
    matching = matching_of(name, whole_numbers=True)
    names = list(matching.stacks)
    drawn = {g: torch.rand(matching.stacks[g], generator=torch.Generator().manual_seed(i)).argsort(1)
             for i, g in enumerate(names)}  # fmt: skip
    matching.groups = drawn
    for group in matching.inner:
        gain = matching.gain(group)
        copies, size = matching.stacks[group]
        for copy, row, column in {(0, 0, 0), (copies - 1, 1, size - 1), (copies // 2, size // 2, 1)}:
            assert gain[copy, row, column].item() == overlap_after(matching, group, copy, row, column)


@given(size=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)), seed=st.integers(0, 1000))
def test_part_index_equals_nested_loops(size, seed):
    copies, queries, inner = size
    generator = torch.Generator().manual_seed(seed)
    groups = {
        "o": torch.rand(1, copies, generator=generator).argsort(1),
        "q": torch.rand(copies, queries, generator=generator).argsort(1),
        "i": torch.rand(copies, inner, generator=generator).argsort(1),
    }
    index = AxisPart(size, "o", "q", "i").index(groups)
    position = 0
    for g in range(copies):
        for r in range(queries):
            for j in range(inner):
                head = int(groups["o"][0, g]) * queries + int(groups["q"][g, r])
                assert index[position] == head * inner + int(groups["i"][g, j])
                position += 1
    assert sorted(index.tolist()) == list(range(copies * queries * inner))


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_best_pairing_beats_every_permutation(seed):
    gain = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    value = gain[torch.arange(5), best_pairing(gain)].sum()
    assert value >= max(gain[torch.arange(5), list(order)].sum() for order in permutations(range(5))) - 1e-12


@pytest.mark.parametrize("name", ["vit", "open_clip", "t5", "llama", "gpt2"])
def test_spectra_are_singular_values_and_ignore_permutations(name):
    matching = matching_of(name)
    model, _ = make(name)
    shuffled = random_alignment(model, keep_heads=True, seed=3).apply(matching.base)
    seen = 0
    for block in matching.blocks:
        for axis, part in enumerate(block.parts):
            if not part.order or len(block.parts) < 2 or part.size[2] == 1:
                continue
            fast = spectra(block, axis, matching.base)
            heads = block.cut(matching.base).movedim(axis, 0).reshape(*part.size, -1)
            slow = torch.linalg.svdvals(heads).flip(-1)
            assert torch.allclose(fast, slow, rtol=1e-8, atol=1e-9)
            assert torch.allclose(fast, spectra(block, axis, shuffled), rtol=1e-8, atol=1e-9)
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize("name", ["vit", "bert", "bert_vocabulary", "t5", "llama", "clip", "gpt2"])
def test_the_overlap_never_falls_and_the_end_is_an_optimum(name):
    """bert_vocabulary has a tensor with the residual order on both axes, where S alone would mislead."""
    matching = matching_of(name)
    pair_heads(matching)
    before = matching.overlap()
    for group in matching.inner:
        moved = matching.improve(group)
        after = matching.overlap()
        assert after > before if moved else after == before
        before = after
    matching.stale = set(matching.inner)
    assert matching.sweep(seed=0) < 100
    assert matching.overlap() >= before
    assert not any(matching.improve(group) for group in matching.inner)


@pytest.mark.parametrize("name", ["vit", "t5", "llama"])
def test_a_sweep_skips_only_what_cannot_improve(name):
    """After a start, groups that heard every tensor are not visited again: nothing may be lost by that."""
    matching = matching_of(name)
    matching.start()
    matching.sweep(seed=0)
    assert not any(matching.improve(group) for group in matching.inner)


@given(seed=st.integers(0, 50), name=st.sampled_from(sorted(MAKERS)))
@settings(max_examples=15, deadline=None)
def test_an_alignment_is_a_linear_rearrangement(seed, name):
    model, _ = make(name)
    alignment = random_alignment(model, seed=seed)
    one = {n: p.detach() for n, p in model.named_parameters()}
    two = {n: torch.randn_like(t) for n, t in one.items()}
    both = alignment.apply({n: one[n] + 2 * two[n] for n in one})
    moved_one, moved_two = alignment.apply(one), alignment.apply(two)
    for n, tensor in one.items():
        assert torch.equal(both[n], moved_one[n] + 2 * moved_two[n])
        assert torch.equal(moved_one[n].flatten().sort().values, tensor.flatten().sort().values)
