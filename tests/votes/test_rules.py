"""Every vote rule against the definition, on drawn shapes: one sample at a time, in float64, sign for sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers a grouped product that knows float64
from hypothesis import given, strategies as st
from torch import Tensor, nn

from gradfix.votes.batched.engine import batched
from gradfix.votes.batched.experts import Stacked
from gradfix.votes.batched.forms import Dense, Form, OneByOne, Product, Sum, TableRows, Tied, combine, densify
from gradfix.votes.batched.layers import RULES, Reshaped
from gradfix.votes.batched.sample_rows import Along, SampleLayout, candidates, explain, silence, speech
from gradfix.votes.engines.loop import loop
from gradfix.votes.tally import SpotCheck, Tally

Sizes = dict[str, int]


class Layer(nn.Module):
    """An embedding of the input, then the operation under test, then a pool to one loss per sample."""

    def __init__(self, sizes: Sizes, run: Callable[..., Tensor], **weights: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(sizes["width"], sizes["width"])
        self.run = run
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        output = self.run(self, self.first(x).tanh())
        return output.sin().flatten(1).square().sum(1)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def _linear(s: Sizes) -> Layer:
    weights = {"weight": torch.randn(s["out"], s["width"]), "bias": torch.randn(s["out"])}
    return Layer(s, lambda m, x: F.linear(x, m.weight, m.bias), **weights)


def _matmul(s: Sizes) -> Layer:
    weights = {"right": torch.randn(s["width"], s["out"]), "left": torch.randn(3, s["tokens"])}
    return Layer(s, lambda m, x: m.left @ (x @ m.right), **weights)


def _addmm(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        flat = torch.addmm(m.bias, x.reshape(-1, x.shape[-1]), m.weight)
        return flat.view(len(x), -1, s["out"])

    return Layer(s, run, weight=torch.randn(s["width"], s["out"]), bias=torch.randn(s["out"]))


def _conv(s: Sizes) -> Layer:
    weight = torch.randn(s["out"], s["width"], 3)
    return Layer(s, lambda m, x: F.conv1d(x.mT, m.weight, m.bias, padding=1), weight=weight, bias=torch.randn(s["out"]))


def _patches(s: Sizes) -> Layer:
    weight = torch.randn(s["out"], s["width"], 2)
    return Layer(s, lambda m, x: F.conv1d(F.pad(x.mT, (0, 1)), m.weight, stride=2), weight=weight)


def _embedding(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        index = (x.detach().sum(-1).abs() * 7).long() % 5
        return F.embedding(index, m.weight, padding_idx=2) * x.mean(-1, keepdim=True)

    return Layer(s, run, weight=torch.randn(5, s["out"]))


def _layer_norm(s: Sizes) -> Layer:
    weights = {"weight": torch.randn(s["width"]), "bias": torch.randn(s["width"])}
    return Layer(s, lambda m, x: F.layer_norm(x, (s["width"],), m.weight, m.bias), **weights)


def _rms_norm(s: Sizes) -> Layer:
    return Layer(s, lambda m, x: F.rms_norm(x, (s["width"],), m.weight, 1e-6), weight=torch.randn(s["width"]))


def _group_norm(s: Sizes) -> Layer:
    weights = {"weight": torch.randn(s["width"]), "bias": torch.randn(s["width"])}
    return Layer(s, lambda m, x: F.group_norm(torch.cat([x, x.cos()], 1).mT, 2, m.weight, m.bias), **weights)


def _batch_norm(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        mean = torch.linspace(-1, 1, s["width"]).double()
        return F.batch_norm(x.mT, mean, mean.exp(), m.weight, m.bias)

    return Layer(s, run, weight=torch.randn(s["width"]), bias=torch.randn(s["width"]))


def _experts(x: Tensor) -> Tensor:
    """Each token's expert, of three."""
    return (x.detach().sum(-1).abs() * 7).long().flatten() % 3


