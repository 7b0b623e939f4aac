"""The merges: how several task vectors become one, each to its own paper's definition.

The keyword arguments of a planner are the options users may set. tau_t is the t-th task vector, w_t its
weight; `density` is the share of entries a method keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gradfix.errors import UnsafeResult, UsageError
from gradfix.merging.bundles import DENSITY, Bundle, Merge, PiecePlace, Rule, row_length
from gradfix.merging.ranks import magnitudes_at
from gradfix.registry import Registry, unknown
from gradfix.vectors.transported import chance

PARALLEL = 0.9995  # beyond this cosine an arc and a straight line are the same in float32


MERGES: Registry[Merge] = Registry("merge")


def merge_method(name: str, whole_rows: bool = False) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Register a planner: `@merge_method("mean")` over a function of (bundle, *, its options)."""

    def add(plan: Callable[..., Rule]) -> Callable[..., Rule]:
        MERGES.register(name)(Merge(plan, whole_rows))
        return plan

    return add


@merge_method("task_arithmetic")
def task_arithmetic(bundle: Bundle, *, weights: list[float]) -> Rule:
    """sum_t w_t tau_t (Ilharco et al. 2023)."""
    return lambda place, pieces: _sum(_scaled(pieces, weights))


@merge_method("mean")
def mean(bundle: Bundle, *, weights: list[float]) -> Rule:
    """sum_t w_t tau_t / sum_t w_t: a weighted average of the fine-tunes that share a base."""
    total = sum(weights)
    if total == 0:
        raise UsageError("the weights of a mean must not sum to 0.")
    return lambda place, pieces: _sum(_scaled(pieces, weights)) / total


@merge_method("ties")
def ties(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    per_tensor: bool = False,
    election: str = "mass",
    normalize: bool = True,
) -> Rule:
    """Trim, elect, disjoint mean (Yadav et al. 2023).

    Trim: of each whole vector keep the max(1, floor(density n)) largest magnitudes, and what equals the
    smallest of them (`per_tensor`: of each tensor). Elect: gamma = sign(sum_t w_t tau_t) (`election="count"`:
    the sign of most vectors, by weight); where the sides balance nothing is kept. Merge: over the vectors
    with sign gamma, sum w_t tau_t / sum |w_t| (`normalize=False`: the sum alone)."""
    _check_election(election)
    if all(share == 1 for share in density):
        return lambda place, pieces: _elected(pieces, weights, election, normalize)
    floors = _levels(bundle, per_tensor, lambda vector, entries: [_kept(density, vector, entries)])

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        levels = floors(place.name)
        trimmed = [_at_least(piece, floor) for piece, (floor,) in zip(pieces, levels, strict=True)]
        return _elected(trimmed, weights, election, normalize)

    return rule


@merge_method("dare_linear")
def dare_linear(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    seed: int,
    rescale: bool = True,
) -> Rule:
    """sum_t w_t m_t tau_t / density, m_t ~ Bernoulli(density) (Yu et al. 2024).

    Their drop rate is 1 - density. `rescale=False` leaves the survivors as they are."""

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return _sum(_scaled(_dropped(place, pieces, density, seed, rescale), weights))

    return rule


@merge_method("dare_ties")
def dare_ties(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    seed: int,
    rescale: bool = True,
    election: str = "mass",
    normalize: bool = True,
) -> Rule:
    """DARE's random drop and rescale in the place of TIES's trim, then TIES's election and disjoint mean."""
    _check_election(election)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        dropped = _dropped(place, pieces, density, seed, rescale)
        return _elected(dropped, weights, election, normalize)

    return rule


