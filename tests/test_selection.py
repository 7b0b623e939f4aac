"""Few-shot selection: ten-line references, determinism, and the promises each rule makes."""

from __future__ import annotations

import kmedoids
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradfix.errors import DataError, UsageError
from gradfix.vectors.selection import SELECTORS, select


def clouds(seed: int, classes: int = 3, each: int = 20, width: int = 6) -> tuple[torch.Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 1, width, generator=generator, dtype=torch.float64)
    points = centres + torch.randn(classes, each, width, generator=generator, dtype=torch.float64)
    return points.reshape(-1, width), [f"c{i}" for i in range(classes) for _ in range(each)]


def unit(points: torch.Tensor) -> np.ndarray:
    return (points / points.norm(dim=1, keepdim=True)).numpy()


@pytest.mark.parametrize("method", list(SELECTORS))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6))
def test_every_selector_keeps_its_contract(method: str, seed: int, k: int) -> None:
    features, labels = clouds(seed)
    picked = select(features, labels, per_class=k, method=method, seed=seed)
    assert picked == select(features, labels, per_class=k, method=method, seed=seed)
    assert len(set(picked)) == len(picked) == 3 * k
    assert [labels[i] for i in picked] == sorted(labels[i] for i in picked)
    # The scale of a feature vector is not information.
    assert picked == select(features * 4, labels, per_class=k, method=method, seed=seed)


def test_random_depends_on_the_seed_and_needs_no_features() -> None:
    _, labels = clouds(0)
    picks = {tuple(select(None, labels, method="random", seed=seed)) for seed in range(5)}
    assert len(picks) == 5


def test_herding_equals_the_reference() -> None:
    features, labels = clouds(1)
    z = unit(features)[:20]
    mean, chosen = z.mean(0), []
    for t in range(1, 8):
        rest = [j for j in range(20) if j not in chosen]
        gap = {j: np.linalg.norm(mean - (z[chosen].sum(0) + z[j]) / t) for j in rest}
        chosen.append(min(rest, key=gap.__getitem__))
    assert select(features, labels, per_class=7, method="herding")[:7] == chosen


def test_herding_discrepancy_falls_with_k() -> None:
    def discrepancy(seed: int, k: int) -> float:
        features, labels = clouds(seed, classes=1, each=60)
        z = unit(features)
        return float(np.linalg.norm(z.mean(0) - z[select(features, labels, k, "herding")].mean(0)))

    means = [np.mean([discrepancy(seed, k) for seed in range(20)]) for k in (1, 2, 5, 10, 20, 50)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.1 * means[0]


def test_herding_does_not_normalise_the_mean() -> None:
    # Two tight opposite groups: the mean is nearly zero, so a second pick must come from the other group.
    features = torch.tensor([[1.0, 0.1], [1.0, 0.12], [1.0, 0.14], [-1.0, 0.1], [-1.0, 0.12]])
    first, second = select(features, [0] * 5, per_class=2, method="herding")
    assert (first < 3) != (second < 3)


def cost(z: np.ndarray, medoids: list[int]) -> float:
    return float(np.linalg.norm(z[:, None] - z[medoids][None], axis=2).min(1).sum())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8))
def test_medoids_never_cost_more_than_the_greedy_start(seed: int, k: int) -> None:
    features, labels = clouds(seed, classes=1, each=40)
    z = unit(features)
    distances = np.linalg.norm(z[:, None] - z[None], axis=2).astype(np.float32)
    greedy = kmedoids.pam_build(distances, k).medoids.tolist()
    assert cost(z, select(features, labels, k, "k-medoids", seed=seed)) <= cost(z, greedy) + 1e-5


def test_one_medoid_is_the_exhaustive_best() -> None:
    features, labels = clouds(3, classes=1)
    z = unit(features)
    assert select(features, labels, 1, "k-medoids") == [min(range(20), key=lambda j: cost(z, [j]))]


def test_medoids_under_any_spelling() -> None:
    features, labels = clouds(0)
    picked = select(features, labels, 2, "k-medoids")
    assert picked == select(features, labels, 2, "kmedoids") == select(features, labels, 2, "k_medoids")


def test_coreset_equals_the_reference() -> None:
    features, labels = clouds(2)
    z = unit(features)[:20]
    d = np.linalg.norm(z[:, None] - z[None], axis=2)
    chosen = [int(d.sum(1).argmin())]
    while len(chosen) < 6:
        rest = [j for j in range(20) if j not in chosen]
        chosen.append(min(rest, key=lambda j: d[j, chosen].min()))
    assert select(features, labels, per_class=6, method="coreset")[:6] == chosen


def test_too_few_examples_name_the_class() -> None:
    with pytest.raises(DataError, match="class 'rare' has 2 examples, 3 are wanted"):
        select(None, ["often"] * 5 + ["rare"] * 2, per_class=3, method="random")
    picked = select(None, ["often"] * 5 + ["rare"] * 2, per_class=3, method="random", allow_fewer=True)
    assert len(picked) == 5 and sorted(picked[3:]) == [5, 6]


def test_bad_input_is_named() -> None:
    features, labels = clouds(0)
    with pytest.raises(UsageError, match="no selector called 'herdin'.*Did you mean 'herding'"):
        select(features, labels, method="herdin")
    with pytest.raises(DataError, match="example 4 has NaN"):
        select(features.index_fill(0, torch.tensor([4]), float("nan")), labels)
    with pytest.raises(DataError, match="do not match 3 labels"):
        select(features, [0, 1, 2])
    with pytest.raises(UsageError, match="needs features"):
        select(None, labels)
    with pytest.raises(DataError, match="no examples"):
        select(None, [], method="random")


def test_labels_may_be_tensors_or_arrays() -> None:
    features, labels = clouds(0)
    numbers = torch.tensor([int(label[1:]) for label in labels])
    assert select(features, numbers) == select(features.numpy(), numbers.numpy()) == select(features, labels)
