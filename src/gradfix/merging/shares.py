"""What the merges are made of: sums, elections, cuts by magnitude, coins, inner products.

All of it works on flat pieces that lie side by side; what needs to know the whole tensor walks its bundle first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradfix.merging.bundles import Bundle, PiecePlace
from gradfix.merging.ranks import Level, magnitudes_at
from gradfix.vectors.transported import chance

NOTICEABLE = 1.05  # a trim that keeps more than this times what was asked for is told
Ranks = Callable[[int, int], list[int]]


def scaled(pieces: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    return [piece if weight == 1 else piece * weight for piece, weight in zip(pieces, weights, strict=True)]


def summed(pieces: Sequence[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0].clone()
    total = pieces[0] + pieces[1]
    for piece in pieces[2:]:
        total += piece
    return total


def combination(pieces: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return summed(scaled(pieces, weights))


@dataclass(frozen=True)
class Election:
    """The sign that counts per entry, and what the vectors that have it add up to.

    `by` is "mass" (the sign of the weighted sum) or "count" (of most vectors, by weight). Where the sides balance
    nothing is kept, or with `draws_to_plus` what is positive. `normalize` divides by the weights of the vectors taken:
    by their sizes, or with `signed` by the weights themselves."""

    by: str = "mass"
    normalize: bool = True
    draws_to_plus: bool = False
    signed: bool = False

    def of(self, pieces: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        parts = scaled(pieces, weights)
        if self.by == "mass":
            sign = summed(parts).sign_()
        else:
            sign = combination([part.sign() for part in parts], [abs(weight) for weight in weights]).sign_()
        if self.draws_to_plus:
            sign = torch.where(sign == 0, 1.0, sign)
        total, share = torch.zeros_like(sign), torch.zeros_like(sign)
        for part, weight in zip(parts, weights, strict=True):
            agreeing = (part * sign).clamp_min_(0)  # its size where it has the elected sign
            total += agreeing
            share.add_(agreeing.sign_(), alpha=weight if self.signed else abs(weight))
        total *= sign
        return total / share.masked_fill_(share == 0, 1) if self.normalize else total


def at_least(piece: Tensor, floor: float) -> Tensor:
    """Zero where the magnitude is below the floor. `hardshrink` is one pass, but drops what equals its bound."""
    if floor == 0:
        return piece
    kind = np.float64 if piece.dtype is torch.float64 else np.float32
    return torch.nn.functional.hardshrink(piece, float(np.nextafter(kind(floor), kind(0))))


class Cuts:
    """Every vector's largest entries, up to ranks that `ranks(vector, entries)` names, within each tensor or over
    the whole vector.

    Entries that equal the last one are all taken; with `exact` those that come first in the file, up to the rank."""

    def __init__(self, bundle: Bundle, per_tensor: bool, ranks: Ranks, exact: bool = False) -> None:
        self.bundle, self.ranks, self.exact = bundle, ranks, exact
        scopes = [name for name in bundle.shapes if bundle.numel(name)] if per_tensor else [None]
        self._levels = {scope: self._search(scope) for scope in scopes}
        self._before: dict[tuple[str, int], list[list[int]]] = {}
        if exact:
            for scope in scopes:
                self._count_equals(scope)

    def levels(self, name: str) -> list[list[Level]]:
        return self._levels[name if name in self._levels else None]

    def _search(self, scope: str | None) -> list[list[Level]]:
        wanted = [self.ranks(vector, self.bundle.numel(scope)) for vector in range(self.bundle.count)]
        asked = [[max(rank, 1) for rank in ranks] for ranks in wanted]
        return magnitudes_at(lambda measure: self.bundle.measured(measure, scope), asked, self.bundle.dtype)

    def wanted(self, name: str, vector: int) -> list[int]:
        scope = name if name in self._levels else None
        return self.ranks(vector, self.bundle.numel(scope))

    def _count_equals(self, scope: str | None) -> None:
        """How many entries of the very magnitude of a cut stand before each piece; no walk where all are taken."""
        names = sorted(self.bundle.shapes) if scope is None else [scope]
        levels = self._levels[scope]
        pairs = [(v, c) for v, ranks in enumerate(levels) for c in range(len(ranks)) if self._split(names[0], v, c)]
        if not pairs:
            return

        def equals(pieces: list[Tensor]) -> list[int]:
            return [int((pieces[v].abs() == levels[v][c].magnitude).sum()) for v, c in pairs]

        seen = [[0] * len(ranks) for ranks in levels]
        for name in names:
            for index, found in enumerate(self.bundle.measured(equals, name)):
                self._before[name, index] = [list(cuts) for cuts in seen]
                for (v, c), count in zip(pairs, found, strict=True):
                    seen[v][c] += count

    def _split(self, name: str, vector: int, cut: int) -> bool:
        """Does the rank fall between entries of one magnitude?"""
        level = self.levels(name)[vector][cut]
        return self.wanted(name, vector)[cut] not in (0, level.above + level.equal)

    def within(self, place: PiecePlace, piece: Tensor, vector: int, cut: int = 0) -> Tensor:
        """Which entries of the piece are among the largest, up to the rank of this cut."""
        level, rank = self.levels(place.name)[vector][cut], self.wanted(place.name, vector)[cut]
        size = piece.abs()
        if rank == 0:
            return torch.zeros_like(size, dtype=torch.bool)
        if not (self.exact and self._split(place.name, vector, cut)):
            return size >= level.magnitude
        equal = size == level.magnitude
        room = rank - level.above - self._before[place.name, place.index][vector][cut]
        return (size > level.magnitude) | (equal & (equal.cumsum(0) <= room))

    def kept(self, place: PiecePlace, piece: Tensor, vector: int) -> Tensor:
        """The piece with zeros where it is beyond the first cut."""
        if self.exact or self.wanted(place.name, vector)[0] == 0:
            return piece * self.within(place, piece, vector)
        return at_least(piece, self.levels(place.name)[vector][0].magnitude)

    def tell(self, density: Sequence[float]) -> None:
        """Where equal magnitudes make a trim keep much more than asked for, the bundle's notes say how much."""
        if self.exact:
            return
        for vector, asked in enumerate(density):
            levels = [found[vector][-1] for found in self._levels.values()]
            share = sum(level.above + level.equal for level in levels) / max(self.bundle.numel(), 1)
            if share > NOTICEABLE * asked:
                self.bundle.notes.append(
                    f"density {asked:g} keeps {share:.0%} of vector {vector + 1}: many entries are equal in magnitude "
                    "(bf16 files), and equals are all kept; the option exact keeps no more than asked for"
                )


