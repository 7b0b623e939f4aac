"""The CUDA kernels against float64; skipped where there is no such device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from gradfix.votes.batched import kernels

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_samples_are_cut_into_groups_that_count_in_eight_bits() -> None:
    for samples in (1, 2, 100, 127, 128, 1000):
        for tiles in (1, 18, 72, 500):
            groups = kernels._groups(samples, tiles, 132)
            assert -(-samples // groups) <= 127
            assert groups >= 1


@pytest.fixture
def set_tf32() -> Iterator[Callable[[bool], None]]:
    """Not by monkeypatch: the setting is no ordinary attribute, and cannot be taken away again."""
    before = torch.get_float32_matmul_precision()
    yield lambda on: torch.set_float32_matmul_precision("high" if on else "highest")
    torch.set_float32_matmul_precision(before)


def test_without_a_device_the_caller_folds() -> None:
    left = torch.randn(2, 8, 64)
    assert not kernels.fold_product(left, left, torch.zeros(64, 64, dtype=torch.int8))
    assert not kernels.sees(left)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", [(7, 37, 96, 160), (130, 50, 256, 384), (5, 16, 64, 72), (3, 9, 10, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_fold_exactly(
    dtype: torch.dtype, tf32: bool, shape: tuple[int, int, int, int], transposed: bool, set_tf32: Callable[[bool], None]
) -> None:
    set_tf32(tf32)
    samples, tokens, rows, columns = shape
    torch.manual_seed(0)
    left = torch.randint(-2, 3, (samples, tokens, rows), device="cuda").to(dtype)
    right = torch.randint(-2, 3, (samples, tokens, columns), device="cuda").to(dtype)
    left[1, :, 3] = 0
    expected = -torch.bmm(left.double().mT, right.double()).sign().sum(0)
    votes = torch.zeros((columns, rows) if transposed else (rows, columns), dtype=torch.int16, device="cuda")
    votes = votes.T if transposed else votes
    assert kernels.fold_product(left, right, votes)
    assert torch.equal(votes.double(), expected)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(7, 37, 96, 160), (130, 50, 256, 384), (3, 9, 10, 6)])
def test_a_gradient_that_is_no_number_abstains_alone(
    dtype: torch.dtype, value: float, shape: tuple[int, int, int, int], set_tf32: Callable[[bool], None]
) -> None:
    set_tf32(True)
    samples, tokens, rows, columns = shape
    torch.manual_seed(0)
    left = torch.randint(-2, 3, (samples, tokens, rows), device="cuda").to(dtype)
    right = torch.randint(-2, 3, (samples, tokens, columns), device="cuda").to(dtype)
    left[1, 2, 3] = right[2, 4, 5] = value
    gradients = torch.bmm(left.double().mT, right.double())
    votes = torch.zeros(rows, columns, dtype=torch.int16, device="cuda")
    assert kernels.fold_product(left, right, votes)
    assert torch.equal(votes.double(), -gradients.sign().nan_to_num(0).sum(0))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["plain", "rms", "layer"])
def test_token_sums(kind: str) -> None:
    torch.manual_seed(0)
    gradient, data = (torch.randn(6, 197, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = data.double()
    normal = {
        "plain": wide,
        "rms": torch.nn.functional.rms_norm(wide, (768,), None, 1e-6),
        "layer": torch.nn.functional.layer_norm(wide, (768,), None, None, 1e-6),
    }[kind]
    products, sums = kernels.token_sums(gradient, data, kind, 1e-6)
    torch.testing.assert_close(products.double(), (gradient.double() * normal).sum(1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums.double(), gradient.double().sum(1), rtol=1e-4, atol=1e-3)


@needs_cuda
@pytest.mark.cuda
def test_many_small_tensors_fold_together() -> None:
    values = [torch.randn(5, 7, device="cuda"), torch.randn(5, 2, 3, device="cuda", dtype=torch.bfloat16)]
    votes = [torch.ones(value.shape[1:], dtype=torch.int8, device="cuda") for value in values]
    kernels.fold_rows(values, votes)
    for value, found in zip(values, votes):
        assert torch.equal(found, 1 - value.sign().sum(0).to(torch.int8))
