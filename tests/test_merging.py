"""Merging in memory: ten-line references in float64, algebra by hypothesis, the pipelines, the errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import gradfix.merging.bundles
import gradfix.merging.memory
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.merging.memory import MERGES, consensus, mask_then_merge, merge, merge_then_mask
from gradfix.merging.ranks import magnitudes_at
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import transport

SHAPES = {"layer.0.weight": (7, 11), "layer.0.bias": (7,), "layer.1.weight": (3, 4, 5), "scale": ()}
RANDOM = [name for name in MERGES if "seed" in MERGES[name].options]


def vectors(seed: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[TaskVector]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TaskVector({n: torch.randn(s, generator=generator, dtype=dtype) for n, s in SHAPES.items()})
        for _ in range(count)
    ]


def flat(vector: TaskVector) -> Tensor:
    return torch.cat([vector[name].reshape(-1) for name in SHAPES])


def votes_for(seed: int, count: int = 5) -> SignVotes:
    generator = torch.Generator().manual_seed(seed)
    return SignVotes(
        {n: torch.randint(-count, count + 1, s, generator=generator, dtype=torch.int8) for n, s in SHAPES.items()},
        count,
    )


def run(method: str, taus: Sequence[TaskVector], **options: object) -> TaskVector:
    extra: dict[str, object] = {"seed": 3} if method in RANDOM else {}
    return merge(taus[:2] if method == "slerp" else taus, method, **{**extra, **options})


def elect(rows: Tensor, count: bool = False) -> Tensor:
    sign = sum(rows.sign() if count else rows).sign()
    agree = (rows.sign() == sign) & (rows != 0)
    return sum(torch.where(agree, rows, 0)) / agree.sum(0).clamp_min(1)


def trim(row: Tensor, density: float) -> Tensor:
    kept = max(1, int(density * row.numel()))
    return torch.where(row.abs() >= row.abs().reshape(-1).topk(kept).values[-1], row, 0)


# Small pieces, so that every test crosses piece borders.
@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradfix.merging.bundles, "CHUNK", 16)


def test_task_arithmetic_and_mean_equal_the_reference() -> None:
    a, b, c = taus = vectors(0)
    weights = [1.0, 0.5, -2.0]
    expected = a * 1.0 + b * 0.5 + c * -2.0
    assert torch.equal(flat(merge(taus, "task_arithmetic", weights)), flat(expected))
    assert torch.equal(flat(merge(taus, "task_arithmetic")), flat(a + b + c))
    assert torch.equal(flat(merge(taus, "mean")), flat(a + b + c) / 3)
    assert torch.equal(flat(merge(taus, "mean", [1, 1, 2])), (flat(a) + flat(b) + flat(c) * 2) / 4)


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("election", ["mass", "count"])
def test_ties_trims_the_whole_vector(density: float, election: str) -> None:
    taus = vectors(1, 5)
    expected = elect(torch.stack([trim(flat(tau), density) for tau in taus]), election == "count")
    assert torch.equal(flat(merge(taus, "ties", density=density, election=election)), expected)


def test_ties_per_tensor_trims_every_tensor() -> None:
    taus = vectors(2, 4)
    merged = merge(taus, "ties", density=0.3, per_tensor=True)
    for name in SHAPES:
        assert torch.equal(merged[name], elect(torch.stack([trim(tau[name], 0.3) for tau in taus])))


def test_ties_weights_scale_election_and_mean() -> None:
    taus, weights = vectors(3), [2.0, 1.0, 0.5]
    rows = torch.stack([trim(flat(tau), 0.4) for tau in taus])
    scaled = rows * torch.tensor(weights, dtype=torch.float64)[:, None]
    agree = scaled * sum(scaled).sign() > 0
    share = (agree * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0)
    expected = sum(scaled * agree) / share.masked_fill(share == 0, 1)
    assert torch.equal(flat(merge(taus, "ties", weights, 0.4)), expected)
    assert torch.equal(flat(merge(taus, "ties", weights, 0.4, normalize=False)), sum(scaled * agree))


def test_ties_takes_a_density_per_vector_and_drops_balanced_entries() -> None:
    taus = vectors(4, 2)
    rows = torch.stack([trim(flat(taus[0]), 0.1), flat(taus[1])])
    assert torch.equal(flat(merge(taus, "ties", density=[0.1, 1.0])), elect(rows))
    assert not flat(merge([taus[0], -taus[0]], "ties", density=1.0)).any()


def test_a_negative_weight_subtracts_under_ties() -> None:
    (tau,) = vectors(5, 1)
    assert torch.equal(flat(merge([tau], "ties", [-1.0], 1.0)), -flat(tau))


def drawn(taus: Sequence[TaskVector], density: float, **options: object) -> list[Tensor]:
    """The entries DARE keeps, seen by merging each vector with silent partners."""
    weights = [[float(i == j) for j in range(len(taus))] for i in range(len(taus))]
    return [flat(merge(taus, "dare_linear", w, density, seed=3, **options)) for w in weights]


def test_dare_drops_rescales_and_adds() -> None:
    taus = vectors(6)
    parts = drawn(taus, 0.5)
    for tau, part in zip(taus, parts, strict=True):
        kept = part != 0
        assert 0.3 < kept.double().mean() < 0.7
        assert torch.equal(part, torch.where(kept, flat(tau) / 0.5, 0))
    assert torch.equal(flat(merge(taus, "dare_linear", density=0.5, seed=3)), sum(parts))
    assert torch.equal(flat(merge(taus, "dare_ties", density=0.5, seed=3)), elect(torch.stack(parts)))
    assert torch.equal(drawn(taus, 0.5, rescale=False)[0], parts[0] * 0.5)


def test_dare_keeps_the_mean_of_a_vector() -> None:
    ones = TaskVector({"w": torch.ones(20_000, dtype=torch.float64)})
    assert flat_mean(merge([ones], "dare_linear", density=0.2, seed=0)) == pytest.approx(1, abs=0.05)
    assert flat_mean(merge([ones], "della", density=0.2, epsilon=0.3, seed=0)) > 1  # a mean over survivors


def flat_mean(vector: TaskVector) -> float:
    return float(torch.cat([t.reshape(-1) for t in vector.values()]).mean())


def test_breadcrumbs_drops_both_tails_of_every_tensor() -> None:
    taus = vectors(7, 2)
    merged = merge(taus, "breadcrumbs", density=0.5, gamma=0.1)
    for name in SHAPES:
        expected = torch.zeros_like(merged[name])
        for tau in taus:
            row = tau[name].reshape(-1)
            top, kept = int(0.1 * row.numel()), max(1, int(0.5 * row.numel()))
            order = row.abs().argsort(descending=True)[top : top + kept]
            expected += torch.zeros_like(row).index_copy_(0, order, row[order]).view_as(tau[name])
        assert torch.equal(merged[name], expected)


def test_della_drops_small_entries_more_often() -> None:
    generator = torch.Generator().manual_seed(0)
    tau = TaskVector({"w": torch.randn(400, 50, generator=generator, dtype=torch.float64)})
    kept = merge([tau], "della", density=0.5, epsilon=0.8, seed=1)["w"] != 0
    order = tau["w"].abs().argsort(dim=1, descending=True)
    by_rank = kept.gather(1, order).double().mean(0)
    wanted = 0.5 + 0.4 - 0.8 * torch.arange(50) / 50
    assert (by_rank - wanted).abs().max() < 0.12
    scaled = merge([tau], "della", density=0.5, epsilon=0.8, seed=1, normalize=False)["w"]
    ranks = order.argsort(dim=1).double()
    assert torch.allclose(scaled[kept], (tau["w"] / (0.9 - 0.8 * ranks / 50))[kept], rtol=1e-12)


def test_slerp_keeps_the_length_and_the_plane() -> None:
    a, b = vectors(8, 2)
    a, b = a / a.norm(), b / b.norm()
    middle = merge([a, b], "slerp")
    assert middle.norm() == pytest.approx(1)
    assert middle.cosine(a) == pytest.approx(middle.cosine(b))
    assert torch.allclose(flat(merge([a, b], "slerp", t=0.0)), flat(a))
    assert torch.allclose(flat(merge([a, a], "slerp", t=0.3)), flat(a))
    with pytest.raises(UnsafeResult, match="opposite directions"):
        merge([a, -a], "slerp")
    with pytest.raises(UsageError, match="exactly two"):
        merge([a, b, a], "slerp")


def test_model_stock_equals_the_reference() -> None:
    taus = vectors(9, 3)
    merged = merge(taus, "model_stock")
    for name in SHAPES:
        rows = torch.stack([tau[name].reshape(-1) for tau in taus])
        unit = rows / rows.norm(dim=1, keepdim=True)
        cosine = max(float((unit @ unit.T).triu(1).sum() / 3), 0)
        expected = rows.mean(0) * 3 * cosine / (1 + 2 * cosine)
        assert torch.allclose(merged[name].reshape(-1), expected, rtol=1e-12)
    same = merge([taus[0]] * 3, "model_stock")
    assert torch.allclose(flat(same), flat(taus[0]), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1e-38, -1e-45, 1.0, -1.0, 2.5, 3e38, 0.1]), min_size=1, max_size=60),
    wide=st.booleans(),
    data=st.data(),
)
def test_counted_ranks_equal_sorting(values: list[float], wide: bool, data: st.DataObject) -> None:
    row = torch.tensor(values, dtype=torch.float64 if wide else torch.float32)
    ranks = data.draw(st.lists(st.integers(1, len(values)), min_size=1, max_size=3))
    ordered = row.abs().sort(descending=True).values
    (found,) = magnitudes_at(lambda f: map(f, ([part] for part in row.split(7))), [ranks], row.dtype)
    assert [level.magnitude for level in found] == [float(ordered[rank - 1]) for rank in ranks]
    for level in found:
        assert level.above == int((ordered > level.magnitude).sum())
        assert level.equal == int((ordered == level.magnitude).sum())


@pytest.mark.parametrize("method", list(MERGES))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), power=st.integers(-3, 3))
def test_every_merge_keeps_its_contract(method: str, seed: int, power: int) -> None:
    taus = vectors(seed)
    merged = run(method, taus)
    assert {n: tuple(t.shape) for n, t in merged.items()} == SHAPES
    assert torch.equal(flat(run(method, taus)), flat(merged))  # deterministic
    scaled = run(method, [tau * 2.0**power for tau in taus])
    assert torch.allclose(flat(scaled), flat(merged) * 2.0**power, rtol=1e-12)
    flipped = run(method, [-tau for tau in taus])
    assert torch.allclose(flat(flipped), -flat(merged), rtol=1e-12)


@pytest.mark.parametrize("method", sorted(set(MERGES) - set(RANDOM) - {"slerp"}))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(4)))
def test_order_of_the_vectors_does_not_matter(method: str, seed: int, order: list[int]) -> None:
    taus = vectors(seed, 4)
    shuffled = run(method, [taus[i] for i in order])
    assert torch.allclose(flat(shuffled), flat(run(method, taus)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", list(MERGES))
def test_piece_size_does_not_matter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method in RANDOM:
        pytest.skip("the piece is the unit of randomness")
    taus = vectors(11)
    small = flat(run(method, taus))
    monkeypatch.setattr(gradfix.merging.bundles, "CHUNK", 1 << 18)
    assert torch.allclose(flat(run(method, taus)), small, rtol=1e-12)


def test_a_generator_is_as_good_as_a_seed_and_one_of_them_is_needed() -> None:
    taus = vectors(0)
    first = merge(taus, "dare_ties", generator=torch.Generator().manual_seed(1))
    again = merge(taus, "dare_ties", generator=torch.Generator().manual_seed(1))
    other = merge(taus, "dare_ties", generator=torch.Generator().manual_seed(2))
    assert torch.equal(flat(first), flat(again)) and not torch.equal(flat(first), flat(other))
    for method in RANDOM:
        with pytest.raises(UsageError, match="needs randomness as an argument"):
            merge(taus, method)


def test_consensus_is_the_most_frequent_voted_sign() -> None:
    tasks = [votes_for(seed) for seed in range(4)]
    common = consensus(tasks)
    assert common.count == 4
    for name, direction in common.direction().items():
        stacked = torch.stack([task[name].sign() for task in tasks])
        up, down = (stacked == 1).sum(0), (stacked == -1).sum(0)
        assert torch.equal(direction, torch.where(up > down, 1, torch.where(down > up, -1, 0)).to(torch.int8))
    assert torch.equal(consensus(tasks[:1])["scale"], tasks[0]["scale"].sign())


def test_consensus_refuses_strangers() -> None:
    with pytest.raises(UsageError):
        consensus([])
    with pytest.raises(IncompatibleCheckpoints, match="differ in 1 tensor names, first 'b'"):
        consensus([SignVotes({"a": torch.ones(2)}, 1), SignVotes({"a": torch.ones(2), "b": torch.ones(1)}, 1)])
    votes = {"a": torch.ones(2, dtype=torch.int8)}
    with pytest.raises(IncompatibleCheckpoints, match="different weights"):
        consensus([SignVotes(votes, 1, target_hash="x"), SignVotes(votes, 1, target_hash="y")])


@pytest.mark.parametrize("mask", ["agree", "force", "veto"])
def test_pipelines_are_their_parts(mask: str) -> None:
    taus, tasks = vectors(12), [votes_for(seed) for seed in range(3)]
    first = mask_then_merge(taus, tasks, "ties", mask=mask)
    by_hand = merge([transport(t, v, mask).update for t, v in zip(taus, tasks, strict=True)], "ties")
    assert torch.equal(flat(first.update), flat(by_hand))
    last = merge_then_mask(taus, tasks, "ties", mask=mask)
    assert torch.equal(flat(last.update), flat(transport(merge(taus, "ties"), consensus(tasks), mask).update))
    assert first.config["order"] == "mask_then_merge" and last.config["method"] == "ties"


def test_shared_votes_mask_every_source() -> None:
    taus, votes = vectors(13), votes_for(1)
    shared = mask_then_merge(taus, votes, "mean")
    assert torch.equal(flat(shared.update), flat(mask_then_merge(taus, [votes] * 3, "mean").update))
    direction = torch.cat([votes[name].reshape(-1) for name in SHAPES]).sign()
    assert bool((flat(shared.update) * direction >= 0).all())
    with pytest.raises(UsageError, match="2 votes for 3 vectors"):
        mask_then_merge(taus, [votes, votes], "mean")


def test_mistakes_are_named() -> None:
    taus = vectors(0)
    with pytest.raises(UsageError, match="no merge called 'tise'.*Did you mean 'ties'"):
        merge(taus, "tise")
    with pytest.raises(UsageError, match="no option of this merge called 'per_tenser'.*'per_tensor'"):
        merge(taus, "ties", per_tenser=True)
    with pytest.raises(UsageError, match="'lam': this merge has none"):
        merge(taus, "model_stock", lam=1)
    with pytest.raises(UsageError, match="takes no weights"):
        merge(taus, "model_stock", [1, 1, 1])
    with pytest.raises(UsageError, match="2 weights for 3 vectors"):
        merge(taus, "mean", [1, 1])
    with pytest.raises(UsageError, match="density"):
        merge(taus, "ties", density=0)
    with pytest.raises(UsageError, match="no election called 'sum'"):
        merge(taus, "ties", election="sum")
    with pytest.raises(UsageError, match="sum to 0"):
        merge(taus, "mean", [1, 1, -2])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge([])
    with pytest.raises(IncompatibleCheckpoints, match="vectors 1 and 3 differ in 1 tensor names, first 'scale'"):
        merge([taus[0], taus[1], taus[2].subset([n for n in SHAPES if n != "scale"])])
    with pytest.raises(IncompatibleCheckpoints, match="'scale' is"):
        merge([taus[0], taus[1].map(lambda n, t: t.reshape(1) if n == "scale" else t)])


def test_empty_tensors_pass_through() -> None:
    taus = [TaskVector({"a": torch.randn(3), "none": torch.empty(0, 4)}) for _ in range(2)]
    for method in MERGES:
        assert run(method, taus)["none"].shape == (0, 4)


def nearest(columns: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns, by the inverse root of its Gram matrix."""
    values, vectors = torch.linalg.eigh(columns.T @ columns)
    return columns @ vectors @ torch.diag(values.rsqrt()) @ vectors.T


