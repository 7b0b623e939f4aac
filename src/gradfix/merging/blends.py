"""mergekit's sums of task vectors, one tensor at a time: trimmed, dropped at random, with and without an election.

Where mergekit's definition is another than the paper's (which gradfix's own merges follow), mergekit's is kept: a file
means what it meant. It trims every tensor by itself and to exactly k entries, gives back the L1 norm where it rescales,
lets draws of an election go to plus, and divides by the sum of the weights, whatever their signs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradfix.errors import UsageError
from gradfix.merging.bundles import Bundle, Merge, PiecePlace, Rule, row_length
from gradfix.merging.dialect import NEEDED, Given, Parameters, mergekit_method
from gradfix.merging.shares import Cuts, Election, combination, ranks_in_rows, uniform

NO_WEIGHT = 1e-8  # weights that sum to less are not divided by their sum
VANISHING = 1e-7
SUM: Parameters = {
    "normalize": (bool, False),
    "rescale": (bool, False),
    "lambda": (float, 1.0),
    "int8_mask": (bool, False),
}
WEIGHT: Parameters = {"weight": (float, NEEDED)}
DENSE: Parameters = {**WEIGHT, "density": (float, 1.0)}
CRUMBS: Parameters = {**DENSE, "gamma": (float, 0.01)}
PRUNE: Parameters = {**DENSE, "epsilon": (float, 0.15)}


def _defaults(normalize: bool = False, rescale: bool = False) -> Parameters:
    return {**SUM, "normalize": (bool, normalize), "rescale": (bool, rescale)}


Sparse = Callable[[PiecePlace, Tensor, int], Tensor]


def _added(given: Given, sparse: Sparse, factors: Sequence[float] | None = None) -> Rule:
    """lambda sum w_t tau_t, divided by the weights' sum where `normalize` says so."""
    weights, lift = given.each("weight"), given.shared["lambda"]
    total = sum(weights)
    divisor = total if given.shared["normalize"] and abs(total) >= NO_WEIGHT else 1.0

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        kept = _lifted(place, pieces, sparse, factors)
        mixed = combination(kept, weights)
        return _times(mixed / divisor if divisor != 1 else mixed, lift)

    return rule


def _elected(given: Given, sparse: Sparse, factors: Sequence[float] | None = None) -> Rule:
    """The same over the vectors that have the sign of the weighted sum; draws go to plus."""
    weights, lift = given.each("weight"), given.shared["lambda"]
    election = Election("mass", given.shared["normalize"], draws_to_plus=True, signed=True)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return _times(election.of(_lifted(place, pieces, sparse, factors), weights), lift)

    return rule


def _times(mixed: Tensor, lift: float) -> Tensor:
    return mixed if lift == 1 else mixed * lift


def _lifted(place: PiecePlace, pieces: list[Tensor], sparse: Sparse, factors: Sequence[float] | None) -> list[Tensor]:
    kept = [sparse(place, piece, vector) for vector, piece in enumerate(pieces)]
    if factors is None:
        return kept
    return [part if factor == 1 else part * factor for part, factor in zip(kept, factors, strict=True)]


def _factors(
    bundle: Bundle, given: Given, sparse: Sparse, size: Callable[[tuple[int, ...]], int]
) -> list[float] | None:
    """What gives every vector back the L1 norm it had, where `rescale` says so."""
    if not given.shared["rescale"]:
        return None
    (name,), before, after = bundle.shapes, [0.0] * bundle.count, [0.0] * bundle.count
    shape = bundle.shapes[name]
    for index, pieces in enumerate(bundle.pieces(name, size(shape))):
        for vector, piece in enumerate(pieces):
            before[vector] += float(piece.abs().sum(dtype=torch.float64))
            kept = sparse(PiecePlace(name, shape, index), piece, vector)
            after[vector] += float(kept.abs().sum(dtype=torch.float64))
    pairs = zip(before, after, given.each("density"), strict=True)
    return [1.0 if d >= 1 or min(b, a) < VANISHING else b / a for b, a, d in pairs]


def _sparsely(bundle: Bundle, given: Given, sparse: Sparse, elect: bool, rows: bool = False) -> Rule:
    factors = _factors(bundle, given, sparse, Merge(lambda: None, rows).piece_size)  # type: ignore[arg-type, return-value]
    return (_elected if elect else _added)(given, sparse, factors)


