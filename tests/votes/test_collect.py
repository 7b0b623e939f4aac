"""collect_votes against a naive float64 computation, exactly; and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradfix
from gradfix.checkpoints.identity import values_of
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.votes import tally as tallying
from gradfix.votes.engines import loop as looping
from gradfix.votes.engines.loop import LoneCheck, LoopCheck
from gradfix.votes.engines.passes import take
from gradfix.votes.tally import Tally
from tests.oracle import naive_votes
from tests.votes.models import CASES, analytically_zero, case

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


def _cut(batch, size: int, samples: int) -> list:
    return [take(batch, slice(i, min(i + size, samples))) for i in range(0, samples, size)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("samples", "size"), [(5, 5), (6, 4), (6, 1)])
def test_votes_equal_the_naive_float64_computation(name, samples, size):
    subject = case(name)
    batch = subject.batch(samples)
    votes = gradfix.collect_votes(subject.model, subject.loss, _cut(batch, size, samples), engine="loop")
    expected = naive_votes(subject.model, subject.loss, [batch])
    assert votes.count == samples
    assert set(votes) == set(expected)
    compared = [n for n in expected if not analytically_zero(n)]
    # padding differs between batch sizes only in exact zeros, so the comparison is exact
    for tensor in compared:
        assert torch.equal(votes[tensor].to(torch.int64), expected[tensor]), tensor


@pytest.mark.parametrize("samples", [130, 300])
def test_many_votes_do_not_wrap(samples):
    model = nn.Linear(1, 1, bias=False).double()
    batch = {"x": torch.ones(samples, 1, dtype=torch.float64)}
    votes = gradfix.collect_votes(model, lambda m, b: -m(b["x"]).squeeze(1), [batch], engine="loop")
    assert votes["weight"].item() == samples
    assert votes["weight"].dtype is torch.int16


def test_mean_vote_is_the_sign_of_the_summed_gradient():
    subject = case("mlp")
    batch = subject.batch(7)
    votes = gradfix.collect_votes(subject.model, subject.loss, [batch], vote="mean")
    subject.loss(subject.model, batch).sum().backward()
    for name, parameter in subject.model.named_parameters():
        assert torch.equal(votes[name].sign().double(), -parameter.grad.sign()), name
    assert votes.count == 7


def test_model_is_left_as_it_was():
    subject = case("bert")
    subject.model.train()
    subject.model.bert.encoder.eval()
    modes = [m.training for m in subject.model.modules()]
    weights = {n: p.detach().clone() for n, p in subject.model.named_parameters()}
    kept = torch.ones_like(subject.model.classifier.weight)
    subject.model.classifier.weight.grad = kept
    gradfix.collect_votes(subject.model, subject.loss, [subject.batch(3)], engine="loop")
    assert [m.training for m in subject.model.modules()] == modes
    assert all(torch.equal(p, weights[n]) for n, p in subject.model.named_parameters())
    assert subject.model.classifier.weight.grad is kept
    assert all(p.grad is None for n, p in subject.model.named_parameters() if n != "classifier.weight")
    assert not any(p._post_accumulate_grad_hooks for p in subject.model.parameters())


def test_votes_add_and_survive_a_file(tmp_path):
    subject = case("mlp")
    first, second = subject.batch(3, seed=1), subject.batch(4, seed=2)
    both = gradfix.collect_votes(subject.model, subject.loss, [first, second])
    added = gradfix.collect_votes(subject.model, subject.loss, [first]) + gradfix.collect_votes(
        subject.model, subject.loss, [second]
    )
    added.save(tmp_path / "votes.safetensors")
    loaded = gradfix.SignVotes.load(tmp_path / "votes.safetensors")
    assert loaded.count == both.count == 7
    for name in both:
        assert torch.equal(loaded[name], both[name])
        assert torch.equal(both.direction()[name], both[name].sign().to(torch.int8))


def test_a_bad_sample_is_named_and_too_many_abort():
    subject = case("mlp")
    batch = subject.batch(4)
    batch["x"][2] = float("nan")
    with pytest.raises(DataError, match="sample 2: loss is nan") as caught:
        gradfix.collect_votes(subject.model, subject.loss, [batch])
    assert caught.value.exit_code == 5


def test_one_bad_sample_in_two_hundred_abstains_alone():
    subject = case("mlp")
    batch = subject.batch(200)
    batch["x"][150] = float("nan")
    votes = gradfix.collect_votes(subject.model, subject.loss, [batch], engine="loop")
    good = [i for i in range(200) if i != 150]
    expected = naive_votes(subject.model, subject.loss, [take(batch, torch.tensor(good))])
    assert votes.count == 199
    assert votes.notes == ("sample 150: loss is nan",)
    assert all(torch.equal(votes[n].to(torch.int64), expected[n]) for n in expected)


def test_silence_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(UnsafeResult, match="every weight abstained"):
        gradfix.collect_votes(model, lambda m, b: (m(b) * 0).sum(1), [torch.ones(3, 2)], engine="loop")
    with pytest.raises(DataError, match="no samples"):
        gradfix.collect_votes(model, lambda m, b: m(b).sum(1), [])


def test_frozen_parameters_do_not_vote_and_unused_ones_are_reported():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "frozen": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    loss = lambda m, b: (m["used"](b) + m["frozen"](b)).squeeze(1)  # noqa: E731
    with pytest.warns(UserWarning, match="2 tensors abstained .* 'unused.weight'"):
        votes = gradfix.collect_votes(model, loss, [torch.ones(3, 2)], engine="loop")
    assert set(votes) == {"used.weight", "used.bias", "unused.weight", "unused.bias"}
    assert not votes["unused.weight"].any()


def test_a_loss_that_is_not_per_sample_is_explained():
    model = nn.Linear(2, 1)
    with pytest.raises(DataError, match=r"one loss per sample, shape \(3,\); got \(\)"):
        gradfix.collect_votes(model, lambda m, b: m(b).sum(), [torch.ones(3, 2)])


def test_unknown_vote_and_engine_list_the_choices():
    model = nn.Linear(2, 1)
    loss = lambda m, b: m(b).squeeze(1)  # noqa: E731
    with pytest.raises(UsageError, match="no vote called 'majorty'.*Did you mean 'majority'"):
        gradfix.collect_votes(model, loss, [torch.ones(1, 2)], vote="majorty")
    with pytest.raises(UsageError, match="no engine called 'loup'.*Did you mean 'loop'"):
        gradfix.collect_votes(model, loss, [torch.ones(1, 2)], engine="loup")


def test_an_interrupted_vote_resumes_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    subject = case("mlp")
    batches = [subject.batch(2, seed=i) for i in range(5)]
    whole = gradfix.collect_votes(subject.model, subject.loss, batches)

    def dying(limit: int):
        for index, batch in enumerate(batches):
            if index == limit:
                raise KeyboardInterrupt
            yield batch

    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(subject.model, subject.loss, dying(3), checkpoint=part)
    seen: list[int] = []
    resumed = gradfix.collect_votes(subject.model, subject.loss, batches, checkpoint=part, progress=seen.append)
    assert sum(seen) < 10
    assert resumed.count == whole.count
    assert all(torch.equal(resumed[n], whole[n]) for n in whole)


SHAPES = {"a": (7, 31), "b": (3,), "c": (16, 16), "d": (5, 4)}


def _one_sample(
    shapes: dict[str, tuple[int, ...]], together: bool, monkeypatch
) -> tuple[Tally, dict[str, torch.Tensor]]:
    monkeypatch.setattr(tallying, "lies_with_others", lambda parameter: together)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    tally, seed = Tally(parameters), torch.Generator().manual_seed(2)
    tally.reserve(1)
    counts = {name: torch.randint(-1, 2, p.shape, generator=seed) for name, p in parameters.items()}
    for name, count in counts.items():
        tally[name].copy_(count)
    return tally, counts


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("names", ["abcd", "dcba", "cd", "bd", "a", "b"])
def test_counts_of_one_sample_are_put_away_and_brought_out(names, together, monkeypatch):
    tally, counts = _one_sample(SHAPES, together, monkeypatch)
    tally.put_away()
    assert sum(shelf.counts.numel() for shelf in tally._shelves) * 4 == sum(shelf.size for shelf in tally._shelves)
    expected = torch.cat([counts[name].flatten() + 1 for name in names])
    assert torch.equal(tally.brought_out(list(names)).long(), expected)


def _losses(parameters: dict[str, nn.Parameter], gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(((parameters[name] * gradient).sum() for name, gradient in gradients.items()), torch.zeros(()))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("room", [2**24, 100])
@pytest.mark.parametrize("kind", ["right", "flipped", "silent", "tiny", "not a number", "unheard"])
def test_a_sample_that_is_put_away_is_compared_as_one_that_is_not(kind, room, together, monkeypatch):
    """Tensor by tensor or all at the end: the same votes are left, whatever is wrong with them."""
    monkeypatch.setattr(looping, "TOGETHER", room)
    told = []
    for check in (LoopCheck, LoneCheck):
        trial, counts = _one_sample(SHAPES, together, monkeypatch)
        gradients = {name: -count.float() for name, count in counts.items()}
        if kind == "flipped":
            gradients["c"] = -gradients["c"]
        elif kind == "silent":
            gradients["c"] = torch.zeros(16, 16)
        elif kind == "tiny":
            gradients["a"][:4] *= -1e-7
        elif kind == "not a number":
            gradients["a"][0, :2] = torch.nan
        elif kind == "unheard":
            del gradients["c"]
        if check is LoneCheck:
            trial.put_away()
        compared = check(trial, torch.float32)
        compared.take_back(_losses(trial.parameters, gradients))
        wrong = compared.disagreements(values_of(compared.questions()))
        told.append((wrong, {name: str(height) for name, height in compared.heights.items()}))
    assert told[0] == told[1]
    expected = {"flipped": {"c"}, "silent": set(), "unheard": {"c"}}.get(kind, set())
    assert set(told[0][0]) == expected


def test_a_gradient_that_comes_in_parts_is_not_compared(monkeypatch):
    trial, counts = _one_sample(SHAPES, True, monkeypatch)
    trial.put_away()
    compared = LoneCheck(trial, torch.float32)
    compared.add("a", counts["a"].float())
    with pytest.raises(UnsafeResult, match="several parts"):
        compared.add("a", counts["a"].float())
