"""The merges that add entries up: how several task vectors become one, each to its own paper's definition.

The keyword arguments of a planner are the options users may set. tau_t is the t-th task vector, w_t its
weight; `density` is the share of entries a method keeps. Merges on spheres and of spectra stand beside this file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradfix.errors import UsageError
from gradfix.merging import spectra, spheres
from gradfix.merging.bundles import DENSITY, MERGES, Bundle, PiecePlace, Rule, merge_method, row_length
from gradfix.merging.ranks import magnitudes_at
from gradfix.merging.shares import Cuts, Election, combination, ranks_in_rows, summed, uniform
from gradfix.registry import unknown

__all__ = ["MERGES", "merge_method", "spectra", "spheres"]

LEAST_SHARE = 1e-6


@merge_method("task_arithmetic")
def task_arithmetic(bundle: Bundle, *, weights: list[float]) -> Rule:
    """sum_t w_t tau_t (Ilharco et al. 2023)."""
    return lambda place, pieces: combination(pieces, weights)


@merge_method("mean")
def mean(bundle: Bundle, *, weights: list[float]) -> Rule:
    """sum_t w_t tau_t / sum_t w_t: a weighted average of the fine-tunes that share a base."""
    total = sum(weights)
    if total == 0:
        raise UsageError("the weights of a mean must not sum to 0.")
    return lambda place, pieces: combination(pieces, weights) / total


@merge_method("ties")
def ties(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    per_tensor: bool = False,
    election: str = "mass",
    normalize: bool = True,
    exact: bool = False,
) -> Rule:
    """Trim, elect, disjoint mean (Yadav et al. 2023).

    Trim: of each whole vector keep the max(1, floor(density n)) largest magnitudes, and what equals the
    smallest of them (`exact`: no more than that many; `per_tensor`: of each tensor). Elect: gamma = sign(sum_t w_t tau_t) (`election="count"`:
    the sign of most vectors, by weight); where the sides balance nothing is kept. Merge: over the vectors
    with sign gamma, sum w_t tau_t / sum |w_t| (`normalize=False`: the sum alone)."""
    elected = _election(election, normalize)
    if all(share == 1 for share in density):
        return lambda place, pieces: elected.of(pieces, weights)
    cuts = Cuts(bundle, per_tensor, lambda vector, entries: [_kept(density, vector, entries)], exact)
    cuts.tell(density)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return elected.of([cuts.kept(place, piece, vector) for vector, piece in enumerate(pieces)], weights)

    return rule


@merge_method("dare_linear")
def dare_linear(
    bundle: Bundle, *, weights: list[float], density: Sequence[float] = DENSITY, seed: int, rescale: bool = True
) -> Rule:
    """sum_t w_t m_t tau_t / density, m_t ~ Bernoulli(density) (Yu et al. 2024).

    Their drop rate is 1 - density. `rescale=False` leaves the survivors as they are."""

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return combination(_dropped(place, pieces, density, seed, rescale), weights)

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
    elected = _election(election, normalize)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return elected.of(_dropped(place, pieces, density, seed, rescale), weights)

    return rule


@merge_method("breadcrumbs")
def breadcrumbs(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    gamma: float = 0.01,
    per_tensor: bool = True,
    exact: bool = False,
) -> Rule:
    """sum_t w_t m_t tau_t; m_t drops both tails of the magnitudes (Davari and Belilovsky 2024).

    Of each tensor's n entries the floor(gamma n) largest are outliers, the next max(1, floor(density n)) are
    kept (with what equals the first or the last of them, unless `exact`), the rest is noise."""
    window = MiddleRanks(bundle, density, gamma, per_tensor, exact)
    return lambda place, pieces: combination(window.kept(place, pieces), weights)


@merge_method("breadcrumbs_ties")
def breadcrumbs_ties(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    gamma: float = 0.01,
    exact: bool = False,
    election: str = "mass",
    normalize: bool = True,
) -> Rule:
    """Breadcrumbs's two cuts in each tensor in the place of TIES's trim, then TIES's election and disjoint mean."""
    elected, window = _election(election, normalize), MiddleRanks(bundle, density, gamma, True, exact)
    return lambda place, pieces: elected.of(window.kept(place, pieces), weights)


class MiddleRanks:
    """The middle of the magnitudes: between the outliers and the noise."""

    def __init__(
        self, bundle: Bundle, density: Sequence[float], gamma: float, per_tensor: bool, exact: bool = False
    ) -> None:
        if not 0 <= gamma < 1 or any(gamma + share > 1 for share in density):
            raise UsageError(f"gamma must be at least 0, and gamma + density at most 1; got {gamma} and {density}.")

        def ends(vector: int, entries: int) -> list[int]:
            outliers = int(gamma * entries)
            first = outliers if exact else outliers + 1
            return [first, min(outliers + _kept(density, vector, entries), entries)]

        self.cuts, self.exact = Cuts(bundle, per_tensor, ends, exact), exact

    def kept(self, place: PiecePlace, pieces: list[Tensor]) -> list[Tensor]:
        if self.exact:
            within = self.cuts.within
            return [p * (within(place, p, v, 1) & ~within(place, p, v, 0)) for v, p in enumerate(pieces)]
        kept = []
        for piece, (top, floor) in zip(pieces, self.cuts.levels(place.name), strict=True):
            size = piece.abs()
            kept.append(piece.masked_fill((size < floor.magnitude) | (size > top.magnitude), 0))
        return kept


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
    elected = _election(election, normalize)
    _check_epsilon(density, epsilon)
    return lambda place, pieces: elected.of(_pruned(place, pieces, density, epsilon, seed, rescale), weights)