def uniform(place: PiecePlace, vector: int, piece: Tensor, seed: int) -> Tensor:
    draw = chance(seed, f"{vector}\0{place.name}", place.index).random(piece.numel(), dtype="float32")
    return torch.from_numpy(draw).to(piece.device)


def ranks_in_rows(rows: Tensor) -> Tensor:
    """0 for the largest magnitude of a row."""
    order = rows.abs().argsort(dim=1, descending=True, stable=True)
    numbers = torch.arange(rows.shape[1], device=rows.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, numbers)


def gram(bundle: Bundle, name: str | None = None) -> list[list[float]]:
    """Dot products of all pairs, summed in float64 in the order of the walk."""
    pairs = [(i, j) for i in range(bundle.count) for j in range(i, bundle.count)]
    found = [[0.0] * bundle.count for _ in range(bundle.count)]

    def products(pieces: list[Tensor]) -> list[float]:
        wide = [piece.double() for piece in pieces]
        return [float((wide[i] * wide[j]).sum()) for i, j in pairs]

    for parts in bundle.measured(products, name):
        for (i, j), product in zip(pairs, parts, strict=True):
            found[i][j] += product
    for i, j in pairs:
        found[j][i] = found[i][j]
    return found


def cosine(products: list[list[float]], i: int, j: int) -> float:
    scale = (products[i][i] * products[j][j]) ** 0.5
    return max(-1.0, min(1.0, products[i][j] / scale)) if scale else 0.0
