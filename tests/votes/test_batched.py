"""The batched engine against the loop, in float64, sign for sign."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfix import ENGINES, collect_votes
from gradfix.errors import DataError
from gradfix.votes.batched.engine import batched
from gradfix.votes.engines.loop import loop
from gradfix.votes.engines.passes import take
from gradfix.votes.tally import Tally
from votes.vote_cases import (
    FAMILIES,
    SAMPLES,
    assert_equal_votes,
    assert_same_votes,
    image_loss,
    language_loss,
    make_case,
    tokens,
    votes_of,
)

Batch = dict[str, Tensor]


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"loop"}))
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_matches_the_loop(family: str, engine: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no vote rule covers")
        warnings.filterwarnings("ignore", message=".*abstained")
        assert_same_votes(*make_case(family), engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_batches_vote_as_the_first(family: str) -> None:
    """The second pass learns where weights are used, and the later ones look only there."""
    model, loss, batch = make_case(family)
    once = votes_of(model, loss, [batch], "loop")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no vote rule covers")
        warnings.filterwarnings("ignore", message=".*abstained")
        found = votes_of(model, loss, [batch] * 4)
    assert_equal_votes({name: 4 * votes for name, votes in once.items()}, found)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_weight_used_in_another_place_later_on() -> None:
    class Detour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x).tanh()
            return F.linear(h, self.leave.weight.flip(0), self.leave.bias) if bool(x[0, 0] > 5) else self.leave(h)

    torch.manual_seed(0)
    model = Detour().double()
    usual = {"x": torch.randn(SAMPLES, 6, dtype=torch.double), "y": torch.arange(SAMPLES) % 3}
    other = {**usual, "x": usual["x"] + 6}
    batches = [usual, usual, usual, other, usual, other]
    assert_equal_votes(votes_of(model, image_loss, batches, "loop"), votes_of(model, image_loss, batches))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_known_family_has_a_rule(family: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no vote rule covers")
        votes_of(*make_case(family)[:2], [make_case(family)[2]])


@pytest.mark.parametrize("family", ["vit", "gpt2", "open_clip"])
def test_batch_size_changes_nothing(family: str) -> None:
    model, loss, batch = make_case(family)
    whole = votes_of(model, loss, [batch])
    parts = votes_of(model, loss, [take(batch, slice(0, 2)), take(batch, slice(2, 4)), take(batch, slice(4, 5))])
    assert_equal_votes(whole, parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_batches_vote_like_the_first(family: str) -> None:
    """The first pass proves the plan, the second notes how calls are read, later ones only repeat that."""
    model, loss, batch = make_case(family)
    batches = [{name: value.roll(turn, 0) for name, value in batch.items()} for turn in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no vote rule covers")
        warnings.filterwarnings("ignore", message=".*abstained")
        assert_equal_votes(votes_of(model, loss, batches, "loop"), votes_of(model, loss, batches))


def test_lengths_may_change_from_batch_to_batch() -> None:
    model, loss, batch = make_case("gpt2")
    shorter = {name: value[:, :6] for name, value in batch.items()}
    expected = votes_of(model, loss, [batch, shorter, batch], "loop")
    assert_equal_votes(expected, votes_of(model, loss, [batch, shorter, batch]))


def test_float32_signs_differ_in_at_most_one_of_a_thousand() -> None:
    model, loss, batch = make_case("llama")
    model = model.float()
    loop, batched = votes_of(model, loss, [batch], "loop"), votes_of(model, loss, [batch])
    wrong = sum(int((loop[name].sign() != batched[name].sign()).sum()) for name in loop)
    assert wrong <= 1e-3 * sum(tensor.numel() for tensor in loop.values())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("family", ["vit", "convnet"])
def test_a_sample_without_a_finite_loss_is_never_counted(family: str, size: int) -> None:
    model, loss, batch = make_case(family)
    batch["x"][2] = float("nan")
    parts = [take(batch, slice(start, start + size)) for start in range(0, SAMPLES, size)]
    with pytest.raises(DataError, match="sample 2"):
        votes_of(model, loss, parts)


def test_nothing_is_left_behind() -> None:
    model, loss, batch = make_case("vit")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient = torch.ones_like(model.classifier.weight)
    model.classifier.weight.grad = gradient
    attributes = {name: set(vars(value)) for name, value in [*model.named_buffers(), *batch.items()]}
    votes_of(model, loss, [batch])
    assert model.training
    assert model.classifier.weight.grad is gradient
    assert all(p.grad is None for p in model.parameters() if p is not model.classifier.weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert attributes == {name: set(vars(v)) for name, v in [*model.named_buffers(), *batch.items()]}
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


class TokensFirst(nn.Module):
    """Attention in the (tokens, samples, features) layout, with as many tokens as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.cross = nn.MultiheadAttention(16, 2, kdim=16, vdim=16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(0, 1)
        x = x + self.attention(x, x, x)[0]
        x = x + self.cross(x, x.tanh(), x.sin())[0]
        return self.head(x[0])


def test_samples_may_lie_in_any_dimension() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(SAMPLES, SAMPLES, 3).double(), "y": torch.arange(SAMPLES) % 2}
    assert_same_votes(TokensFirst().double(), image_loss, batch)