@merge_method("della_linear", whole_rows=True)
def della_linear(
    bundle: Bundle,
    *,
    weights: list[float],
    density: Sequence[float] = DENSITY,
    epsilon: float = 0.1,
    seed: int,
    rescale: bool = True,
) -> Rule:
    """sum_t w_t of the vectors as DELLA prunes them, without an election."""
    _check_epsilon(density, epsilon)
    return lambda place, pieces: combination(_pruned(place, pieces, density, epsilon, seed, rescale), weights)


@merge_method("sce")
def sce(bundle: Bundle, *, select: float = 1.0) -> Rule:
    """Select, calculate, erase (FuseChat, Wan et al. 2024), tensor by tensor.

    Select: of the entries in which the vectors differ, the share `select` with the largest variance across the
    vectors. Calculate: w_t = ||tau_t||^2 / sum_s ||tau_s||^2 of what is selected. Erase: entries against the sign
    of the summed vectors. What is left is averaged by w_t."""
    if not 0 < select <= 1:
        raise UsageError(f"select must lie above 0 and at most at 1, got {select}.")
    return spread(bundle, select)


def spread(bundle: Bundle, select: float, least: float = 0.0) -> Rule:
    """SCE; vectors whose mean squares add up to no more than `least` weigh the same, and `select` 0 keeps nothing."""
    chosen = {name: _Selection(bundle, name, select, least) for name in bundle.shapes if bundle.numel(name)}

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        here = chosen[place.name]
        picked = here.of(pieces)
        sign = torch.where(summed(picked) < 0, -1.0, 1.0).to(picked[0].dtype)
        total, share = torch.zeros_like(sign), torch.zeros_like(sign)
        for part, weight in zip(picked, here.weights, strict=True):
            agreeing = part.sign() == sign
            total += part * agreeing * weight
            share += agreeing * weight
        return total / share.clamp_min_(LEAST_SHARE)

    return rule


class _Selection:
    """The entries of one tensor in which the vectors differ most, and how much each vector has in them."""

    def __init__(self, bundle: Bundle, name: str, select: float, least: float) -> None:
        self.floor = self._floor(bundle, name, select) if select < 1 else None
        squares = [0.0] * bundle.count
        for found in bundle.measured(self._squares, name):
            squares = [whole + part for whole, part in zip(squares, found, strict=True)]
        total = sum(squares)
        alike = total <= least * bundle.numel(name)
        self.weights = [1 / bundle.count if alike else square / total for square in squares]

    @staticmethod
    def _floor(bundle: Bundle, name: str, select: float) -> float:
        differing = sum(bundle.measured(lambda pieces: int(_variance(pieces).count_nonzero()), name))
        wanted = int(differing * select)
        if wanted == 0:
            return math.inf
        ((level,),) = magnitudes_at(
            lambda measure: bundle.measured(lambda pieces: measure([_variance(pieces)]), name), [[wanted]], bundle.dtype
        )
        return level.magnitude

    def _squares(self, pieces: list[Tensor]) -> list[float]:
        return [float(torch.dot(part, part)) for part in (part.double() for part in self.of(pieces))]

    def of(self, pieces: list[Tensor]) -> list[Tensor]:
        if self.floor is None:
            return pieces
        here = _variance(pieces) >= self.floor
        return [piece * here for piece in pieces]


def _variance(pieces: list[Tensor]) -> Tensor:
    return torch.stack(pieces).var(dim=0, unbiased=False)


def _election(by: str, normalize: bool) -> Election:
    if by not in ("mass", "count"):
        raise UsageError(unknown("election", by, ["mass", "count"]))
    return Election(by, normalize)


def _kept(density: Sequence[float], vector: int, entries: int) -> int:
    return max(1, int(density[vector] * entries))


def _dropped(
    place: PiecePlace, pieces: list[Tensor], density: Sequence[float], seed: int, rescale: bool
) -> list[Tensor]:
    kept = []
    for vector, (piece, share) in enumerate(zip(pieces, density, strict=True)):
        survivors = piece.masked_fill(uniform(place, vector, piece, seed) >= share, 0)
        kept.append(survivors / share if rescale else survivors)
    return kept


def _check_epsilon(density: Sequence[float], epsilon: float) -> None:
    for share in density:
        if not (epsilon >= 0 and epsilon / 2 < share <= 1 - epsilon / 2):
            raise UsageError(
                f"della's drop rates must lie in 0..1: density between epsilon/2 and 1 - epsilon/2, "
                f"got density {share} and epsilon {epsilon}."
            )


def _pruned(
    place: PiecePlace, pieces: list[Tensor], density: Sequence[float], epsilon: float, seed: int, rescale: bool
) -> list[Tensor]:
    length = row_length(place.shape)
    pruned = []
    for vector, (piece, share) in enumerate(zip(pieces, density, strict=True)):
        ranks = ranks_in_rows(piece.view(-1, length)).view(-1)
        stay = share + epsilon / 2 - (epsilon / length) * ranks.to(piece.dtype)
        kept = piece.masked_fill(uniform(place, vector, piece, seed) >= stay, 0)
        pruned.append(kept / stay if rescale else kept)
    return pruned