@merge_method("breadcrumbs")
def breadcrumbs(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    gamma: float = 0.01,
    per_tensor: bool = True,
) -> Rule:
    """sum_t w_t m_t tau_t; m_t drops both tails of the magnitudes (Davari and Belilovsky 2024).

    Of each tensor's n entries the floor(gamma n) largest are outliers, the next max(1, floor(density n)) are
    kept (with what equals the first or the last of them), the rest is noise."""
    if not 0 <= gamma < 1 or any(gamma + share > 1 for share in density):
        raise UsageError(
            f"gamma must be at least 0, and gamma + density at most 1; got {gamma} and {density}."
        )

    def ends(vector: int, entries: int) -> list[int]:
        outliers = int(gamma * entries)
        return [outliers + 1, min(outliers + _kept(density, vector, entries), entries)]

    bounds = _levels(bundle, per_tensor, ends)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        kept = []
        for piece, (top, floor) in zip(pieces, bounds(place.name), strict=True):
            size = piece.abs()
            kept.append(piece.masked_fill((size < floor) | (size > top), 0))
        return _sum(_scaled(kept, weights))

    return rule


@merge_method("della", whole_rows=True)
def della(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    epsilon: float = 0.1,
    seed: int,
    rescale: bool = True,
    election: str = "mass",
    normalize: bool = True,
) -> Rule:
    """Drop small entries more often than large ones, rescale, elect, disjoint mean (Deep et al. 2024).

    In each row of n entries (the inputs of one output; a 1-D tensor is one row) the entry of rank r, 0 for the
    largest, is dropped with p_r = (1 - density) - epsilon/2 + epsilon r/n and otherwise divided by 1 - p_r."""
    _check_election(election)
    for share in density:
        if not (epsilon >= 0 and epsilon / 2 < share <= 1 - epsilon / 2):
            raise UsageError(
                f"della's drop rates must lie in 0..1: density between epsilon/2 and 1 - epsilon/2, "
                f"got density {share} and epsilon {epsilon}."
            )

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        length = row_length(place.shape)
        pruned = []
        for vector, (piece, share) in enumerate(zip(pieces, density, strict=True)):
            ranks = _ranks_in_rows(piece.view(-1, length)).view(-1)
            stay = share + epsilon / 2 - (epsilon / length) * ranks.to(piece.dtype)
            kept = piece.masked_fill(_uniform(place, vector, piece, seed) >= stay, 0)
            pruned.append(kept / stay if rescale else kept)
        return _elected(pruned, weights, election, normalize)

    return rule


@merge_method("slerp")
def slerp(bundle: Bundle, *, t: float = 0.5) -> Rule:
    """sin((1-t) w)/sin(w) tau_1 + sin(t w)/sin(w) tau_2, w the angle between the whole vectors.

    Two vectors only. Nearly parallel ones (or a zero one) are interpolated on the straight line; between
    opposite ones no arc is defined, which is an error."""
    if bundle.count != 2:
        raise UsageError(f"slerp takes exactly two vectors, got {bundle.count}.")
    if not 0 <= t <= 1:
        raise UsageError(f"t must lie between 0 and 1, got {t}.")
    gram = _gram(bundle)
    cosine = _cosine(gram, 0, 1)
    if cosine < -PARALLEL:
        raise UnsafeResult(
            f"the two vectors point in opposite directions (cosine {cosine:.4f}): no arc joins them."
        )
    weights = [1 - t, t]
    if cosine <= PARALLEL and gram[0][0] > 0 and gram[1][1] > 0:
        angle = math.acos(cosine)
        weights = [math.sin(share * angle) / math.sin(angle) for share in weights]
    return lambda place, pieces: _sum(_scaled(pieces, weights))


@merge_method("model_stock")
def model_stock(bundle: Bundle) -> Rule:
    """r mean(tau) with r = K c / (1 + (K - 1) c), per tensor (Jang et al. 2024).

    c is the mean cosine between the K vectors in that tensor; where they do not agree at all (c <= 0)
    the tensor stays at its base."""
    count = bundle.count
    if count < 2:
        raise UsageError("model_stock needs at least two vectors.")
    ratios: dict[str, float] = {}
    for name in bundle.shapes:
        gram = _gram(bundle, name)
        pairs = [_cosine(gram, i, j) for i in range(count) for j in range(i + 1, count)]
        cosine = max(sum(pairs) / len(pairs), 0.0)
        ratios[name] = count * cosine / (1 + (count - 1) * cosine)
    return lambda place, pieces: _sum(pieces) * (ratios[place.name] / count)


