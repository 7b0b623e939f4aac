"""Every matrix learns how far to go along the vector: against autograd's own answer, and for what it is good."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from gradfix.errors import DataError
from gradfix.training import best as recipe, starts
from gradfix.training.distil import Teaching
from gradfix.training.steps import Training
from gradfix.vectors import scale
from gradfix.vectors.scale import Coefficients
from gradfix.vectors.taskvector import TaskVector
from tests.arenas import NumbersBound, rows, setting

UNIT, BETAS = 1.5, (0.5, 0.9)


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def vector_for(own: nn.Module) -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=seed, dtype=p.dtype) / 4 for n, p in own.named_parameters()}


@pytest.mark.parametrize("at_once", [scale.AT_ONCE, 7])
def test_the_gradient_of_a_coefficient_is_what_autograd_says(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "AT_ONCE", at_once)
    own, inputs = model(), torch.randn(10, 6, dtype=torch.float64)
    vector, weights = vector_for(own), dict(own.named_parameters())
    matrices = [name for name, p in weights.items() if p.dim() > 1]
    found = Coefficients(weights, vector, UNIT, 1.0, BETAS)
    own(inputs).square().sum().backward()
    found.look()
    free = torch.zeros(len(matrices), dtype=torch.float64, requires_grad=True)
    moved = {name: weights[name].detach() + UNIT * c * vector[name] for name, c in zip(matrices, free, strict=True)}
    functional_call(own, moved, inputs).square().sum().backward()
    torch.testing.assert_close(found.values.grad, free.grad, rtol=1e-12, atol=1e-12)


def test_a_matrix_moves_by_its_coefficient_and_the_rest_stays() -> None:
    own = model()
    vector, weights = vector_for(own), dict(own.named_parameters())
    del vector["2.weight"]
    before = {name: p.detach().clone() for name, p in weights.items()}
    found = Coefficients(weights, vector, UNIT, 1.0, BETAS)
    found.optimizer.param_groups[0]["lr"] = 0.1
    found.values.grad = torch.tensor([2.0, -3.0], dtype=torch.float64)
    found.go()
    for name, weight in weights.items():
        step = {"0.weight": -0.1, "4.weight": 0.1}.get(name, 0.0)  # AdamW's first step is as large as its rate
        torch.testing.assert_close(weight.detach(), before[name] + step * UNIT * vector.get(name, 0.0))


def distance(along: bool, dtype: torch.dtype = torch.float64) -> float:
    """How far 30 steps leave a model from one that went along the vector, in every matrix a way of its own."""
    own = model(dtype)
    vector, weights = vector_for(own), dict(own.named_parameters())
    ways = dict(zip([name for name, p in weights.items() if p.dim() > 1], (0.4, 2.0, -0.7), strict=True))
    there = {name: weights[name].detach() + way * vector[name] for name, way in ways.items()}
    inputs = torch.randn(200, 6, dtype=dtype, generator=torch.Generator().manual_seed(2))
    wanted = functional_call(own, there, inputs).detach()
    training = Training(
        weights, lambda step: 0.003 * (1 - step / 30), lambda *_: DataError("diverged"), steps=30, betas=BETAS,
        along=Coefficients(weights, vector, 1.0, 0.2 / 0.003, BETAS) if along else None,
    )  # fmt: skip
    for step in range(30):
        training.step(step, [(own(inputs) - wanted).square().mean()])
    return (own(inputs) - wanted).square().mean().item()


def test_what_is_wrong_with_a_vector_as_a_whole_is_soon_mended() -> None:
    assert distance(along=True) < distance(along=False) / 4


def test_half_precision_moves_as_well() -> None:
    assert distance(along=True, dtype=torch.bfloat16) < distance(along=False, dtype=torch.bfloat16)


def test_a_vector_that_names_no_matrix_is_nothing_to_learn() -> None:
    own = model()
    weights = dict(own.named_parameters())
    none = Coefficients(weights, {"elsewhere": torch.ones(2, 2)}, UNIT, 1.0, BETAS)
    training = Training(weights, lambda _: 0.1, lambda *_: DataError("diverged"), steps=1, along=none)
    assert training.along is None


@pytest.mark.parametrize("along", [0.0, 0.4])
def test_the_recipe_says_how_fast(along: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def noted(*words: object, share: float, **options: object) -> Coefficients:
        shares.append(share)
        return Coefficients(*words, share=share, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(starts, "Coefficients", noted)
    pair = setting()
    tau = TaskVector.between(pair["base"], pair["tuned"])
    ask = partial(recipe.best, pair["target"], tau, rows(6, 40, 0.7), teacher=NumbersBound(pair["tuned"]))
    found = ask(recipe=Teaching(along=along))
    assert shares and shares[0] * found.parts["rate"] == pytest.approx(along)


def test_labels_alone_do_not_say_how_far_each_matrix_should_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "Coefficients", lambda *_, **__: pytest.fail("learned from labels alone"))
    pair = setting()
    found = recipe.best(pair["target"], TaskVector.between(pair["base"], pair["tuned"]), rows(6, 40, 0.7), seed=3)
    assert found.alpha and not found.parts["asked"]
