"""What goes wrong between a model, torch and one pass through the loss: the smallest case of each."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfix
from gradfix.errors import DataError
from gradfix.votes.engines.passes import take

SAMPLES, WIDTH = 5, 6


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch_of(*shape: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, *shape).double(), "y": torch.arange(samples) % 2}


def votes_of_pairs(model: nn.Module, loss: Any, batch: Any, count: int) -> dict[str, Tensor]:
    """The oracle: every sample as a pair of equal copies, which torch gets right where it fails for one sample."""
    named = dict(model.named_parameters())
    votes = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in named.items()}
    for row in range(count):
        model.train()
        model.eval()
        value = loss(model, take(batch, torch.tensor([row, row]))).sum() / 2
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients):
            if gradient is not None:
                votes[name] -= gradient.sign().long()
    return votes


def assert_votes(found: Any, expected: dict[str, Tensor]) -> None:
    for name, votes in expected.items():
        assert torch.equal(found[name].long(), votes), name


class NormThenTokens(nn.Module):
    """A batch norm whose output gradient has transposed strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        nn.init.normal_(self.after.weight)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.norm(self.conv(x)).flatten(2).transpose(1, 2)).sin().mean(1))


@pytest.mark.parametrize("engine", ["loop", "auto", "batched"])
def test_one_sample_behind_a_batch_norm_has_the_gradient_of_a_pair(engine: str) -> None:
    torch.manual_seed(0)
    model, batch = NormThenTokens().double().eval(), batch_of(3, 4, 4)
    expected = votes_of_pairs(model, loss_of, batch, SAMPLES)
    assert_votes(gradfix.collect_votes(model, loss_of, [batch], engine=engine), expected)
    mean = gradfix.collect_votes(model, loss_of, [batch], vote="mean")
    whole = torch.autograd.grad(loss_of(model, batch).sum(), list(model.parameters()))
    for name, gradient in zip(mean, whole):
        assert torch.equal(mean[name].sign(), -gradient.sign().to(mean[name].dtype)), name


class Remembering(nn.Module):
    """Position biases that are gathered once in evaluation mode, as LeViT's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.biases, self.kept = nn.Parameter(torch.randn(WIDTH)), {}

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode:
            self.kept = {}
        return self

    def forward(self, x: Tensor) -> Tensor:
        if "biases" not in self.kept:
            self.kept["biases"] = self.biases[torch.arange(WIDTH).flip(0)]
        return self.head((self.inner(x) + self.kept["biases"]).tanh())


@pytest.mark.parametrize("engine", ["loop", "auto", "batched"])
@pytest.mark.parametrize("used_before", [False, True])
def test_weights_that_a_module_remembers_vote(engine: str, used_before: bool) -> None:
    torch.manual_seed(0)
    model, batches = Remembering().double().eval(), [batch_of(WIDTH) for _ in range(3)]
    expected: dict[str, Tensor] = {}
    for batch in batches:
        for name, votes in votes_of_pairs(model, loss_of, batch, SAMPLES).items():
            expected[name] = expected.get(name, 0) + votes
    assert expected["biases"].any()
    model.kept.clear()
    if used_before:
        with torch.no_grad():
            model(batches[0]["x"])
    kept = dict(model.kept)
    assert_votes(gradfix.collect_votes(model, loss_of, batches, engine=engine), expected)
    assert model.kept.keys() == kept.keys()
    assert all(model.kept[name] is kept[name] for name in kept)


class Capacity(nn.Module):
    """Only the first three samples of a batch get into the inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        admitted = (torch.arange(len(x)) < 3).to(x.dtype)[:, None]
        return self.head((x + admitted * self.inner(x)).tanh())


@pytest.mark.filterwarnings("ignore:samples of a batch depend")
@pytest.mark.parametrize("resumed", [False, True])
def test_samples_that_couple_only_beyond_two_go_to_the_loop(resumed: bool, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    torch.manual_seed(0)
    model, batches = Capacity().double(), [batch_of(WIDTH) for _ in range(3)]
    expected = gradfix.collect_votes(model, loss_of, batches, engine="loop")
    options: dict[str, Any] = {}
    if resumed:
        options = {"checkpoint": tmp_path / "part"}

        def dying() -> Any:
            yield batches[0]
            yield batches[1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gradfix.collect_votes(model, loss_of, dying(), **options)
    found = gradfix.collect_votes(model, loss_of, batches, **options)
    assert_votes(found, {name: votes.long() for name, votes in expected.items()})
    assert found.notes == ("engine loop: samples of a batch depend on each other.",)


@pytest.mark.parametrize("engine", ["loop", "auto", "batched"])
def test_a_compiled_model_votes_under_its_own_names(engine: str) -> None:
    torch.manual_seed(0)
    batch = batch_of(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    expected = gradfix.collect_votes(model, loss_of, [batch], engine=engine)
    whole = torch.compile(model, backend="eager")
    parts = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    for compiled in (whole, parts):
        found = gradfix.collect_votes(compiled, loss_of, [batch], engine=engine)
        assert_votes(found, {name: votes.long() for name, votes in expected.items()})
        assert set(found) == set(expected)
        assert found.probe == expected.probe


@pytest.mark.parametrize("engine", ["loop", "auto", "batched"])
def test_what_a_tokenizer_gives_is_a_batch(engine: str) -> None:
    from transformers import BatchEncoding

    from votes.vote_cases import make_case

    model, loss, batch = make_case("bert")
    expected = gradfix.collect_votes(model, loss, [batch], engine=engine)
    asked = BatchEncoding({"input_ids": batch["ids"], "attention_mask": batch["mask"], "labels": batch["y"]})

    def own_loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        return F.cross_entropy(output.logits, batch["labels"], reduction="none")

    found = gradfix.collect_votes(model, own_loss, [asked, asked], engine=engine)
    assert_votes(found, {name: 2 * votes.long() for name, votes in expected.items()})


def test_a_batch_without_tensors_is_explained() -> None:
    with pytest.raises(DataError, match="this one is a dict without any"):
        gradfix.collect_votes(nn.Linear(1, 1), lambda m, b: m(b), [{"x": [1, 2]}])


class Steep(nn.Module):
    """Finite losses; the slope of a root at zero is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x))
        return self.head(hidden.mean(1)) + (hidden * x[..., :1]).square().sum((1, 2)).sqrt()[:, None] * torch.tensor(
            [0, 1]
        )


@pytest.mark.parametrize("tokens", [1, 4, 80])
@pytest.mark.parametrize("engine", ["auto", "batched"])
def test_a_gradient_that_is_no_number_abstains_alone(tokens: int, engine: str) -> None:
    torch.manual_seed(0)
    model, clean, steep = Steep().double(), batch_of(tokens, WIDTH), batch_of(tokens, WIDTH)
    steep["x"][2] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradfix.collect_votes(model, loss_of, [clean, steep], engine="loop")
        found = gradfix.collect_votes(model, loss_of, [clean, steep], engine=engine)
        others = [clean, take(steep, torch.tensor([0, 1, 3, 4]))]
        assert torch.equal(gradfix.collect_votes(model, loss_of, others)["inner.weight"], expected["inner.weight"])
    assert_votes(found, {name: votes.long() for name, votes in expected.items()})
    assert not any("one at a time" in note for note in found.notes)
