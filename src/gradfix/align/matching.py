"""Weight matching: permute A's units so that its weights overlap B's most (Git Re-Basin).

One group at a time: with every other axis already permuted, S = sum of W_B W_A^T over the tensors
that carry the group says what each pairing is worth, and the Hungarian method picks the best.
The overlap only grows, so the result is a local optimum; which one depends on where it starts.

Heads can be paired before anything else is known, by what no other permutation can change: the singular
values of their blocks (TransFusion)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from gradfix.align.layout import AxisMap
from gradfix.align.spec import AxisPart

Weights = Mapping[str, Tensor]
# A gain below this share of the overlap is rounding, not a better pairing.
NOTHING_GAINED = 1e-7


@dataclass(frozen=True)
class Block:
    """A rectangle of one tensor whose axes each have a single part (packed q, k, v are three)."""

    name: str
    starts: tuple[int, ...]
    parts: tuple[AxisPart, ...]

    def cut(self, weights: Weights) -> Tensor:
        tensor = weights[self.name]
        for axis, (start, part) in enumerate(zip(self.starts, self.parts, strict=True)):
            if part.length != tensor.shape[axis]:
                tensor = tensor.narrow(axis, start, part.length)
        return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)

    @property
    def groups(self) -> set[str]:
        return {name for part in self.parts for name in part.names}

    def count(self, group: str) -> int:
        return sum(part.inner == group for part in self.parts)


class Matching:
    """The pairing problem of two weight sets: blocks, the current permutations, and what they are worth."""

    def __init__(self, layout: AxisMap, base: Weights, target: Weights) -> None:
        self.base, self.target = base, target
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        self.stacks = layout.stacks(shapes)
        self.groups = {name: identity(*stack) for name, stack in self.stacks.items()}
        shared = [name for name in base if name in target and base[name].is_floating_point()]
        self.blocks = [block for name in shared for block in blocks_of(layout, name, shapes[name])]
        self.inner = sorted({part.inner for block in self.blocks for part in block.parts if part.inner})
        self.stale = set(self.inner)
        self.uses: dict[str, list[tuple[Block, int]]] = {name: [] for name in self.inner}
        for block in self.blocks:
            for axis, part in enumerate(block.parts):
                if part.inner:
                    self.uses[part.inner].append((block, axis))

    def moved(self, block: Block, groups: Mapping[str, Tensor], still: int = -1) -> Tensor:
        """A's block under `groups`; along axis `still` the order inside heads stays as it is."""
        tensor = block.cut(self.base)
        for axis, part in enumerate(block.parts):
            known = {name: groups[name] for name in part.names if not (axis == still and name == part.inner)}
            if known:
                tensor = tensor.index_select(axis, part.index(known).to(tensor.device))
        return tensor

    def gain(self, group: str, settled: set[str] | None = None) -> Tensor:
        """S of one group, (copies, size, size): rows are B's units, columns A's in their own order.

        With `settled`, tensors that depend on a permutation not found yet are left out."""
        copies, size = self.stacks[group]
        total = torch.zeros(copies, size, size, dtype=torch.float64)
        for block, axis in self._voices(group, settled):
            ours = units(block.cut(self.target), axis, block.parts[axis])
            theirs = units(self.moved(block, self.groups, still=axis), axis, block.parts[axis])
            total += (ours @ theirs.transpose(1, 2)).cpu()
        return total

    def improve(self, group: str, settled: set[str] | None = None) -> bool:
        """Re-pair one group; keep the pairing only if the overlap grows."""
        gain = self.gain(group, settled)
        best = torch.stack([best_pairing(matrix) for matrix in gain])
        if torch.equal(best, self.groups[group]):
            return False
        before, after = (self._worth(group, gain, pairing) for pairing in (self.groups[group], best))
        if after - before <= NOTHING_GAINED * max(abs(after), abs(before)):
            return False
        self.groups[group] = best
        return True

    def _voices(self, group: str, settled: set[str] | None) -> list[tuple[Block, int]]:
        """The tensors that have a say about a group: all, or those whose other axes are settled."""
        uses = self.uses[group]
        if settled is None:
            return uses
        return [(b, axis) for b, axis in uses if not b.groups - settled - {group} and b.count(group) == 1]

    def _worth(self, group: str, gain: Tensor, pairing: Tensor) -> float:
        """The overlap a pairing gives, up to a constant. Where two axes of a tensor share the group, S
        holds each axis with the other one still unchanged: replace those terms by the true product."""
        worth = float(gain.gather(2, pairing[:, :, None]).sum())
        for block in {block: None for block, _ in self.uses[group] if block.count(group) > 1}:
            ours = block.cut(self.target)
            worth += float((ours * self.moved(block, {**self.groups, group: pairing})).sum())
            for axis, part in enumerate(block.parts):
                if part.inner == group:
                    index = part.index({group: pairing}).to(ours.device)
                    moved = self.moved(block, self.groups, still=axis).index_select(axis, index)
                    worth -= float((ours * moved).sum())
        return worth

    def overlap(self) -> float:
        """Inner product of B with the permuted A, over everything both have."""
        return sum(float((b.cut(self.target) * self.moved(b, self.groups)).sum()) for b in self.blocks)

    def cosine(self) -> float:
        norms = [sum(float(b.cut(w).square().sum()) for b in self.blocks) for w in (self.base, self.target)]
        return self.overlap() / max((norms[0] * norms[1]) ** 0.5, 1e-300)

    def start(self) -> None:
        """Begin from the better of two starts: no permutation, or one built up from what is anchored.

        From no permutation, an unrelated pair gets stuck: units paired under a wrong residual order
        reward that wrong order. So the second start pairs groups one by one, from the embeddings and
        other fixed axes outwards, and lets a tensor speak only when its other axes are settled."""
        unmoved, overlap = dict(self.groups), self.overlap()
        settled = set(self.groups) - set(self.inner)
        waiting = list(self.inner)
        self.stale = set()
        while waiting:
            group = max(waiting, key=lambda name: self._evidence(name, settled))
            waiting.remove(group)
            if self._evidence(group, settled):
                self.improve(group, settled)
            if len(self._voices(group, settled)) < len(self.uses[group]):
                self.stale.add(group)  # not every tensor was heard yet
            settled.add(group)
        if self.overlap() < overlap:
            self.groups, self.stale = unmoved, set(self.inner)

    def _evidence(self, group: str, settled: set[str]) -> int:
        return sum(self.target[block.name].numel() for block, _ in self._voices(group, settled))

    def sweep(self, seed: int, limit: int = 100) -> int:
        """Visit groups in random order until none improves; returns the number of sweeps.

        A group is visited again only when one that shares a tensor with it has moved since."""
        order = random.Random(seed)
        for sweeps in range(limit):
            if not self.stale:
                return sweeps
            visit = sorted(self.stale)
            order.shuffle(visit)
            for group in visit:
                self.stale.discard(group)
                if self.improve(group):
                    self.stale |= self._neighbours(group)
        return limit

    def _neighbours(self, group: str) -> set[str]:
        """Groups whose S changes when this one moves: itself only where two axes of a tensor share it."""
        near = {name for block, _ in self.uses[group] for name in block.groups & set(self.inner)}
        return near if any(block.count(group) > 1 for block, _ in self.uses[group]) else near - {group}


