"""mergekit's other methods, one tensor at a time: averages of weights, arcs, swaps, and tensors as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfix.errors import UnsafeResult
from gradfix.merging.bundles import Bundle, Merge, PiecePlace, Rule, row_length
from gradfix.merging.dialect import NEEDED, Given, mergekit_method
from gradfix.merging.rules import spread
from gradfix.merging.shares import combination, gram, summed
from gradfix.merging.spheres import arc, barycentre, centre

NO_WEIGHT = 1e-6  # two weights that sum to less count the same
SHORT = 1e-6
STRAIGHT = 1e-16  # a squared sine below which there is no arc
SOFT = 1e-8
QUARTERS = (0.25, 0.5, 0.75)


@mergekit_method(
    "linear", base="ignored", differences=False, shared={"normalize": (bool, True)}, own={"weight": (float, NEEDED)}
)
def _linear(bundle: Bundle, given: Given) -> Rule:
    weights = given.each("weight")
    total = sum(weights)
    if not given.shared["normalize"]:
        return lambda place, pieces: combination(pieces, weights)
    if total == 0:
        raise UnsafeResult("the weights of a linear merge sum to 0: there is no average.")
    return lambda place, pieces: combination(pieces, weights) / total


@mergekit_method("passthrough", base="ignored", differences=False, inputs=(1, 1), own={"scale": (float, 1.0)})
def _passthrough(bundle: Bundle, given: Given) -> Rule:
    (scale,) = given.each("scale")
    return lambda place, pieces: pieces[0] if scale == 1 else pieces[0] * scale


@mergekit_method("slerp", differences=False, inputs=(1, 1), shared={"t": (float, NEEDED)})
def _slerp(bundle: Bundle, given: Given) -> Rule:
    """From the base (which comes first) to the other model."""
    weights = arc(gram(bundle), given.shared["t"])
    return lambda place, pieces: combination(pieces, weights)


@mergekit_method("karcher", base="ignored", differences=False, shared={"max_iter": (int, 10), "tol": (float, 1e-5)})
def _karcher(bundle: Bundle, given: Given) -> Rule:
    tolerance = given.shared["tol"]
    weights = centre(gram(bundle), given.shared["max_iter"], tolerance, least=tolerance)
    return lambda place, pieces: combination(pieces, weights)


@mergekit_method(
    "multislerp", base="allowed", own={"weight": (float, NEEDED)},
    shared={"normalize_weights": (bool, True), "eps": (float, 1e-8)},
)  # fmt: skip
def _multislerp(bundle: Bundle, given: Given) -> Rule:
    if bundle.count == 1:
        return lambda place, pieces: pieces[0]
    weights = barycentre(gram(bundle), given.each("weight"), given.shared["normalize_weights"], given.shared["eps"])
    return lambda place, pieces: combination(pieces, weights)


@mergekit_method(
    "nuslerp", base="allowed", inputs=(2, 2), own={"weight": (float, NEEDED)}, whole_rows=True,
    shared={"nuslerp_row_wise": (bool, False), "nuslerp_flatten": (bool, True)},
)  # fmt: skip
def _nuslerp(bundle: Bundle, given: Given) -> Rule:
    """Along the arc of the whole tensors, of their rows, or (`nuslerp_row_wise`) of their columns."""
    first, second = given.each("weight")
    t = 0.5 if abs(first + second) < NO_WEIGHT else second / (first + second)
    (shape,) = bundle.shapes.values()
    if given.shared["nuslerp_flatten"] or len(shape) < 2:
        return _whole_arc(bundle, t)
    if given.shared["nuslerp_row_wise"]:
        return _column_arcs(bundle, t)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        rows = [piece.view(-1, shape[-1]) for piece in pieces]
        one, both, other = ((a * b).sum(1, keepdim=True) for a, b in _pairs(rows))
        weights = _arcs(one, both, other, t)
        return (weights[0].to(rows[0].dtype) * rows[0] + weights[1].to(rows[1].dtype) * rows[1]).view(-1)

    return rule


def _pairs(parts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    wide = [part.double() for part in parts]
    return [(wide[0], wide[0]), (wide[0], wide[1]), (wide[1], wide[1])]


def _whole_arc(bundle: Bundle, t: float) -> Rule:
    products = gram(bundle)
    one, both, other = (torch.tensor([value]) for value in (products[0][0], products[0][1], products[1][1]))
    weights = [float(weight) for weight in _arcs(one, both, other, t)]
    return lambda place, pieces: combination(pieces, weights)


def _column_arcs(bundle: Bundle, t: float) -> Rule:
    ((name, shape),) = bundle.shapes.items()
    width = row_length(shape)
    sums = torch.zeros(3, width, dtype=torch.float64)
    for pieces in bundle.pieces(name, _rows(shape)):
        rows = [piece.view(-1, width) for piece in pieces]
        sums += torch.stack([(a * b).sum(0) for a, b in _pairs(rows)])
    weights = [weight.float() for weight in _arcs(sums[0], sums[1], sums[2], t)]

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        rows = [piece.view(-1, width) for piece in pieces]
        return (weights[0] * rows[0] + weights[1] * rows[1]).view(-1)

    return rule


def _arcs(one: Tensor, both: Tensor, other: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """The two weights at t along each arc, from squared lengths and inner products; straight where it is none."""
    lengths = one.clamp_min(0).sqrt().clamp_min(1e-7) * other.clamp_min(0).sqrt().clamp_min(1e-7)
    cosines = (both / lengths).clamp(-1, 1)
    straight = 1 - cosines.square() <= STRAIGHT
    angles = torch.where(straight, 1.0, cosines.acos())
    near, far = ((share * angles).sin() / angles.sin() for share in (1 - t, t))
    return torch.where(straight, 1 - t, near), torch.where(straight, t, far)


def _rows(shape: tuple[int, ...]) -> int:
    return Merge(_nuslerp, whole_rows=True).piece_size(shape)


@mergekit_method("model_stock", inputs=(2, float("inf")), shared={"filter_wise": (bool, False)}, whole_rows=True)
def _model_stock(bundle: Bundle, given: Given) -> Rule:
    """t mean(tau), t = K c / (1 + (K - 1) c), c the mean cosine of the tensor or (`filter_wise`) of each row."""
    count, (shape,) = bundle.count, bundle.shapes.values()
    if not given.shared["filter_wise"]:
        products = gram(bundle)
        cosines = torch.tensor([_cosine(torch.tensor(products[i][i]), products[i][j], torch.tensor(products[j][j]))
                                for i in range(count) for j in range(i + 1, count)])  # fmt: skip
        ratio = float(_ratio(cosines.mean(), count))
        return lambda place, pieces: summed(pieces) * (ratio / count)
    length = shape[-1] if shape else 1

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        rows = [piece.view(-1, length).double() for piece in pieces]
        squares = [(row * row).sum(1) for row in rows]
        cosines = [
            _cosine(squares[i], (rows[i] * rows[j]).sum(1), squares[j])
            for i in range(count)
            for j in range(i + 1, count)
        ]
        ratio = _ratio(torch.stack(cosines).mean(0), count)[:, None]
        return (sum(rows[1:], rows[0]) * (ratio / count)).to(pieces[0].dtype).view(-1)

    return rule


def _cosine(one: Tensor, both: Tensor | float, other: Tensor) -> Tensor:
    return (both / (one.sqrt() * other.sqrt()).clamp_min(SHORT)).clamp(-1, 1)


def _ratio(agreed: Tensor, count: int) -> Tensor:
    below = 1 + (count - 1) * agreed
    return torch.where(below.abs() < SHORT, 0.0, count * agreed / torch.where(below.abs() < SHORT, 1.0, below))


@mergekit_method("sce", shared={"select_topk": (float, 1.0), "int8_mask": (bool, False)})
def _sce(bundle: Bundle, given: Given) -> Rule:
    return spread(bundle, given.shared["select_topk"], least=SHORT)


@mergekit_method("nearswap", differences=False, inputs=(1, 1), shared={"t": (float, NEEDED)})
def _nearswap(bundle: Bundle, given: Given) -> Rule:
    """The base moves to the other model by min(1, t / distance), entry by entry."""
    t = given.shared["t"]

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        base, other = pieces
        share = (t / (base - other).abs().clamp_min(SHORT)).clamp(0, 1)
        return share * other + (1 - share) * base

    return rule


@mergekit_method("ram", shared={"epsilon": (float, 1e-5)})
def _ram(bundle: Bundle, given: Given) -> Rule:
    return _agents(given.shared["epsilon"], [1.0] * bundle.count)


@mergekit_method("ramplus_tl", shared={"epsilon": (float, 1e-5), "r": (float, 0.1), "alpha": (float, 0.2)})
def _ramplus(bundle: Bundle, given: Given) -> Rule:
    """What only one model changes is lifted by 1 + r min(alpha, shared / unique), counted in this tensor."""
    least, (name,) = given.shared["epsilon"], bundle.shapes
    shared, alone = [0] * bundle.count, [0] * bundle.count
    for pieces in bundle.pieces(name, _rows(bundle.shapes[name])):
        active, many = _active(pieces, least)
        for vector, mine in enumerate(active):
            shared[vector] += int((mine & (many > 1)).sum())
            alone[vector] += int((mine & (many == 1)).sum())
    ratios = [both / max(own, least) for both, own in zip(shared, alone, strict=True)]
    return _agents(least, [1 + given.shared["r"] * min(max(ratio, 0), given.shared["alpha"]) for ratio in ratios])


def _active(pieces: list[Tensor], least: float) -> tuple[list[Tensor], Tensor]:
    active = [piece.abs() > least for piece in pieces]
    return active, torch.stack(active).sum(0)


def _agents(least: float, lifts: list[float]) -> Rule:
    """Reinforced agent merging: what one model changes is taken as it is, what several change is averaged."""

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        active, many = _active(pieces, least)
        parts = []
        for piece, mine, lift in zip(pieces, active, lifts, strict=True):
            parts.append(piece * mine * torch.where(many == 1, lift, 1 / many.clamp_min(1)))
        return summed(parts)

    return rule


@mergekit_method("arcee_fusion", differences=False, inputs=(1, 1), whole_rows=True)
def _fusion(bundle: Bundle, given: Given) -> Rule:
    """Take the other model's entry where its importance is at least median + 1.5 (third - first quartile).

    The importance of an entry is its change times the divergence between the softmaxes of its row before and after.
    The quartiles are those of the whole tensor; mergekit takes them of a sample above a million entries."""
    ((name, shape),) = bundle.shapes.items()
    scores = torch.cat([_importance(pieces, shape) for pieces in bundle.pieces(name, _rows(shape))])
    ordered = scores.sort().values
    low, middle, high = (ordered[int(quarter * (len(ordered) - 1))] for quarter in QUARTERS)
    threshold = middle + 1.5 * (high - low)

    def rule(place: PiecePlace, pieces: list[Tensor]) -> Tensor:
        return pieces[0] + (pieces[1] - pieces[0]) * (_importance(pieces, shape) >= threshold)

    return rule


def _importance(pieces: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    base, other = (piece.view(-1, shape[-1] if shape else 1) for piece in pieces)
    after, before = other.softmax(-1) + SOFT, base.softmax(-1) + SOFT
    apart = (after * (after / before).log()).sum(-1, keepdim=True)
    return ((other - base).abs() * apart).view(-1)