def _whole(place: PiecePlace, piece: Tensor, vector: int) -> Tensor:
    return piece


@mergekit_method("task_arithmetic", shared=_defaults(), own=DENSE)
def _task_arithmetic(bundle: Bundle, given: Given) -> Rule:
    return _added(given, _whole)


@mergekit_method("ties", shared=_defaults(normalize=True), own=DENSE)
def _ties(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _largest(bundle, given.each("density")), elect=True)


def _largest(bundle: Bundle, density: Sequence[float]) -> Sparse:
    """Exactly the max(1, floor(density n)) largest magnitudes; all from density 1 on, none from 0 down."""
    if all(share >= 1 for share in density):
        return _whole
    cuts = Cuts(bundle, True, lambda vector, entries: [_kept(density[vector], entries)], exact=True)
    return lambda place, piece, vector: piece if density[vector] >= 1 else cuts.kept(place, piece, vector)


def _kept(share: float, entries: int) -> int:
    return 0 if share <= 0 else min(max(1, int(share * entries)), entries)


def _coin(given: Given) -> Sparse:
    density = given.each("density")

    def sparse(place: PiecePlace, piece: Tensor, vector: int) -> Tensor:
        if density[vector] >= 1:
            return piece
        return piece.masked_fill(uniform(place, vector, piece, given.seed) >= density[vector], 0)

    return sparse


@mergekit_method("dare_linear", shared=_defaults(rescale=True), own=DENSE, random=True)
def _dare_linear(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _coin(given), elect=False)


@mergekit_method("dare_ties", shared=_defaults(rescale=True), own=DENSE, random=True)
def _dare_ties(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _coin(given), elect=True)


def _middle(bundle: Bundle, given: Given) -> Sparse:
    """Without the floor(gamma n) largest, as far as floor(density n) entries are left; of the rest the largest."""
    density, gamma = given.each("density"), given.each("gamma")
    if all(share >= 1 for share in density):
        return _whole

    def ends(vector: int, entries: int) -> list[int]:
        kept = max(int(density[vector] * entries), 0)
        noise = max(0, entries - kept - int(gamma[vector] * entries))
        return [entries - noise - kept, entries - noise]

    cuts = Cuts(bundle, True, ends, exact=True)

    def sparse(place: PiecePlace, piece: Tensor, vector: int) -> Tensor:
        if density[vector] >= 1:
            return piece
        return piece * (cuts.within(place, piece, vector, 1) & ~cuts.within(place, piece, vector, 0))

    return sparse


@mergekit_method("breadcrumbs", shared=_defaults(), own=CRUMBS)
def _breadcrumbs(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _middle(bundle, given), elect=False)


@mergekit_method("breadcrumbs_ties", shared=_defaults(), own=CRUMBS)
def _breadcrumbs_ties(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _middle(bundle, given), elect=True)


def _ranked_coin(given: Given) -> Sparse:
    """In each row kept with density - epsilon for the smallest magnitude up to density + epsilon for the largest."""
    density, epsilon = given.each("density"), given.each("epsilon")
    for share, width in zip(density, epsilon, strict=True):
        if 0 < share < 1 and not (share - width > 0 and share + width < 1):
            raise UsageError(f"density -+ epsilon must lie between 0 and 1, got density {share:g}, epsilon {width:g}.")

    def sparse(place: PiecePlace, piece: Tensor, vector: int) -> Tensor:
        share, width = density[vector], epsilon[vector]
        if not 0 < share < 1:
            return piece if share >= 1 else torch.zeros_like(piece)
        length = row_length(place.shape)
        ranks = ranks_in_rows(piece.view(-1, length)).view(-1).to(piece.dtype)
        stay = share + width - ranks * (2 * width / max(length - 1, 1))
        return piece.masked_fill(uniform(place, vector, piece, given.seed) >= stay, 0)

    return sparse


@mergekit_method("della", shared=_defaults(normalize=True, rescale=True), own=PRUNE, whole_rows=True, random=True)
def _della(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _ranked_coin(given), elect=True, rows=True)


@mergekit_method("della_linear", shared=_defaults(rescale=True), own=PRUNE, whole_rows=True, random=True)
def _della_linear(bundle: Bundle, given: Given) -> Rule:
    return _sparsely(bundle, given, _ranked_coin(given), elect=False, rows=True)
