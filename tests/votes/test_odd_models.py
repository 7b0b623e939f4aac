"""Models that do odd things with their weights, rows or losses: every engine gives the loop's votes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import gradfix
from gradfix.errors import DataError, IncompatibleCheckpoints, UnsafeResult
from votes.vote_cases import make_case

SAMPLES, TOKENS, WIDTH = 6, 5, 4
Batches = list[dict[str, Tensor]]
CASES: dict[str, Callable[[], tuple[nn.Module, Any, Batches]]] = {}


class Odd(nn.Module):
    """Some parts, an input layer before them and an output layer behind; `run` says what lies between."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], width: int = WIDTH, **parts: Any) -> None:
        super().__init__()
        self.run = run
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(width, 2)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.run(self, x).tanh()).flatten(1, -2).mean(1)


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).pow(2).mean(1)


def batches(*shape: int, count: int = 4) -> Batches:
    made = [(torch.randn(SAMPLES, *shape).double(), torch.randn(SAMPLES, 2).double()) for _ in range(count)]
    return [{"x": x, "y": y} for x, y in made]


def between(**parts: Callable[[], Any]) -> Callable[[Callable[[Any, Tensor], Tensor]], None]:
    """A case of an odd middle over tokens."""

    def add(run: Callable[[Any, Tensor], Tensor]) -> None:
        def make() -> tuple[nn.Module, Any, Batches]:
            model = Odd(run, **{name: part() for name, part in parts.items()})
            return model, squared, batches(TOKENS, WIDTH)

        CASES[run.__name__] = make

    return add


def case(make: Callable[[], tuple[nn.Module, Any, Batches]]) -> None:
    CASES[make.__name__] = make


def square() -> Tensor:
    return torch.randn(WIDTH, WIDTH)


@between(a=lambda: nn.Linear(WIDTH, WIDTH))
def output_overwritten(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.a(m.enter(x)), inplace=True)


@between(a=lambda: nn.Linear(WIDTH, WIDTH))
def output_masked_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(m.enter(x))
    h[x[..., 0] > 0] = 0
    return h


@between(w=square)
def square_weight_both_ways_round(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(m.enter(x), m.w).tanh(), m.w.t())


@between(w=lambda: torch.randn(WIDTH, 3))
def one_call_that_uses_a_weight_twice(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bti,ij,kj->btk", m.enter(x), m.w, m.w)


@between(z=lambda: torch.randn(3), h=lambda: torch.randn(3, 20))
def weight_and_bias_made_of_one(m: Any, x: Tensor) -> Tensor:
    made = m.z @ m.h
    return F.linear(m.enter(x), made[:16].view(4, 4), made[16:])


@between(b=lambda: torch.randn(WIDTH))
def expanded_bias(m: Any, x: Tensor) -> Tensor:
    return m.enter(x) + m.b.expand(TOKENS, WIDTH)


@between(p=lambda: torch.randn(1, TOKENS, WIDTH))
def gradient_that_is_the_output_gradient(m: Any, x: Tensor) -> Tensor:
    return torch.subtract(m.p, m.enter(x))


@between(w=lambda: torch.randn(2 * WIDTH - 1))
def overlapping_view(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.enter(x), m.w.unfold(0, WIDTH, 1))


@between(w=lambda: torch.randn(WIDTH, WIDTH).t())
def view_of_a_transposed_parameter(m: Any, x: Tensor) -> Tensor:
    return m.enter(x) * m.w.t().view(-1)[:WIDTH]


@between(l=lambda: weight_norm(nn.Linear(WIDTH, WIDTH)))
def weight_made_inside_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.l, m.enter(x), use_reentrant=False)


@between(a=lambda: nn.Linear(WIDTH, WIDTH))
def reentrant_checkpoint_behind_a_layer(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.a, m.enter(x), use_reentrant=True)


@case
def statistics_as_many_as_samples() -> tuple[nn.Module, Any, Batches]:
    norm = nn.BatchNorm2d(SAMPLES)
    nn.init.normal_(norm.running_mean)
    model = Odd(lambda m, x: m.norm(m.conv(x)).mean((2, 3))[:, None], SAMPLES, norm=norm, conv=nn.Conv2d(3, SAMPLES, 3))
    return model, squared, batches(3, 5, 5)


