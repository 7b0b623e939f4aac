"""Linear maps by the faster library: the same values and slopes, and the usual way for everything that is no plain product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradfix.system import processor

LARGE = (64, 256, 192)  # rows, inputs, outputs: more than WORTH multiplications


@pytest.fixture
def everywhere(monkeypatch):
    """As on a processor where the other library is faster; the products are right on any."""
    if not processor._agrees():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(processor, "onednn_is_faster", lambda: True)


def _linear(bias=True, rows=LARGE[0], dtype=torch.float32):
    torch.manual_seed(0)
    layer = nn.Linear(*LARGE[1:], bias=bias).to(dtype)
    return layer, torch.randn(rows, LARGE[1], dtype=dtype)


def _taken(run):
    """What a function returns, and how many products went to the other library."""
    calls, own = [], processor.product

    def counted(*args):
        calls.append(args)
        return own(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "product", counted)
        return run(), len(calls)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (4, 16), (2, 2, 16)])
def test_values_and_slopes_are_those_of_float64(everywhere, bias, shape):
    layer, data = _linear(bias)
    data = data.reshape(*shape, -1).requires_grad_()
    exact = copy.deepcopy(layer).double()
    data_too = data.detach().double().requires_grad_()
    seed = torch.randn(*shape, LARGE[2])

    def run():
        with processor.quick_products(layer):
            found = layer(data)
            found.backward(seed)
        return found

    found, products = _taken(run)
    wanted = exact(data_too)
    wanted.backward(seed.double())
    assert products == 3
    pairs = [(found, wanted), (data.grad, data_too.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(layer.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_what_lies_otherwise_in_memory_is_read_right(everywhere):
    layer, data = _linear()
    with processor.quick_products(layer), torch.no_grad():
        found = functional.linear(data.t().contiguous().t(), layer.weight.t().contiguous().t(), layer.bias)
    torch.testing.assert_close(found, layer(data), rtol=1e-5, atol=1e-5)


def test_only_wanted_slopes_are_made(everywhere):
    layer, data = _linear()
    layer.weight.requires_grad_(False)

    def run():
        with processor.quick_products(layer):
            layer(data).sum().backward()

    assert _taken(run)[1] == 1
    assert layer.weight.grad is None and layer.bias.grad is not None


def _in_autocast(layer, data):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(data)


@pytest.mark.parametrize(
    ("kind", "run"),
    {
        "float64": lambda layer, data: layer.double()(data.double()),
        "bfloat16": lambda layer, data: layer.bfloat16()(data.bfloat16()),
        "few rows": lambda layer, data: layer(data[:2]),
        "a vector": lambda layer, data: layer(data[0]),
        "nothing": lambda layer, data: layer(data[:0]),
        "autocast": _in_autocast,
        "torch.func": lambda layer, data: torch.func.vmap(layer)(data[:, None].expand(-1, 64, -1)),
        "recomputed": lambda layer, data: checkpoint(layer, data.requires_grad_(), use_reentrant=False),
        "meta": lambda layer, data: layer.to("meta")(data.to("meta")),
    }.items(),
)
def test_everything_else_goes_the_usual_way(everywhere, kind, run):
    layer, data = _linear()

    def inside():
        with processor.quick_products(layer):
            return run(layer, data)

    found, products = _taken(inside)
    layer, data = _linear()
    wanted = run(layer, data)
    assert products == 0
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if not found.is_meta:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_made_again_have_the_same_slopes(everywhere, reentrant):
    layer, data = _linear()
    data.requires_grad_()
    with processor.quick_products(layer):
        checkpoint(lambda x: layer(x).relu(), data, use_reentrant=reentrant).sum().backward()
    found, data.grad = data.grad, None
    layer(data).relu().sum().backward()
    torch.testing.assert_close(found, data.grad, rtol=1e-5, atol=1e-5)


def test_models_on_a_card_are_not_watched(everywhere):
    with processor.quick_products(nn.Linear(2, 2, device="meta")):
        assert not torch._C._is_torch_function_mode_enabled()
    with processor.quick_products(nn.Linear(2, 2)):
        assert torch._C._is_torch_function_mode_enabled()


def test_slopes_of_slopes_are_refused_instead_of_wrong(everywhere):
    layer, data = _linear()
    data.requires_grad_()
    with processor.quick_products(layer):
        (slope,) = torch.autograd.grad(layer(data).square().sum(), data, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


@pytest.mark.parametrize(
    ("told", "faster"), [("vendor_id : AuthenticAMD", True), ("vendor_id : GenuineIntel", False), (None, False)]
)
def test_which_processors_gain(tmp_path, monkeypatch, told, faster):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    path = tmp_path / "cpuinfo"
    if told is not None:
        path.write_text(told)
    assert processor.onednn_is_faster.__wrapped__(path) is (faster and processor._agrees())


def test_a_torch_without_that_door_goes_the_usual_way(monkeypatch):
    def gone(*args):
        raise AttributeError("no such operator")

    monkeypatch.setattr(processor, "product", gone)
    assert not processor._agrees()


def test_scores_and_votes_use_it(everywhere):
    from gradfix import collect_votes
    from gradfix.tasks.scoring import mean_loss

    layer, data = _linear()

    def loss(model, batch):
        return functional.cross_entropy(model(batch["data"]), batch["labels"], reduction="none")

    batch = {"data": data, "labels": torch.arange(len(data))}
    assert _taken(lambda: mean_loss(layer, loss, [batch]))[1] == 1
    assert _taken(lambda: collect_votes(layer, loss, [batch], engine="batched"))[1] >= 1