class Odd(nn.Module):
    """Weights used in unusual ways: derived, shared, transposed, sliced, picked, and by an unseen function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(4, 6))
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.bilinear = nn.Bilinear(6, 6, 6)
        self.unseen = nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x @ self.weight.t() + F.linear(x, self.weight[:, :3] @ self.weight[:3])
        x = x * (1 + self.scale.float().double().exp()) + self.table[torch.tensor([0, 2, 1])].mean(0)
        x = torch.einsum("bnd,de->bne", x.tanh(), self.weight)
        x = self.bilinear(self.normed(x), x.contiguous())
        x *= self.scale
        x += self.table[:1]
        return unseen(x, self.unseen).mean(1)


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


unseen = Unseen.apply  # bound before a mode can see it


def test_unusual_uses_vote_the_same_and_the_unseen_one_is_named() -> None:
    torch.manual_seed(0)
    model = Odd().double()
    batch = {"x": torch.randn(SAMPLES, 4, 6).double(), "y": torch.arange(SAMPLES) % 2}
    with pytest.warns(UserWarning, match="no vote rule covers 1 tensors, first 'unseen'"):
        assert_same_votes(model, image_loss, batch)


def test_samples_that_share_statistics_fall_back_to_the_loop() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.head(x - (x.mean(0) if len(x) > 1 else 0)) if len(x) > 1 else self.head(x)

    torch.manual_seed(0)
    batch = {"x": torch.randn(SAMPLES, 4).double(), "y": torch.arange(SAMPLES) % 2}
    with pytest.warns(UserWarning, match="no vote rule covers"):
        assert_same_votes(Centered().double(), image_loss, batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=reentrant)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4, 6).double().requires_grad_(reentrant)
    assert_same_votes(Checkpointed().double(), image_loss, {"x": x, "y": torch.arange(SAMPLES) % 2})


def test_a_compiled_model_votes_as_what_it_was_compiled_from() -> None:
    model, loss, batch = make_case("vit")
    expected, found = Tally(dict(model.named_parameters())), Tally(dict(model.named_parameters()))
    for _ in range(3):
        loop(model, loss, batch, expected)
        batched(torch.compile(model, backend="eager"), loss, batch, found)
    assert_equal_votes(dict(expected.items()), dict(found.items()))


def test_mixed_precision_runs_and_agrees() -> None:
    model, loss, batch = make_case("llama")
    model = model.float()

    def mixed(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch).float()

    loop, batched = votes_of(model, mixed, [batch], "loop"), votes_of(model, mixed, [batch])
    wrong = sum(int((loop[name].sign() != batched[name].sign()).sum()) for name in loop)
    assert wrong <= 0.05 * sum(tensor.numel() for tensor in loop.values())


def test_auto_says_what_it_chose() -> None:
    model, loss, batch = make_case("vit")
    notes = collect_votes(model, loss, [batch], engine="auto").notes
    assert any(note.startswith("engine batched: agrees with the loop") for note in notes)
    assert len(notes) == 1

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return unseen(x, self.weight).mean(1)

    batch = {"x": torch.randn(SAMPLES, 4, 6), "y": torch.arange(SAMPLES) % 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = collect_votes(Hidden(), image_loss, [batch], engine="auto").notes
        assert any(note.startswith("engine loop: most weights") for note in notes)
        notes = collect_votes(Hidden(), image_loss, [batch], engine="batched").notes
    assert notes[0].startswith("engine batched: 5 samples are voted on one at a time: most weights")


def test_language_losses_with_padding() -> None:
    model, _, _ = make_case("llama_tied")
    batch = tokens()
    assert_same_votes(model, language_loss, batch)
