"""Masks equal their formulas, and the theorem behind `agree` holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gradfix.errors import UsageError
from gradfix.vectors.masks import MASKS
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import random_like, transport

seeds = st.integers(0, 2**31)


def _draw(seed: int, n: int = 64, count: int = 6) -> tuple[TaskVector, SignVotes]:
    g = torch.Generator().manual_seed(seed)
    tau = TaskVector({"w": torch.randn(n, generator=g).double()})
    votes = (torch.randint(0, 2, (count, n), generator=g) * 2 - 1).sum(0)
    return tau, SignVotes({"w": votes.to(torch.int8)}, count)


@given(seeds)
def test_agree_keeps_exactly_the_agreeing_entries(seed):
    tau, votes = _draw(seed)
    moved = transport(tau, votes, "agree").update["w"]
    for before, vote, after in zip(tau["w"].tolist(), votes["w"].tolist(), moved.tolist()):
        assert after == (before if before * vote > 0 else 0)


@given(seeds)
def test_force_is_magnitude_times_direction(seed):
    tau, votes = _draw(seed)
    moved = transport(tau, votes, "force").update["w"]
    for before, vote, after in zip(tau["w"].tolist(), votes["w"].tolist(), moved.tolist()):
        assert after == abs(before) * ((vote > 0) - (vote < 0))


@given(seeds)
def test_magnitude_is_the_soft_formula_on_the_real_reference(seed):
    tau, _ = _draw(seed)
    reference, _ = _draw(seed + 1)
    moved = transport(tau, reference, "magnitude").update["w"]
    for before, rho, after in zip(tau["w"].tolist(), reference["w"].tolist(), moved.tolist()):
        assert after == pytest.approx(max(0.0, math.tanh(before * rho)) * before, abs=1e-12)


def test_magnitude_refuses_signs():
    tau, votes = _draw(0)
    with pytest.raises(UsageError, match="real-valued reference, not signs"):
        transport(tau, votes, "magnitude")


@given(seeds, st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
def test_veto_drops_only_confident_opposition(seed, margin):
    tau, votes = _draw(seed)
    moved = transport(tau, votes, "veto", margin=margin).update["w"]
    for before, vote, after in zip(tau["w"].tolist(), votes["w"].tolist(), moved.tolist()):
        dropped = before * vote < 0 and abs(vote) > margin * votes.count
        assert after == (0 if dropped else before)


@given(seeds)
def test_veto_with_margin_one_is_plain_addition_and_none_too(seed):
    tau, votes = _draw(seed)
    assert torch.equal(transport(tau, votes, "veto", margin=1).update["w"], tau["w"])
    assert torch.equal(transport(tau, None, "none").update["w"], tau["w"])


@given(seeds)
def test_veto_with_margin_zero_is_agree_with_the_ties_kept(seed):
    tau, votes = _draw(seed)
    veto = transport(tau, votes, "veto", margin=0).update["w"]
    agree = transport(tau, votes, "agree").update["w"]
    ties = votes["w"] == 0
    assert torch.equal(veto[~ties], agree[~ties])
    assert torch.equal(veto[ties], tau["w"][ties])


def test_even_ties_drop_under_agree():
    tau = TaskVector({"w": torch.tensor([1.0, -1.0])})
    moved = transport(tau, SignVotes({"w": torch.tensor([0, 0], dtype=torch.int8)}, 2), "agree")
    assert not moved.update["w"].any()
    assert moved.kept == {"w": 0.0}


@given(seeds)
def test_agreeing_update_never_climbs(seed):
    g = torch.Generator().manual_seed(seed)
    gradient = torch.randn(200, generator=g, dtype=torch.float64)
    tau = torch.randn(200, generator=g, dtype=torch.float64)
    assert float(gradient @ MASKS["agree"](tau, -gradient.sign())) <= 0


def test_random_masks_follow_their_seed_and_keep_about_half():
    tau = TaskVector({"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))})
    one = transport(tau, mask="random", generator=torch.Generator().manual_seed(3))
    same = transport(tau, mask="random", generator=torch.Generator().manual_seed(3))
    other = transport(tau, mask="random", generator=torch.Generator().manual_seed(4))
    assert torch.equal(one.update["w"], same.update["w"])
    assert not torch.equal(one.update["w"], other.update["w"])
    assert 0.49 < one.kept["w"] < 0.51
    forced = transport(tau, mask="random_force", generator=3)
    assert torch.equal(forced.update["w"].abs(), tau["w"].abs())
    with pytest.raises(UsageError, match="randomness as an argument"):
        transport(tau, mask="random")


@pytest.mark.parametrize("name", list(MASKS))
def test_every_mask_keeps_shape_dtype_and_zero(name):
    delta = torch.tensor([[0.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)
    shown = torch.tensor([[1.0, -1.0], [0.0, 1.0]], dtype=torch.float64)
    out = MASKS[name](delta, shown)
    assert out.shape == delta.shape
    assert out.dtype == delta.dtype
    assert out[0, 0] == 0
    assert (out.abs() <= delta.abs()).all()


def test_unknown_mask_and_misplaced_margin_are_explained():
    tau, votes = _draw(0)
    with pytest.raises(UsageError, match="no mask called 'agre'; there are: agree, .* Did you mean 'agree'"):
        transport(tau, votes, "agre")
    with pytest.raises(UsageError, match="margin belongs to the veto mask"):
        transport(tau, votes, "agree", margin=0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        transport(tau, votes, "veto", margin=1.5)


def test_random_like_keeps_mean_and_deviation_only():
    tau = TaskVector({"a": torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 3 + 1})
    fake = random_like(tau, seed=5)
    assert float(fake["a"].mean()) == pytest.approx(1, abs=0.1)
    assert float(fake["a"].std()) == pytest.approx(3, abs=0.1)
    assert abs(float(torch.corrcoef(torch.stack([tau["a"], fake["a"]]))[0, 1])) < 0.03
