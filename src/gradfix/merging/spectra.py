"""Merges that look at a weight matrix as a whole: its singular vectors and values, one tensor at a time.

A tensor with more than two dimensions is a matrix of its outputs; what has fewer is averaged, as in the papers' code.
Memory is that of the vectors' largest matrix; the arithmetic is float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradfix.errors import UsageError
from gradfix.merging.bundles import DENSITY, Bundle, PiecePlace, Rule, merge_method
from gradfix.merging.shares import Election, combination, scaled

Matrices = list[Tensor]


def _by_matrix(weights: Sequence[float], merged: Callable[[Matrices], Tensor]) -> Rule:
    """`merged` of the weighted matrices; the mean of whatever is none."""

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        if len(place.shape) < 2 or 0 in place.shape:
            return combination(pieces, weights) / len(pieces)
        matrices = [part.view(place.shape).flatten(1).double() for part in scaled(pieces, weights)]
        return merged(matrices).to(pieces[0].dtype).reshape(-1)

    return rule


@merge_method("tsv", whole_tensors=True)
def tsv(bundle: Bundle, *, weights: list[float]) -> Rule:
    """Task singular vectors (Gargiulo et al. 2025): of T matrices the top 1/T of each one's singular vectors, made
    orthogonal to those of the others.

    With the kept U, S, V of all tasks side by side: orthogonal(U) S orthogonal(V)^T, where orthogonal(X) is the nearest
    matrix with orthonormal columns."""

    def merged(matrices: Matrices) -> Tensor:
        kept = max(1, min(matrices[0].shape) // len(matrices))
        parts = [_top(matrix, kept) for matrix in matrices]
        left, values, right = (torch.cat(list(side), dim=-1) for side in zip(*parts, strict=True))
        return _orthogonal(left) * values @ _orthogonal(right).T

    return _by_matrix(weights, merged)


@merge_method("iso_c", whole_tensors=True)
def iso_c(bundle: Bundle, *, weights: list[float]) -> Rule:
    """Isotropic merging in the common subspace (Marczak et al. 2025): the summed matrix with every singular value at
    their mean."""

    def merged(matrices: Matrices) -> Tensor:
        left, values, right = _svd(_total(matrices))
        return values.mean() * left @ right.T

    return _by_matrix(weights, merged)


@merge_method("iso_cts", whole_tensors=True)
def iso_cts(bundle: Bundle, *, weights: list[float], common: float = 0.8) -> Rule:
    """Isotropic merging in common and task-specific subspaces (Marczak et al. 2025).

    The share `common` of the summed matrix's singular vectors; the rest is shared out evenly among the tasks, for the top
    singular vectors of what each has outside the common ones. Made orthogonal, every singular value at their mean."""
    if not 0 <= common <= 1:
        raise UsageError(f"common must lie between 0 and 1, got {common}.")

    def merged(matrices: Matrices) -> Tensor:
        left, values, right = _svd(_total(matrices))
        own = round((len(values) - int(common * len(values))) / len(matrices))
        shared = max(len(values) - own * len(matrices), 0)
        left, values, right = left[:, :shared], values[:shared], right[:, :shared]
        parts = [(left, values, right)]
        parts += [_top(matrix - left @ (left.T @ matrix), own) for matrix in matrices if own]
        lefts, found, rights = (torch.cat(list(side), dim=-1) for side in zip(*parts, strict=True))
        return found.mean() * _orthogonal(lefts) @ _orthogonal(rights).T

    return _by_matrix(weights, merged)


@merge_method("knots", whole_tensors=True)
def knots(bundle: Bundle, *, weights: list[float], density: Sequence[float] = DENSITY, rank: int | None = None) -> Rule:
    """KnOTS with TIES (Stoica et al. 2024), for adapters: trim, elect and average in a basis that all vectors share.

    [tau_1 ... tau_T] = U S [V_1 ... V_T]; of each V_t the max(1, floor(density n)) largest entries, TIES's election and
    disjoint mean, then back by U S. `rank` caps the basis; by default it has every direction above rounding."""
    election = Election()

    def merged(matrices: Matrices) -> Tensor:
        basis, values = _shared_basis(matrices, rank)
        parts = [_largest(basis.T @ m / values[:, None], density[t]).reshape(-1) for t, m in enumerate(matrices)]
        return basis * values @ election.of(parts, weights).view(len(values), -1)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        wide = [piece.double() for piece in pieces]
        if len(place.shape) < 2 or 0 in place.shape or not any(bool(part.any()) for part in wide):
            return election.of([_largest(part, density[t]) for t, part in enumerate(wide)], weights).to(pieces[0].dtype)
        return merged([part.view(place.shape).flatten(1) for part in wide]).to(pieces[0].dtype).reshape(-1)

    return rule


def _total(matrices: Matrices) -> Tensor:
    return torch.stack(matrices).sum(0)


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, values, right.T


def _top(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = _svd(matrix)
    return left[:, :count], values[:count], right[:, :count]


def _orthogonal(columns: Tensor) -> Tensor:
    left, _, right = _svd(columns)
    return left @ right.T


def _shared_basis(matrices: Matrices, rank: int | None) -> tuple[Tensor, Tensor]:
    """Left singular vectors and values of the matrices side by side, without what is rounding."""
    squares, vectors = torch.linalg.eigh(sum((m @ m.T for m in matrices[1:]), matrices[0] @ matrices[0].T))
    values = squares.flip(0).clamp_min(0).sqrt()
    least = float(values[0]) * max(matrices[0].shape) * torch.finfo(torch.float32).eps
    count = int((values > least).sum())
    count = count if rank is None else min(rank, count)
    return vectors.flip(1)[:, :count], values[:count]


def _largest(part: Tensor, share: float) -> Tensor:
    if share >= 1 or part.numel() == 0:
        return part
    level = part.abs().flatten().kthvalue(part.numel() - max(1, int(share * part.numel())) + 1).values
    return part * (part.abs() >= level)
