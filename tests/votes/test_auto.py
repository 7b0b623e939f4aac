"""What `auto` chooses, what its check sees, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfix import collect_votes
from votes.vote_cases import assert_equal_votes, image_loss, make_case, votes_of

Batch = dict[str, Tensor]


def test_auto_checks_a_model_once_for_each_loss() -> None:
    class Counted:
        calls = 0

        def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
            self.calls += 1
            return loss(model, batch)

    model, loss, batch = make_case("vit")
    first, second = Counted(), Counted()
    votes = collect_votes(model, first, [batch] * 3)
    checked = first.calls
    again = collect_votes(model, first, [batch] * 3)
    assert checked == 3 + 4  # both halves of a small first batch, its first and its last sample alone
    assert first.calls == checked + 3
    assert again.notes == votes.notes
    assert_equal_votes(dict(votes), dict(again))
    collect_votes(model, second, [batch] * 3)
    assert second.calls > 3


def test_samples_that_mix_are_never_remembered_as_apart() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            crowd = (torch.arange(len(x)) > 1).double()[:, None]
            return self.layer(x * (1 - 0.5 * crowd))

    model, batch = Mixing().double(), {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.arange(8) % 3}
    for _ in range(2):
        assert collect_votes(model, image_loss, [batch]).notes[0].startswith("engine loop: samples of a batch depend")


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_not_misled_by_key_biases_inside_a_packed_bias(seed: int) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))

    torch.manual_seed(seed)
    batch = {"x": torch.randn(8, 5, 16), "y": torch.randint(0, 3, (8,))}
    loss = lambda model, part: F.cross_entropy(model(part["x"]), part["y"], reduction="none")  # noqa: E731
    notes = collect_votes(Packed(), loss, [batch], engine="auto").notes
    assert notes == ("engine batched: agrees with the loop on the first batch.",)


def test_auto_refuses_an_engine_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfix.votes.batched import forms

    fold = forms.Product.fold
    monkeypatch.setattr(forms.Product, "fold", lambda self, votes: (fold(self, votes), votes.neg_()))
    model, loss, batch = make_case("vit")
    right = votes_of(model, loss, [batch], "loop")
    found = collect_votes(model, loss, [batch], engine="auto")
    assert any(note.startswith("engine loop: batched disagrees") for note in found.notes)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_auto_sees_an_engine_that_breaks_in_the_middle_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfix.votes.batched import forms

    fold, folded = forms.Product.fold, []

    def breaking(self: forms.Product, votes: Tensor) -> None:
        folded.append(self.samples)
        if len(folded) % 9 == 0:  # once without a plan, and again with one
            raise RuntimeError("enough")
        fold(self, votes)

    model, loss, batch = make_case("vit")
    right = votes_of(model, loss, [batch], "loop")
    monkeypatch.setattr(forms.Product, "fold", breaking)
    found = collect_votes(model, loss, [batch] * 2, engine="auto")
    assert found.notes == ("engine loop: batched failed with RuntimeError: enough.",)
    assert all(torch.equal(found[name], 2 * right[name]) for name in right)


class Couple(nn.Module):
    """Two layers whose samples, from some number on, meddle with each other in ways that change no loss."""

    def __init__(self, meddle: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.meddle = nn.Linear(6, 6), nn.Linear(6, 3), meddle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.meddle(self.layer, x))


def changing_places(layer: nn.Linear, x: Tensor) -> Tensor:
    """A weight that is used twice sums two samples' gradients."""
    places = int(len(x) > 4)
    return layer(layer(x).tanh().roll(places, 0)).roll(-places, 0)


