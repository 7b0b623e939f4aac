"""Merges that look at angles: along arcs between the vectors, to their centre on the sphere, or by their cosines.

Every one of them is a linear combination of the vectors, and its weights follow from the vectors' inner products: one
walk takes these in float64, and the vectors are never held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradfix.errors import UnsafeResult, UsageError
from gradfix.merging.bundles import Bundle, Rule, merge_method
from gradfix.merging.shares import combination, cosine, gram, summed

PARALLEL = 0.9995  # beyond this cosine an arc and a straight line are the same in float32
TINY = 1e-8  # directions whose sum is shorter cancel
Gram = list[list[float]]


@merge_method("slerp")
def slerp(bundle: Bundle, *, t: float = 0.5) -> Rule:
    """sin((1-t) w)/sin(w) tau_1 + sin(t w)/sin(w) tau_2, w the angle between the whole vectors.

    Two vectors only. Nearly parallel ones (or a zero one) are interpolated on the straight line; between
    opposite ones no arc is defined, which is an error."""
    if bundle.count != 2:
        raise UsageError(f"slerp takes exactly two vectors, got {bundle.count}.")
    if not 0 <= t <= 1:
        raise UsageError(f"t must lie between 0 and 1, got {t}.")
    products = gram(bundle)
    if (angle := cosine(products, 0, 1)) < -PARALLEL:
        raise UnsafeResult(f"the two vectors point in opposite directions (cosine {angle:.4f}): no arc joins them.")
    weights = arc(products, t)
    return lambda place, pieces: combination(pieces, weights)


def arc(products: Gram, t: float) -> list[float]:
    """The weights of two vectors at t along the arc between them; a straight line where there is none."""
    angle = cosine(products, 0, 1)
    if abs(angle) > PARALLEL or products[0][0] <= 0 or products[1][1] <= 0:
        return [1 - t, t]
    whole = math.acos(angle)
    return [math.sin(share * whole) / math.sin(whole) for share in (1 - t, t)]


@merge_method("multislerp")
def multislerp(bundle: Bundle, *, weights: list[float], normalize: bool = True) -> Rule:
    """The weighted centre on the sphere by one step from the mean direction, at the weighted mean length.

    Directions u_t = tau_t / ||tau_t||; from m, the direction of sum w_t u_t, one step along the mean of their parts
    across m. Over the whole vector; two vectors that cancel are added on the straight line."""
    found = barycentre(gram(bundle), weights, normalize)
    return lambda place, pieces: combination(pieces, found)


def barycentre(products: Gram, weights: Sequence[float], normalize: bool = True, eps: float = 0.0) -> list[float]:
    """The weights of the vectors in their spherical barycentre; `eps` is added to every length."""
    count, total = len(weights), sum(weights)
    if count == 1:
        return [1.0]
    if normalize:
        if total == 0:
            raise UsageError("the weights of a multislerp must not sum to 0.")
        weights = [weight / total for weight in weights]
    shares = torch.tensor(weights, dtype=torch.float64)
    matrix = torch.tensor(products, dtype=torch.float64)
    norms = matrix.diagonal().clamp_min(0).sqrt()
    unit = 1 / (norms + eps).clamp_min(torch.finfo(torch.float64).tiny)
    turned = matrix * unit[:, None] * unit[None, :]  # inner products of the directions
    mean = _length(turned, shares)
    if mean < TINY:
        if count == 2:
            return [float(share) for share in shares]
        raise UnsafeResult("the weighted directions of these vectors cancel: they have no centre on the sphere.")
    middle = shares / mean
    across = shares - (shares * (turned @ middle)).sum() * middle  # the weighted mean of the parts across the middle
    step = _length(turned, across) + eps
    found = middle * math.cos(step) + across * (math.sin(step) / step if step else 1.0)
    return [float(weight) for weight in found * unit * (norms * shares).sum()]


def _length(products: Tensor, weights: Tensor) -> float:
    return math.sqrt(max(float(weights @ products @ weights), 0.0))


@merge_method("karcher")
def karcher(bundle: Bundle, *, steps: int = 10, tolerance: float = 1e-5) -> Rule:
    """The Karcher mean of the directions on the sphere (the point with the least sum of squared arcs), at the mean length.

    Over the whole vector, by gradient steps from the mean direction until a step is shorter than `tolerance`."""
    weights = centre(gram(bundle), steps, tolerance)
    return lambda place, pieces: combination(pieces, weights)


def centre(products: Gram, steps: int, tolerance: float, least: float = 0.0) -> list[float]:
    """The weights of the vectors in their Karcher mean; those no longer than `least` have no direction."""
    matrix = torch.tensor(products, dtype=torch.float64)
    norms = matrix.diagonal().clamp_min(0).sqrt()
    pointing = norms > least
    if len(products) == 1 or not bool(pointing.any()):
        return [1.0] if len(products) == 1 else [0.0] * len(products)
    unit = torch.where(pointing, 1 / norms.where(pointing, torch.ones_like(norms)), 0.0)
    turned = matrix * unit[:, None] * unit[None, :]
    shares = pointing.double() / pointing.sum()
    length = _length(turned, shares)
    place = (
        shares / length
        if length >= tolerance
        else torch.eye(len(unit), dtype=torch.float64)[int(pointing.int().argmax())]
    )
    for _ in range(steps):
        dots = (turned @ place).clamp(-1, 1)
        angles = torch.where(pointing, dots.acos(), 0.0)
        pulls = torch.where(
            angles < tolerance, 0.0, shares * angles / angles.sin().clamp_min(torch.finfo(torch.float64).tiny)
        )
        tangent = pulls - (pulls * dots).sum() * place
        step = _length(turned, tangent)
        if step < tolerance:
            break
        place = math.cos(step) * place + math.sin(step) * tangent / step
        place = place / _length(turned, place)
    return [float(weight) for weight in place * unit * norms.mean()]


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
        agreed = max(mean_cosine(gram(bundle, name)), 0.0)
        ratios[name] = count * agreed / (1 + (count - 1) * agreed)
    return lambda place, pieces: summed(pieces) * (ratios[place.name] / count)


def mean_cosine(products: Gram) -> float:
    pairs = [cosine(products, i, j) for i in range(len(products)) for j in range(i + 1, len(products))]
    return sum(pairs) / len(pairs)