def test_tsv_makes_the_tasks_singular_vectors_orthogonal() -> None:
    taus = vectors(5, 2)
    found = merge(taus, "tsv")["layer.0.weight"]
    lefts, values, rights = zip(
        *(torch.linalg.svd(tau["layer.0.weight"], full_matrices=False) for tau in taus), strict=True
    )
    kept = 7 // 2
    left = nearest(torch.cat([u[:, :kept] for u in lefts], dim=1))
    right = nearest(torch.cat([v[:kept].T for v in rights], dim=1))
    expected = left @ torch.diag(torch.cat([s[:kept] for s in values])) @ right.T
    assert torch.allclose(found, expected, atol=1e-10)
    assert torch.allclose(merge(taus, "tsv")["layer.0.bias"], (taus[0]["layer.0.bias"] + taus[1]["layer.0.bias"]) / 2)


def test_isotropic_merges_have_equal_singular_values() -> None:
    taus = vectors(6, 3)
    total = sum(tau["layer.0.weight"] for tau in taus)
    values = torch.linalg.svdvals(total)
    flat_spectrum = torch.linalg.svdvals(merge(taus, "iso_c")["layer.0.weight"])
    assert torch.allclose(flat_spectrum, values.mean().expand(7))
    everything = merge(taus, "iso_cts", common=1.0)["layer.0.weight"]
    assert torch.allclose(everything, merge(taus, "iso_c")["layer.0.weight"])
    specific = merge(taus, "iso_cts", common=0.5)["layer.0.weight"]
    assert torch.allclose(torch.linalg.svdvals(specific), torch.linalg.svdvals(specific).mean().expand(7))
    assert not torch.allclose(specific, everything)


