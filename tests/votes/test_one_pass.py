"""Uses of weights that once sent a model to the loop: each votes in one pass, counted from outside, and votes the same."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfix
from votes.vote_cases import make_case

SAMPLES, TOKENS, WIDTH = 5, 4, 6
CASES: dict[str, Callable[[], nn.Module]] = {}


class Middle(nn.Module):
    """An input layer, something odd with parts of its own, and a head."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], width: int, **parts: Any) -> None:
        super().__init__()
        self.run, self.enter, self.leave = run, nn.Linear(WIDTH, WIDTH), nn.Linear(width, 2)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        found = self.run(self, self.enter(x))
        return self.leave((found if found.ndim == 2 else found.mean(1)).tanh())


def case(width: int = WIDTH, **parts: Callable[[], Any]) -> Callable[[Callable[[Any, Tensor], Tensor]], None]:
    def add(run: Callable[[Any, Tensor], Tensor]) -> None:
        CASES[run.__name__] = lambda: Middle(run, width, **{name: part() for name, part in parts.items()})

    return add


def square(*more: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*more, WIDTH, WIDTH)


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)


@case(probe=lambda: torch.randn(1, 1, WIDTH), attention=attention)
def attention_asked_by_weights_alone(m: Any, x: Tensor) -> Tensor:
    return m.attention(m.probe.repeat(len(x), 1, 1), x, x, need_weights=False)[0]


@case(width=3, table=lambda: nn.Embedding(9, WIDTH), attention=attention)
def prompts_that_are_the_same_for_all(m: Any, x: Tensor) -> Tensor:
    prompts = m.table(torch.arange(9).view(3, 3))
    told = m.attention(prompts, prompts, prompts, need_weights=False)[0].mean(1)
    return x.mean(1) @ told.T


@case(w=square())
def a_weight_asked_for_its_dtype(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.type_as(m.w).to(m.w).float().to(m.w), m.w)


@case(w=lambda: torch.randn(WIDTH))
def a_constant_made_like_the_samples(m: Any, x: Tensor) -> Tensor:
    return x @ torch.diag(m.w).matmul(torch.ones(WIDTH, WIDTH).to(x))


@case(inner=lambda: nn.Linear(WIDTH, WIDTH))
def a_part_asked_for_its_signature(m: Any, x: Tensor) -> Tensor:
    return m.inner(**dict.fromkeys(inspect.signature(m.inner.forward).parameters, x))


@case(w=lambda: torch.randn(4))
def a_sparse_change_of_a_frozen_matrix(m: Any, x: Tensor) -> Tensor:
    places = torch.tensor([[0, 1, 2, 5], [3, 0, 4, 5]])
    return F.linear(x, torch.eye(WIDTH).to(x).add_(torch.sparse_coo_tensor(places, m.w, (WIDTH, WIDTH))))


def _experts(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.flatten(0, 1)
    return rows, (rows.detach().sum(-1).abs() * 11).long() % 3


@case(w=square(3))
def experts_one_after_the_other(m: Any, x: Tensor) -> Tensor:
    rows, chosen = _experts(x)
    out = torch.zeros_like(rows)
    for expert in chosen.unique():
        (mine,) = torch.where(chosen == expert)
        out.index_add_(0, mine, F.linear(rows[mine], m.w[expert]).sin())
    return out.view_as(x)


@case(w=square(3))
def experts_beside_their_rows(m: Any, x: Tensor) -> Tensor:
    rows, chosen = _experts(x)
    return torch.bmm(m.w[chosen], rows[..., None])[..., 0].view_as(x)


@case(norm=lambda: nn.BatchNorm1d(WIDTH))
def a_batch_norm_over_as_many_channels_as_samples(m: Any, x: Tensor) -> Tensor:
    return m.norm(x[:, 0])


@case(other=lambda: nn.Linear(WIDTH, 3), norm=lambda: nn.LayerNorm(4))
def a_head_that_no_loss_asks(m: Any, x: Tensor) -> Tensor:
    m.norm(m.other(x).permute(2, 0, 1).reshape(-1, 4))
    return x


@case(width=8, lstm=lambda: nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True))
def a_recurrent_layer(m: Any, x: Tensor) -> Tensor:
    return m.lstm(x)[0]


@case(width=4, gru=lambda: nn.GRU(WIDTH, 4))
def a_recurrent_layer_over_packed_texts(m: Any, x: Tensor) -> Tensor:
    lengths = (x.detach()[:, 0, 0].abs() * 11).long() % TOKENS + 1
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.gru(packed)[1][0]