def mixing_gradients(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = layer(x).tanh()
    if hidden.requires_grad and len(x) > 3:
        hidden.register_hook(lambda g: g.roll(1, 0))
    return hidden


@pytest.mark.parametrize("meddle", [changing_places, mixing_gradients])
def test_auto_compares_samples_in_the_company_they_vote_in(meddle: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = Couple(meddle).double(), {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.arange(8) % 3}
    found = collect_votes(model, image_loss, [batch])
    assert found.notes[0].startswith("engine loop: batched disagrees on")
    assert_equal_votes(dict(found), dict(votes_of(model, image_loss, [batch], "loop")))


def heads_first(layer: nn.Linear, x: Tensor) -> Tensor:
    heads = layer(x).view(len(x), 2, 3).transpose(0, 1)
    return torch.baddbmm(layer.bias[:3], heads, layer.weight[:3, :3].expand(2, 3, 3)).transpose(0, 1).flatten(1).tanh()


def samples_second(layer: nn.Linear, x: Tensor) -> Tensor:
    tokens = torch.stack([x * (1 + number) for number in range(len(x))])  # as many as there are samples
    return layer(tokens).tanh().sum(0)


def a_faint_mixture(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = layer(x)
    return (hidden + 1e-7 * hidden.mean(0)).tanh()


@pytest.mark.parametrize("do", [heads_first, samples_second, a_faint_mixture])
def test_what_is_unusual_in_the_first_batch_gets_a_plan(do: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = Couple(do).double(), {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.arange(8) % 3}
    found = collect_votes(model, image_loss, [batch] * 2)
    assert_equal_votes(dict(found), dict(votes_of(model, image_loss, [batch] * 2, "loop")))
    if do is a_faint_mixture:
        assert any("at a time" in note or "engine loop" in note for note in found.notes)


def partners(layer: nn.Linear, x: Tensor) -> Tensor:
    """Every second sample sees the one before it; halves of the batch, cut in the middle, would not tell."""
    hidden = layer(x)
    return (hidden + 0.3 * hidden[torch.arange(len(x)) // 2 * 2].detach()).tanh()


def a_queue(layer: nn.Linear, x: Tensor) -> Tensor:
    """Two doors with room for a part of the batch each: who comes late stays outside."""
    left = x.sum(1) > 0
    place = torch.where(left, left.cumsum(0), (~left).cumsum(0))
    return (x + (place <= max(1, int(0.45 * len(x)))).double()[:, None] * layer(x)).tanh()


def other_when_alone(layer: nn.Linear, x: Tensor) -> Tensor:
    """The first sample's padding is left out in company only, as some state space models do."""
    padded = (x[:, :1] == 9) & (len(x) > 1)
    return layer(torch.where(padded, 0.0, x)).tanh()


@pytest.mark.parametrize("samples", [8, 40])
@pytest.mark.parametrize("meddle", [partners, a_queue, other_when_alone])
def test_samples_that_meddle_by_values_alone_go_to_the_loop(
    meddle: Callable[[nn.Linear, Tensor], Tensor], samples: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(samples, 6, dtype=torch.double)
    x[0, 0] = 9
    model, batches = Couple(meddle).double(), [{"x": x, "y": torch.arange(samples) % 3}] * 2
    with pytest.warns(UserWarning, match="depend on each other"):
        found = collect_votes(model, image_loss, batches)
    assert found.notes == ("engine loop: samples of a batch depend on each other.",)
    assert_equal_votes(dict(found), dict(votes_of(model, image_loss, batches, "loop")))


def test_where_the_compared_sample_is_silent_two_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfix.votes.batched import forms

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.beside, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.layer(x) + (x[:, :1] > 0) * self.beside(x)).tanh())

    torch.manual_seed(0)
    model, x = Silent().double(), torch.randn(8, 6, dtype=torch.double)
    x[0, 0], x[-1, 0] = 1, -1
    batch = {"x": x, "y": torch.arange(8) % 3}
    right, fold = votes_of(model, image_loss, [batch], "loop"), forms.Product.fold

    def wrong(self: forms.Product, votes: Tensor) -> None:
        fold(self, votes)
        if not self.left[-1].any():  # of the weight that the last sample says nothing about
            votes.neg_()

    monkeypatch.setattr(forms.Product, "fold", wrong)
    found = collect_votes(model, image_loss, [batch])
    assert found.notes[0].startswith("engine loop: batched disagrees on 1 tensors, worst 'beside.weight'")
    assert_equal_votes(dict(found), dict(right))


def test_counts_that_lie_together_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfix.votes import tally

    model, batch = Couple(lambda layer, x: layer(x).tanh()), {"x": torch.randn(70, 6), "y": torch.arange(70) % 3}
    apart = collect_votes(model, image_loss, [batch] * 2)
    monkeypatch.setattr(tally, "lies_with_others", lambda parameter: True)
    together = collect_votes(model, image_loss, [batch] * 2)
    assert together.count > 127  # wider than they began
    assert_equal_votes(dict(together), dict(apart))


def test_auto_takes_models_that_view_their_inputs() -> None:
    class Choices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(-1, 6)).view(len(x), -1)

    batch = {"x": torch.randn(8, 3, 6), "y": torch.arange(8) % 3}
    assert collect_votes(Choices(), image_loss, [batch]).notes[0].startswith("engine batched: agrees")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_auto_takes_the_batched_engine_and_its_kernels(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
            self.head = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).tanh().mean(1))

    torch.manual_seed(0)
    model = Net().to("cuda", dtype)
    batch = {"x": torch.randn(130, 16, 64, device="cuda", dtype=dtype), "y": torch.arange(130, device="cuda") % 3}
    found = collect_votes(model, image_loss, [batch] * 2, engine="auto")
    assert found.notes == ("engine batched: agrees with the loop on the first batch.",)
    expected = collect_votes(model, image_loss, [batch] * 2, engine="loop")
    for name, votes in expected.items():
        apart = (found[name].float() - votes.float()).abs().mean() / votes.float().abs().mean()
        assert apart < (0.4 if dtype == torch.bfloat16 else 0.02), name  # of other samples: more than 1