def _scaled(pieces: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    return [piece if weight == 1 else piece * weight for piece, weight in zip(pieces, weights, strict=True)]


def _sum(pieces: Sequence[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0].clone()
    total = pieces[0] + pieces[1]
    for piece in pieces[2:]:
        total += piece
    return total


def _elected(pieces: Sequence[Tensor], weights: Sequence[float], election: str, normalize: bool) -> Tensor:
    scaled = _scaled(pieces, weights)
    if election == "mass":
        sign = _sum(scaled).sign_()
    else:
        sign = _sum(_scaled([part.sign() for part in scaled], [abs(weight) for weight in weights])).sign_()
    total, share = torch.zeros_like(sign), torch.zeros_like(sign)
    for part, weight in zip(scaled, weights, strict=True):
        agreeing = (part * sign).clamp_min_(0)  # its size where it has the elected sign
        total += agreeing
        share.add_(agreeing.sign_(), alpha=abs(weight))
    total *= sign
    return total / share.masked_fill_(share == 0, 1) if normalize else total


def _at_least(piece: Tensor, floor: float) -> Tensor:
    """Zero where the magnitude is below the floor. `hardshrink` is one pass, but drops what equals its bound."""
    if floor == 0:
        return piece
    kind = np.float64 if piece.dtype is torch.float64 else np.float32
    return torch.nn.functional.hardshrink(piece, float(np.nextafter(kind(floor), kind(0))))


def _check_election(election: str) -> None:
    if election not in ("mass", "count"):
        raise UsageError(unknown("election", election, ["mass", "count"]))


def _kept(density: Sequence[float], vector: int, entries: int) -> int:
    return max(1, int(density[vector] * entries))


def _levels(
    bundle: Bundle, per_tensor: bool, ranks: Callable[[int, int], list[int]]
) -> Callable[[str], list[list[float]]]:
    """Every vector's magnitudes at the ranks wanted, within each tensor or over the whole vector."""

    def search(name: str | None = None) -> list[list[float]]:
        wanted = [ranks(vector, bundle.numel(name)) for vector in range(bundle.count)]
        return magnitudes_at(lambda measure: bundle.measured(measure, name), wanted, bundle.dtype)

    if not per_tensor:
        everywhere = search()
        return lambda name: everywhere
    found = {name: search(name) for name in bundle.shapes if bundle.numel(name)}
    return found.__getitem__


def _uniform(place: PiecePlace, vector: int, piece: Tensor, seed: int) -> Tensor:
    draw = chance(seed, f"{vector}\0{place.name}", place.index).random(piece.numel(), dtype="float32")
    return torch.from_numpy(draw).to(piece.device)


def _dropped(
    place: PiecePlace, pieces: list[Tensor], density: Sequence[float], seed: int, rescale: bool
) -> list[Tensor]:
    kept = []
    for vector, (piece, share) in enumerate(zip(pieces, density, strict=True)):
        survivors = piece.masked_fill(_uniform(place, vector, piece, seed) >= share, 0)
        kept.append(survivors / share if rescale else survivors)
    return kept


def _ranks_in_rows(rows: Tensor) -> Tensor:
    order = rows.abs().argsort(dim=1, descending=True, stable=True)
    numbers = torch.arange(rows.shape[1], device=rows.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, numbers)


def _gram(bundle: Bundle, name: str | None = None) -> list[list[float]]:
    """Dot products of all pairs, summed in float64 in the order of the walk."""
    pairs = [(i, j) for i in range(bundle.count) for j in range(i, bundle.count)]
    gram = [[0.0] * bundle.count for _ in range(bundle.count)]

    def products(pieces: list[Tensor]) -> list[float]:
        wide = [piece.double() for piece in pieces]
        return [float((wide[i] * wide[j]).sum()) for i, j in pairs]

    for found in bundle.measured(products, name):
        for (i, j), product in zip(pairs, found, strict=True):
            gram[i][j] += product
    return gram


def _cosine(gram: list[list[float]], i: int, j: int) -> float:
    scale = (gram[i][i] * gram[j][j]) ** 0.5
    return max(-1.0, min(1.0, gram[i][j] / scale)) if scale else 0.0
