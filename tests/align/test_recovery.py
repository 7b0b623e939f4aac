"""Planted permutations: B is A with its units shuffled and some noise; alignment must find the shuffle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradfix import TaskVector
from gradfix.align import ALIGNERS, align
from gradfix.align.layout import config_of
from gradfix.checkpoints.open import open_checkpoint
from tests.align.models import MAKERS, hf, make
from tests.align.symmetry import random_alignment


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def noisy(weights, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + share * t.norm() / t.numel() ** 0.5 * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for name, t in weights.items()
    }


def planted_pair(model, method, share, seed=3):
    """A, a shuffled noisy A, the shuffle; rebasin does not reorder heads, so its shuffle does not either."""
    base = weights_of(model)
    planted = random_alignment(model, keep_heads=method == "rebasin", seed=seed)
    return base, noisy(planted.apply(base), share, seed), planted


@pytest.mark.parametrize("method", ALIGNERS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_planted_permutation_is_recovered(name, method):
    model, _ = make(name)
    base, target, planted = planted_pair(model, method, share=0.05)
    found = align(base, target, method=method, config=config_of(open_checkpoint(model)))
    wrong = [group for group, stack in planted.groups.items() if not torch.equal(found.groups[group], stack)]
    assert wrong == []
    assert found.cosine_after > max(0.99, found.cosine_before)


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.2])
@pytest.mark.parametrize("name", ["vit", "bert", "t5", "llama"])
def test_heads_are_found_at_any_small_noise(name, share):
    model, _ = make(name)
    base, target, planted = planted_pair(model, "transfusion", share)
    found = align(base, target, config=config_of(open_checkpoint(model)))
    for group in (name for name in planted.groups if name.endswith((".heads", ".queries"))):
        assert torch.equal(found.groups[group], planted.groups[group]), group


@pytest.mark.parametrize("method", ALIGNERS)
@pytest.mark.parametrize("name", ["vit", "bert", "t5", "llama"])
def test_a_related_pair_stays_in_place(name, method):
    model, _ = make(name)
    base = weights_of(model)
    found = align(base, noisy(base, 0.1), method=method, config=config_of(open_checkpoint(model)))
    assert found.identity_share() == 1.0


def test_the_seed_decides_the_order_and_nothing_else_does():
    first, second = make("bert", seed=0).model, make("bert", seed=1).model
    results = [align(first, second, seed=5).groups for _ in range(2)]
    assert all(torch.equal(results[0][group], results[1][group]) for group in results[0])


def text_batch(rows, generator):
    """A label, and a sentence in which a third of the words hint at it."""
    labels = torch.randint(4, (rows,), generator=generator)
    words = torch.randint(4, 40, (rows, 12), generator=generator)
    hints = 4 + 9 * labels[:, None] + torch.randint(9, (rows, 12), generator=generator)
    keep = torch.rand(rows, 12, generator=generator) < 0.33
    return torch.where(keep, hints, words), labels


def image_batch(rows, generator):
    labels = torch.randint(4, (rows,), generator=generator)
    patterns = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return patterns[labels] + 4 * torch.randn(rows, 3, 8, 8, generator=generator), labels


def t5_logits(model, x):
    start = torch.zeros(len(x), 1, dtype=torch.long)
    return model(input_ids=x, decoder_input_ids=start).logits[:, 0, :4]


TOYS = {
    "vit": (image_batch, lambda model, x: model(pixel_values=x).logits[:, :4]),
    "bert": (text_batch, lambda model, x: model(input_ids=x).logits),
    "t5_gated": (text_batch, t5_logits),
    "llama": (text_batch, lambda model, x: model(input_ids=x).logits[:, -1, :4]),
    "llama_tied": (text_batch, lambda model, x: model(input_ids=x).logits[:, -1, :4]),
}


def tune(model, batch, logits, steps, turn):
    """Train on the labels, turned by `turn` classes: pre-training knows the features, not the answers."""
    generator = torch.Generator().manual_seed(turn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x, labels = batch(64, generator)
        nn.functional.cross_entropy(logits(model, x), (labels + turn) % 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def accuracy(model, weights, batch, logits):
    model.load_state_dict(weights, strict=False)
    x, labels = batch(2000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return 100 * (logits(model, x).argmax(1) == labels).double().mean().item()


@pytest.fixture(scope="module")
def tuned():
    """One toy fine-tune per family: the model, A, and the task vector."""
    cache = {}

    def get(name):
        if name not in cache:
            torch.manual_seed(0)
            model = MAKERS[name]().model
            if name == "vit":
                model = hf.ViTForImageClassification(hf.ViTConfig(**{**model.config.to_dict(), "num_labels": 4}))
            model.eval()
            tune(model, *TOYS[name], steps=80, turn=1)
            base = weights_of(model)
            tune(model, *TOYS[name], steps=150 if name == "bert" else 30, turn=0)
            cache[name] = (model, base, TaskVector.between(base, weights_of(model)))
        return cache[name]

    return get


@pytest.mark.parametrize("method", ALIGNERS)
@pytest.mark.parametrize("name", TOYS)
def test_a_transported_fine_tune_scores_like_the_original(tuned, name, method):
    model, base, tau = tuned(name)
    planted = random_alignment(base, config=model.config.to_dict(), keep_heads=method == "rebasin", seed=4)
    target = noisy(planted.apply(base), 0.01)
    found = align(base, target, method=method, config=model.config.to_dict())
    moved = found.apply(tau)
    assert isinstance(moved, TaskVector)

    def score(weights, update):
        return accuracy(model, {n: weights[n] + update[n] for n in weights}, *TOYS[name])

    original = score(base, tau)
    assert original > 60
    assert abs(score(target, moved) - original) <= 1
    assert score(target, tau) < original - 30