@case(token=lambda: torch.randn(WIDTH))
def a_weight_assigned_to_rows_that_samples_choose(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[x[..., 0] > 0.3] = m.token
    return x


class Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


@case(a=square(), b=square())
def a_weight_made_by_a_custom_function(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, Hadamard.apply(m.a, m.b))


@case(scale=lambda: torch.randn(WIDTH))
def a_custom_function_on_samples(m: Any, x: Tensor) -> Tensor:
    return Hadamard.apply(x, m.scale.expand_as(x))


@case(w=lambda: torch.randn(WIDTH * (WIDTH - 1) // 2))
def a_rotation_written_into_zeros(m: Any, x: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(WIDTH, WIDTH, 1)
    skew = m.w.new_zeros(WIDTH, WIDTH)
    skew[rows, columns] = m.w
    skew = skew - skew.T
    return x @ torch.linalg.solve(torch.eye(WIDTH, dtype=x.dtype) + skew, torch.eye(WIDTH, dtype=x.dtype) - skew)


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch_of(samples: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, TOKENS, WIDTH, dtype=dtype), "y": torch.arange(samples) % 2}


@pytest.mark.filterwarnings("ignore:.*tensors abstained")
@pytest.mark.parametrize("name", CASES)
def test_one_pass_and_the_votes_of_the_loop(name: str) -> None:
    torch.manual_seed(0)
    model = CASES[name]().double().eval()
    calls = []
    for samples in (SAMPLES, WIDTH, 16):
        batches, counted = [batch_of(samples) for _ in range(2)], Counted()
        found = gradfix.collect_votes(model, counted, batches)
        calls.append(counted.calls)
        assert found.notes == ("engine batched: agrees with the loop on the first batch.",)
        expected = gradfix.collect_votes(model, Counted(), batches, engine="loop")
        for weight, votes in expected.items():
            assert torch.equal(found[weight], votes), weight
    assert calls[-1] - calls[0] < 4, calls


def test_rows_of_weights_that_only_look_like_samples() -> None:
    """Three classes, and three samples of which each asks for its own class alone."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix, self.enter = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            told = self.mix(self.table(torch.arange(3))).tanh()
            return (self.enter(x).mean(1) * told[y]).sum(1)

    torch.manual_seed(0)
    model, batches = Classes().double(), [batch_of(3) for _ in range(3)]
    for batch, labels in zip(batches, ([0, 1, 2], [2, 2, 1], [1, 0, 0])):
        batch["y"] = torch.tensor(labels)
    loss = lambda m, b: m(b["x"], b["y"])  # noqa: E731
    expected = gradfix.collect_votes(model, loss, batches, engine="loop")
    for engine in ("batched", "auto"):
        found = gradfix.collect_votes(model, loss, batches, engine=engine)
        assert all(torch.equal(found[name], votes) for name, votes in expected.items())


def test_rounding_that_attention_leaves_to_queries_and_keys_is_no_disagreement() -> None:
    """With one token to look at, queries and keys have no gradient but rounding, two thirds of a packed weight."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.packed(x[:, :2]).chunk(3, -1)
            scores = query @ (key[:, :1] - key[:, :1].flip(0).flip(0) * (1 + 1e-7)).mT  # zero but for rounding
            return self.leave((scores.softmax(-1) @ value[:, :1]).sum(1))

    torch.manual_seed(0)
    found = gradfix.collect_votes(Alone(), Counted(), [batch_of(8, torch.float32)])
    assert found.notes == ("engine batched: agrees with the loop on the first batch.",)


def test_rounding_of_a_part_in_float32_is_no_disagreement() -> None:
    """Key biases have no gradient but the rounding of the softmax, which is not that of the weights' dtype."""
    wide = 24

    def attend(m: Any, x: Tensor) -> Tensor:
        shares = (m.query(x) @ m.key(x).mT).float().softmax(-1)
        rounded = shares / (len(x) + 2) * (len(x) + 2)  # in one way for one sample, in another for two
        return rounded.to(x) @ m.value(x)

    torch.manual_seed(7)
    parts = {name: nn.Linear(WIDTH, wide) for name in ("query", "key", "value")}
    found = gradfix.collect_votes(Middle(attend, wide, **parts).double(), Counted(), [batch_of(8)])
    assert found.notes == ("engine batched: agrees with the loop on the first batch.",)


def test_notes_tell_what_was_looped() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    hidden = Middle(
        lambda m, x: checkpoint(m.inner, x, use_reentrant=True), WIDTH, inner=nn.Linear(WIDTH, WIDTH)
    ).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = gradfix.collect_votes(hidden, Counted(), [batch_of(4)], engine="batched").notes
        chosen = gradfix.collect_votes(hidden, Counted(), [batch_of(4)]).notes
    why = "a reentrant checkpoint hides its operations."
    assert asked == (f"engine batched: 4 samples are voted on one at a time: {why}",)
    assert chosen == (f"engine loop: {why}",)


@pytest.mark.parametrize("engine", ["loop", "batched", "auto"])
def test_recomputation_that_rests_is_told(engine: str) -> None:
    model, loss, batch = make_case("gpt2")
    model.gradient_checkpointing_enable()
    notes = gradfix.collect_votes(model, loss, [batch], engine=engine).notes
    assert notes[-1] == "gradient checkpointing rests in evaluation mode: passes keep all activations."