def blocks_of(layout: AxisMap, name: str, shape: tuple[int, ...]) -> Iterable[Block]:
    """The blocks of one tensor; none if no axis is permuted (it says nothing about the pairing)."""
    runs = []
    for axis in layout.axes(name, shape):
        starts = [sum(part.length for part in axis[:number]) for number in range(len(axis))]
        runs.append(list(zip(starts, axis, strict=True)))
    for choice in product(*runs):
        block = Block(name, tuple(start for start, _ in choice), tuple(part for _, part in choice))
        if block.groups:
            yield block


def units(tensor: Tensor, axis: int, part: AxisPart) -> Tensor:
    """The block as (copies, size, everything else): one row per unit that the inner group moves."""
    groups, queries, inner = part.size
    rows = tensor.movedim(axis, 0)
    if groups * queries == 1:
        return rows.reshape(1, inner, -1)
    return rows.reshape(groups, queries, inner, -1).transpose(1, 2).reshape(groups, inner, -1)


def best_pairing(gain: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment  # half a second, for the few runs that pair units

    _, columns = linear_sum_assignment(gain.numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.long)


def identity(copies: int, size: int) -> Tensor:
    return torch.arange(size).repeat(copies, 1)


def pair_heads(matching: Matching) -> None:
    """Set the order of heads (key/value groups, then the queries inside each) of every attention.

    Where several layers share one head order (a common bias table), their costs add up."""
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
            _add_cost(costs, part.order, cost)
            if part.queries:
                queries[part.order] = part.queries
    for order, cost in costs.items():
        pairing, inside = _pair_groups(cost)
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


def _add_cost(costs: dict[str, Tensor], order: str, cost: Tensor) -> None:
    """Sum costs of one order; keys and values have one entry per group, which all its queries share."""
    have = costs.get(order)
    if have is None or have.shape == cost.shape:
        costs[order] = cost if have is None else have + cost
        return
    one, many = sorted((have, cost), key=torch.Tensor.numel)
    costs[order] = many + one / many.shape[2]


def _pair_groups(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Best group order, and for each group the best order of its queries."""
    from scipy.optimize import linear_sum_assignment

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