@case
def constant_as_long_as_the_batch() -> tuple[nn.Module, Any, Batches]:
    model = Odd(lambda m, x: torch.einsum("btd,ts,de->bse", m.enter(x), m.mix, m.w), w=square())
    model.register_buffer("mix", torch.randn(SAMPLES, TOKENS))
    return model, squared, batches(SAMPLES, WIDTH)


@case
def rows_in_another_order() -> tuple[nn.Module, Any, Batches]:
    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.enter(m.enter(x).tanh()[order])[order.argsort()][:, None]

    made = batches(WIDTH)
    made[0]["x"][:, 0] = torch.arange(SAMPLES)
    return Odd(run), squared, made


@case
def text_ends_picked_from_their_own_rows() -> tuple[nn.Module, Any, Batches]:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.a(m.enter(x)[torch.arange(len(x)), x[..., 0].argmax(1)])[:, None]

    return Odd(run, a=nn.Linear(WIDTH, WIDTH)), squared, batches(TOKENS, WIDTH)


def _masked(counts: list[int]) -> dict[str, Tensor]:
    labels = torch.full((SAMPLES, TOKENS), -100)
    for row, count in zip(labels, counts):
        row[:count] = torch.randint(9, (count,))
    return {"ids": torch.randint(9, (SAMPLES, TOKENS)), "labels": labels}


@case
def head_on_masked_tokens_alone() -> tuple[nn.Module, Any, Batches]:
    model = nn.ModuleDict({"e": nn.Embedding(9, WIDTH), "m": nn.Linear(WIDTH, WIDTH), "h": nn.Linear(WIDTH, 9)})

    def loss(m: Any, batch: dict[str, Tensor]) -> Tensor:
        x = m["m"](m["e"](batch["ids"])).tanh()
        chosen = batch["labels"] != -100
        each = F.cross_entropy(m["h"]((x + x.mean(1, keepdim=True))[chosen]), batch["labels"][chosen], reduction="none")
        return each.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], each)

    return model, loss, [_masked([1] * SAMPLES), *(_masked([3, 0, 1, 2, 0, 0]) for _ in range(3))]


