"""Questions to the autograd graph of a batch of losses: what it reaches, and where rows were picked by an index."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradfix.votes.batched.indexing import picks


@dataclass(frozen=True)
class Reach:
    """What a backward pass could still reach: named parameters, other leaves, reentrant checkpoints."""

    parameters: frozenset[str]
    others: bool
    hidden: bool


def reach(losses: Tensor, parameters: dict[str, nn.Parameter], anchor: Tensor) -> Reach:
    names = {id(p): name for name, p in parameters.items()}
    found: set[str] = set()
    hidden = others = False
    for node in _nodes(losses):
        if not node.next_functions:
            variable = getattr(node, "variable", anchor)
            if id(variable) in names:
                found.add(names[id(variable)])
            others = others or variable is not anchor
        elif isinstance(node, BackwardCFunction):
            hidden = hidden or "CheckpointFunctionBackward" in type(node).__name__
    return Reach(frozenset(found), others, hidden)


def picked_rows(losses: Tensor, in_place: Collection[Any]) -> set[Any]:
    """Graph nodes behind which rows are picked by an index, other than by nodes that leave them `in_place`.

    Two batches of one shape may then differ in whose row is whose, so the layout must be found anew."""
    nodes = list(_nodes(losses))
    parents: dict[Any, list[Any]] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    found: set[Any] = set()
    waiting = [node for node in nodes if picks(node) and node not in in_place]
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _nodes(losses: Tensor) -> Iterator[Any]:
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(child for child, _ in node.next_functions)