def _grouped_mm(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        expert, order = _experts(x).sort(stable=True)
        ends = torch.bincount(expert, minlength=3).cumsum(0)
        found = torch.ops.transformers.grouped_mm_fallback(x.flatten(0, 1)[order], m.weight.transpose(1, 2), offs=ends)
        return found[order.argsort()].unflatten(0, x.shape[:2])

    return Layer(s, run, weight=torch.randn(3, s["out"], s["width"]))


def _pick(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        expert, rows = _experts(x), x.flatten(0, 1)
        found = torch.bmm(m.weight[expert], rows[..., None])[..., 0] + m.bias[expert]
        return found.unflatten(0, x.shape[:2])

    return Layer(s, run, weight=torch.randn(3, s["out"], s["width"]), bias=torch.randn(3, s["out"]))


def _broadcast(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.scale * x / m.divisor.exp() - m.shift[: x.shape[1]]
        return torch.where(x > 0, x, m.slope * x)

    weights = {"scale": torch.randn(s["width"]), "divisor": torch.randn(()), "slope": torch.randn(1)}
    return Layer(s, run, shift=torch.randn(s["tokens"], 1), **weights)


def _attention(s: Sizes) -> Layer:
    def run(m: Any, x: Tensor) -> Tensor:
        heads = x[:, None].expand(-1, 2, -1, -1)
        keys = torch.cat([heads, heads.cos()], 2)
        return F.scaled_dot_product_attention(heads, keys, keys.sin(), attn_mask=m.bias.exp())

    return Layer(s, run, bias=torch.randn(1, 2, s["tokens"], 2 * s["tokens"]))


LAYERS = {
    "attention": [_attention],
    "linear": [_linear],
    "matmul": [_matmul, _addmm],
    "conv": [_conv, _patches],
    "embedding": [_embedding],
    "layer_norm": [_layer_norm],
    "rms_norm": [_rms_norm],
    "group_norm": [_group_norm],
    "batch_norm": [_batch_norm],
    "grouped_mm": [_grouped_mm],
    "pick": [_pick],
    "broadcast": [_broadcast],
}
CASES = [(rule, make) for rule in RULES for make in LAYERS.get(rule, [None])]


@pytest.mark.parametrize(("rule", "make"), CASES)
@given(
    samples=st.integers(2, 5),
    tokens=st.integers(1, 5),
    width=st.sampled_from([2, 4, 6]),
    out=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_every_rule_matches_the_loop(
    rule: str, make: Any, samples: int, tokens: int, width: int, out: int, seed: int
) -> None:
    assert make is not None, f"add a layer for the rule {rule!r} to LAYERS"
    torch.manual_seed(seed)
    model = make({"tokens": tokens, "width": width, "out": out}).double()
    batch = torch.randn(samples, tokens, width).double()
    tallies = []
    for engine in (loop, batched):
        tally = Tally(dict(model.named_parameters()))
        engine(model, loss, batch, tally)
        tallies.append(tally)
    for name, expected in tallies[0].items():
        noise = _exact_zero(model, batch, name)
        assert torch.equal(tallies[1][name][~noise], expected[~noise]), name


def _exact_zero(model: nn.Module, batch: Tensor, name: str) -> Tensor:
    """Entries whose gradient is zero but for rounding in some sample: their signs mean nothing."""
    parameter = dict(model.named_parameters())[name]
    rows = [torch.autograd.grad(loss(model, batch[i : i + 1]).sum(), parameter)[0] for i in range(len(batch))]
    gradients = torch.stack(rows).abs()
    return ((gradients > 0) & (gradients < 1e-12 * gradients.max())).any(0)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_forms_fold_the_signs_of_their_gradients(samples: int, tokens: int, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    left, right = torch.randn(samples, tokens, rows).double(), torch.randn(samples, tokens, columns).double()
    index, values = torch.randint(0, rows, (samples, tokens)), torch.randn(samples, tokens, columns).double()
    forms = [Product(left, right), TableRows(index, values, rows), Dense(torch.randn(samples, rows, columns).double())]
    shape = torch.Size((rows, columns))
    whole = combine([(form, lambda out: out) for form in forms], shape)
    tied = combine([(form, lambda out: out) for form in (*forms[:2], forms[1])], shape)
    assert isinstance(whole, Sum) and isinstance(tied, Tied)
    for form in [*forms, whole, tied, combine([(forms[0], lambda out: out)] * 2, shape)]:
        votes = torch.ones(shape, dtype=torch.int8)
        form.fold(votes)
        assert torch.equal(votes, 1 - densify(form).values.sign().sum(0).to(torch.int8))


@given(st.sampled_from([(3, 5, 2), (5, 3, 2), (15, 2), (3, 3, 2)]), st.booleans())
def test_layouts_are_found_from_what_one_sample_reaches(shape: tuple[int, ...], interleaved: bool) -> None:
    samples = 3
    for layout in candidates(shape[:-1], samples):
        if layout.interleaved and not interleaved:
            continue
        seen = []
        for sample in (1, 2):
            mask = torch.zeros(shape, dtype=torch.bool)
            layout.split(mask, samples)[sample] = True
            seen.append(([sample], spoken(mask, samples)))
        assert explain(candidates(shape[:-1], samples), samples, seen) == layout


def spoken(gradient: Tensor, samples: int) -> Along:
    return speech([silence(gradient.double(), samples)])[0]


def test_mixed_samples_have_no_layout() -> None:
    everywhere, nowhere = (spoken(torch.full((3, 4), value), 3) for value in (1.0, 0.0))
    assert explain(candidates((3, 4), 3), 3, [([1], everywhere), ([2], everywhere)]) is None
    assert explain([SampleLayout(0, 1)], 3, [([1], nowhere)]) == SampleLayout(0, 1)
    assert explain([SampleLayout(0, 1)], 3, [([1], spoken(torch.full((3, 4), float("nan")), 3))]) is None


@pytest.mark.parametrize(("block_bytes", "block_samples"), [(1, 3), (4096, 4), (2**20, 16)])
def test_products_in_blocks_fold_exactly(block_bytes: int, block_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfix.votes.batched import forms

    monkeypatch.setattr(forms, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(forms, "BLOCK_SAMPLES", block_samples)
    torch.manual_seed(0)
    left, right = (torch.randint(-1, 2, (10, forms.MANY_TOKENS, width)).double() for width in (70, 5))
    votes = torch.ones(5, 70, dtype=torch.int8).T
    Product(left, right).fold(votes)
    assert torch.equal(votes, 1 - torch.bmm(left.mT, right).sign().sum(0).to(torch.int8))


def _forms() -> list[Form]:
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    product, index = Product(numbers(5, 3, 6), numbers(5, 3, 4)), torch.randint(0, 6, (5, 7), generator=draw)
    rows, dense = TableRows(index, numbers(5, 7, 4), 6), Dense(numbers(5, 6, 4))
    single = OneByOne(lambda number: dense.values[number] * 2, 5, dense.values[0])
    both = Sum([(product, lambda out: out), (dense, lambda out: out)], product.shape)
    stacked = Stacked([(1, product), (0, rows)], 5, torch.empty(2, 6, 4, dtype=torch.float64))
    return [product, rows, Tied(product, rows), dense, single, both, Reshaped(product, torch.Size([24])), stacked]


@pytest.mark.parametrize("rows", [slice(0, 5, 4), slice(4, 5), slice(0, 1), slice(1, 4, 2)])
@pytest.mark.parametrize("form", _forms(), ids=lambda form: type(form).__name__)
def test_a_form_of_some_samples_has_their_gradients(form: Form, rows: slice) -> None:
    some, chosen = form.only(rows), range(5)[rows]
    assert (some.samples, some.shape) == (len(chosen), form.shape)
    votes, signs = torch.zeros(form.shape, dtype=torch.int8), torch.zeros(form.shape, dtype=torch.float64)
    for place, sample in enumerate(chosen):
        one, same = (torch.zeros(form.shape, dtype=torch.float64) for _ in range(2))
        form.accumulate(sample, one)
        some.accumulate(place, same)
        torch.testing.assert_close(same, one, rtol=0, atol=0)
        signs -= one.sign()
    some.fold(votes)
    assert torch.equal(votes.double(), signs)


def test_a_spot_check_finds_its_samples_in_parts_of_a_batch() -> None:
    spot = SpotCheck(Tally({"w": nn.Parameter(torch.zeros(2))}), (0, 9))
    assert torch.arange(10)[spot.rows].tolist() == [0, 9]
    first, last = spot.within(0, 4), spot.within(8, 12)
    assert first is not None and last is not None and spot.within(4, 8) is None
    assert (torch.arange(4)[first.rows].tolist(), torch.arange(2)[last.rows].tolist()) == ([0], [1])