@case
def tokens_packed_without_padding() -> tuple[nn.Module, Any, Batches]:
    def loss(m: Any, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        flat = m.enter(batch["x"][mask]).tanh()
        back = flat.new_zeros(*mask.shape, WIDTH).index_put((mask,), flat)
        return (m.leave(back).sum(1) - batch["y"]).pow(2).mean(1)

    made = batches(TOKENS + 1, WIDTH)
    for batch, lengths in zip(made, ([4] * 6, [4, 4, 3, 5, 4, 4], [4, 4, 2, 6, 4, 4], [4, 4, 4, 3, 5, 4])):
        batch["mask"] = torch.arange(TOKENS + 1) < torch.tensor(lengths)[:, None]
    return Odd(lambda m, x: x), loss, made


@case
def table_cut_to_another_length() -> tuple[nn.Module, Any, Batches]:
    model = Odd(lambda m, x: F.embedding(x, m.w[: int(x.max()) + 1]), w=torch.randn(12, WIDTH))
    made = batches(1, count=5)
    for batch, rows in zip(made, (4, 4, 6, 12, 8)):
        batch["x"] = torch.randint(rows, (SAMPLES, TOKENS))
        batch["x"][:, 0] = rows - 1
    return model, squared, made


@case
def table_without_tokens() -> tuple[nn.Module, Any, Batches]:
    table = nn.Embedding(9, WIDTH)
    model = Odd(lambda m, x: torch.cat([m.table(x[:, :0, 0].long()), m.enter(x)], 1), table=table)
    return model, squared, batches(TOKENS, WIDTH)


@case
def loss_weighted_by_its_own_gradient() -> tuple[nn.Module, Any, Batches]:
    def loss(m: Any, batch: dict[str, Tensor]) -> Tensor:
        h = m.enter(batch["x"]).tanh()
        each = (m.leave(h) - batch["y"]).pow(2).mean(1)
        if not torch.is_grad_enabled():
            return each
        (slope,) = torch.autograd.grad(each.sum(), h, retain_graph=True)
        return each * (1 + slope.norm(dim=1).detach())

    return Odd(lambda m, x: x), loss, batches(WIDTH)


@case
def forces() -> tuple[nn.Module, Any, Batches]:
    def loss(m: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            (force,) = torch.autograd.grad(m.leave(m.enter(x).tanh()).sum(), x, create_graph=True)
        return (force[:, :2] - batch["y"]).pow(2).mean(1)

    return Odd(lambda m, x: x), loss, batches(WIDTH)


@case
def hooked_gradient() -> tuple[nn.Module, Any, Batches]:
    model = Odd(lambda m, x: m.enter(x)).double()
    frozen = torch.ones(WIDTH, WIDTH).double()
    frozen[1:] = 0
    model.enter.weight.register_hook(lambda gradient: gradient * frozen)
    return model, squared, batches(TOKENS, WIDTH)


@pytest.mark.parametrize("engine", ["batched", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_votes_are_those_of_the_loop(name: str, engine: str) -> None:
    torch.manual_seed(0)
    model, loss, made = CASES[name]()
    model = model.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradfix.collect_votes(model, loss, made, engine="loop")
        found = gradfix.collect_votes(model, loss, made, engine=engine)
    for weight, votes in expected.items():
        assert torch.equal(found[weight].int(), votes.int()), weight


def test_a_text_end_is_no_reason_to_plan_every_batch() -> None:
    from gradfix.votes.batched import engine as batched

    model, loss, made = CASES["text_ends_picked_from_their_own_rows"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradfix.collect_votes(model.double(), loss, made, engine="batched")
    assert not any(plan.ragged for plan in batched._PLANS[model].values())


def test_a_weight_frozen_between_two_votes() -> None:
    torch.manual_seed(0)
    model = Odd(lambda m, x: m.enter(x) + m.lstm(m.enter(x))[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    model, made = model.double(), batches(TOKENS, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradfix.collect_votes(model, squared, made, engine="batched")
        model.lstm.requires_grad_(False)
        votes = gradfix.collect_votes(model, squared, made, engine="batched")
    assert set(votes) == {f"{layer}.{kind}" for layer in ("enter", "leave") for kind in ("weight", "bias")}


@pytest.mark.parametrize("engine", ["loop", "batched", "auto"])
@pytest.mark.parametrize("vote", ["majority", "mean"])
def test_nothing_to_vote_on_is_said_so(engine: str, vote: Any) -> None:
    model, loss, batch = make_case("vit")
    with pytest.raises(UnsafeResult, match="every weight abstained"):
        gradfix.collect_votes(model, lambda m, b: loss(m, b).detach(), [batch], vote=vote, engine=engine)
    with pytest.raises(UnsafeResult, match="every weight abstained"):
        gradfix.collect_votes(model.requires_grad_(False), loss, [batch], vote=vote, engine=engine)


def test_the_mean_of_nothing_and_of_nan_is_refused() -> None:
    model = Odd(lambda m, x: m.enter(x)).double()
    made = batches(TOKENS, WIDTH, count=1)
    with pytest.raises(UnsafeResult, match="every weight abstained"):
        gradfix.collect_votes(model, lambda m, b: squared(m, b) * 0, made, vote="mean")

    def steep(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Finite, with a slope that is not."""
        return (squared(m, batch) * 0).sqrt()

    with pytest.raises(DataError, match="gradients of 4 tensors are not finite though every loss is"):
        gradfix.collect_votes(model, steep, made, vote="mean")


def test_nothing_is_left_on_the_models_tensors() -> None:
    model = Odd(lambda m, x: m.seen.copy_(m.enter(x).detach()[0]) * 0 + m.enter(x)).double()
    model.register_buffer("seen", torch.zeros(TOKENS, WIDTH).double())
    gradfix.collect_votes(model, squared, batches(TOKENS, WIDTH), engine="batched")
    assert not vars(model.seen)


def test_only_votes_of_one_kind_and_model_add_up() -> None:
    def votes(seed: int, **options: Any) -> gradfix.SignVotes:
        torch.manual_seed(seed)
        return gradfix.collect_votes(Odd(lambda m, x: m.enter(x)).double(), squared, batches(TOKENS, WIDTH), **options)

    assert (votes(0) + votes(0)).count == 2 * votes(0).count
    with pytest.raises(IncompatibleCheckpoints, match="taken on different weights, first 'enter.weight'"):
        votes(0) + votes(1)
    with pytest.raises(IncompatibleCheckpoints, match="votes by majority and votes by mean do not add up"):
        votes(0) + votes(0, vote="mean")
    one, five = (gradfix.SignVotes({"w": torch.ones(size, dtype=torch.int8)}, 1) for size in (1, 5))
    with pytest.raises(IncompatibleCheckpoints, match="different weights, first 'w'"):
        one + five
