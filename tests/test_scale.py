"""search_scale: zero is always a candidate, the model comes back bit for bit, the grid widens at its edge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradfix
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult, UsageError


def _model(dtype=torch.float32) -> nn.Module:
    model = nn.Linear(3, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    return model


def _peak(at: float):
    return lambda model: -abs(float(model.weight.detach()[0, 0]) - at)


UPDATE = gradfix.TaskVector({"weight": torch.ones(1, 3)})


@pytest.mark.parametrize(
    ("peak", "best", "widened"),
    [(0.3, 0.3, False), (0.0, 0.0, False), (-2.0, 0.0, False), (3.0, 3.0, True), (7.0, 8.0, True)],
)
def test_best_alpha(peak, best, widened):
    score = _peak(peak) if peak != 7.0 else _peak(8.0)
    curve = gradfix.search_scale(_model(), UPDATE, score)
    assert curve.best == pytest.approx(best)
    assert curve.widened is widened
    assert curve.points[0][0] == 0.0
    assert any("widened" in note for note in curve.notes) is widened


def test_zero_wins_ties_and_says_do_not_transport():
    curve = gradfix.search_scale(_model(), UPDATE, lambda model: 1.0)
    assert curve.best == 0.0
    assert any("do not transport" in note for note in curve.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_comes_back_bit_identical_even_after_an_error(dtype):
    model = nn.Linear(50, 50).to(dtype)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    update = {n: torch.randn(p.shape) for n, p in model.named_parameters()}

    def fragile(m: nn.Module) -> float:
        fragile.calls += 1
        if fragile.calls == 4:
            raise RuntimeError("boom")
        return float(fragile.calls)

    fragile.calls = 0
    with pytest.raises(RuntimeError, match="boom"):
        gradfix.search_scale(model, update, fragile)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    gradfix.search_scale(model, update, lambda m: float(m.weight.detach().float().sum()))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_given_grid_is_not_widened_but_its_edge_is_noted():
    curve = gradfix.search_scale(_model(), UPDATE, _peak(5.0), grid=[0.5, 1.0])
    assert curve.best == 1.0
    assert [alpha for alpha, _ in curve.points] == [0.0, 0.5, 1.0]
    assert any("largest one tried" in note for note in curve.notes)


def test_bad_grids_and_scores_are_refused():
    with pytest.raises(UsageError, match="no negative"):
        gradfix.search_scale(_model(), UPDATE, _peak(1.0), grid=[-1.0])
    with pytest.raises(UnsafeResult, match="finite"):
        gradfix.search_scale(_model(), UPDATE, lambda m: float("nan"))
    with pytest.raises(IncompatibleCheckpoints, match="the model lacks"):
        gradfix.search_scale(_model(), {"other": torch.zeros(1)}, _peak(1.0))
