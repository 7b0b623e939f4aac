"""Pair attention heads by what no other permutation can change: their singular values (TransFusion).

Permuting rows or columns leaves a block's spectrum as it is, so heads can be paired before anything
else is known. Where several layers share one head order (a common bias table), their costs add up."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradfix.align.matching import Block, Matching, Weights


def pair_heads(matching: Matching) -> None:
    """Set the order of heads (key/value groups, then the queries inside each) of every attention."""
    costs: dict[str, Tensor] = {}
    queries: dict[str, str] = {}
    for block in matching.blocks:
        for axis, part in enumerate(block.parts):
            if not part.order or len(block.parts) < 2:
                continue
            ours, theirs = (spectra(block, axis, weights) for weights in (matching.target, matching.base))
            cost = torch.cdist(ours.flatten(0, 1), theirs.flatten(0, 1)).square()
            groups, count, _ = part.size
            cost = cost.reshape(groups, count, groups, count).permute(0, 2, 1, 3)
            _add(costs, part.order, cost)
            if part.queries:
                queries[part.order] = part.queries
    for order, cost in costs.items():
        pairing, inside = _pair(cost)
        matching.groups[order] = pairing[None]
        if order in queries:
            matching.groups[queries[order]] = inside


def spectra(block: Block, axis: int, weights: Weights) -> Tensor:
    """Singular values of every head's block, (groups, queries, values), in float64.

    They come from the eigenvalues of the small Gram matrix: batched, and much faster than an SVD."""
    part = block.parts[axis]
    heads = block.cut(weights).double().movedim(axis, 0).reshape(*part.size, -1)
    if part.size[2] == 1 and not any(other.names for other in block.parts if other is not part):
        return heads.flatten(2).cpu()  # one column per head and nothing else permuted: compare as it is
    flat = heads if heads.shape[2] <= heads.shape[3] else heads.transpose(2, 3)
    return torch.linalg.eigvalsh(flat @ flat.transpose(2, 3)).clamp_min(0).sqrt().cpu()


def _add(costs: dict[str, Tensor], order: str, cost: Tensor) -> None:
    """Sum costs of one order; keys and values have one entry per group, which all its queries share."""
    have = costs.get(order)
    if have is None or have.shape == cost.shape:
        costs[order] = cost if have is None else have + cost
        return
    one, many = sorted((have, cost), key=torch.Tensor.numel)
    costs[order] = many + one / many.shape[2]


def _pair(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Best group order, and for each group the best order of its queries."""
    groups, _, count, _ = cost.shape
    inside = np.zeros((groups, groups, count), dtype=np.int64)
    total = np.zeros((groups, groups))
    for ours in range(groups):
        for theirs in range(groups):
            table = cost[ours, theirs].numpy()
            rows, columns = linear_sum_assignment(table)
            inside[ours, theirs] = columns
            total[ours, theirs] = table[rows, columns].sum()
    _, order = linear_sum_assignment(total)
    pairing = torch.as_tensor(order, dtype=torch.long)
    return pairing, torch.as_tensor(inside[np.arange(groups), order])