def test_knots_merges_in_a_shared_basis() -> None:
    taus = vectors(7, 3)
    mean = merge(taus, "knots", density=1.0)["layer.0.weight"]
    side = torch.cat([tau["layer.0.weight"] for tau in taus], dim=1)
    left, values, right = torch.linalg.svd(side, full_matrices=False)
    parts = torch.stack(right.split(11, dim=1))
    expected = left @ torch.diag(values) @ elect(parts)
    assert torch.allclose(mean, expected, atol=1e-10)
    one = merge(taus[:1], "knots", density=1.0)["layer.0.weight"]
    assert torch.allclose(one, taus[0]["layer.0.weight"])


def test_exactly_k_entries_are_kept_where_magnitudes_are_equal() -> None:
    signs = torch.Generator().manual_seed(0)
    tau = TaskVector({"w": torch.where(torch.rand(7, 9, generator=signs) > 0.5, 1.0, -1.0)})
    assert int((merge([tau], "ties", density=0.3)["w"] != 0).sum()) == 63
    kept = merge([tau], "ties", density=0.3, exact=True)["w"]
    assert torch.equal(kept.flatten() != 0, torch.arange(63) < 18)  # the first in the file
    middle = merge([tau], "breadcrumbs", density=0.3, gamma=0.1, exact=True)["w"]
    assert torch.equal(middle.flatten() != 0, (torch.arange(63) >= 6) & (torch.arange(63) < 24))
