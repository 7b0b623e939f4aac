"""The result of aligning A to B: one permutation per group, and how to move weights with it.

Everything that lives on A's axes can be moved: A itself, its fine-tune, a task vector. Permuted A
computes the same function as A, so a task vector moved along still belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradfix.align.layout import Layout
from gradfix.align.spec import Part
from gradfix.errors import IncompatibleCheckpoints
from gradfix.vectors.taskvector import TaskVector

Weights = TypeVar("Weights", bound=Mapping[str, Tensor])


@dataclass(frozen=True)
class Alignment:
    """Permutations that carry base A's units to the places of target B's.

    `groups` holds stacks of permutations, (copies, size): new position i reads old position p[i].
    `unmatched` are tensors only A has: they are permuted, but had no say."""

    layout: Layout
    groups: Mapping[str, Tensor]
    method: str
    sweeps: int = 0
    cosine_before: float = float("nan")
    cosine_after: float = float("nan")
    unmatched: tuple[str, ...] = field(default=())

    @property
    def keeps_function(self) -> bool:
        """False with per-junction residual permutations: the sums of the residual stream then mix orders."""
        return self.layout.residual == "shared"

    def permute(self, name: str, tensor: Tensor) -> Tensor:
        """One tensor, moved; its name says which axes move, its dtype and device stay."""
        for axis, parts in enumerate(self.layout.axes(name, tuple(tensor.shape))):
            if any(part.names for part in parts):
                tensor = tensor.index_select(axis, self._index(name, parts).to(tensor.device))
        return tensor

    def apply(self, weights: Weights) -> Weights:
        """Move a state dict or a task vector; a TaskVector comes back as one.

        Names may be those on disk or those of the module, whichever the alignment was found with."""
        moved = {name: self.permute(name, tensor) for name, tensor in weights.items()}
        if isinstance(weights, TaskVector):
            return TaskVector(moved)  # type: ignore[return-value]
        return moved  # type: ignore[return-value]

    def identity_share(self, group: str | None = None) -> float:
        """Share of units that stay where they were, of one group or of all."""
        chosen = self.groups.values() if group is None else [self.groups[group]]
        same = sum(int((stack == torch.arange(stack.shape[1])).sum()) for stack in chosen)
        return same / max(sum(stack.numel() for stack in chosen), 1)

    def summary(self) -> dict[str, Any]:
        """What a manifest should keep."""
        return {
            "method": self.method,
            "family": self.layout.family.name,
            "residual": self.layout.residual,
            "sweeps": self.sweeps,
            "cosine_before": self.cosine_before,
            "cosine_after": self.cosine_after,
            "identity_share": self.identity_share(),
            "unmatched": list(self.unmatched),
        }

    def report(self) -> str:
        """The alignment in words, one line per kind of group."""
        lines = [
            f"{self.method} on {self.layout.family.name}: cosine {self.cosine_before:.3f} -> "
            f"{self.cosine_after:.3f} in {self.sweeps} sweeps; {self.identity_share():.1%} of units in place"
        ]
        kinds: dict[str, list[str]] = {}
        for group in self.groups:
            kinds.setdefault(group.rpartition(".")[2].partition("@")[0], []).append(group)
        for kind, names in kinds.items():
            shares = [self.identity_share(name) for name in names]
            lines.append(f"  {kind}: {len(names)} groups, {sum(shares) / len(shares):.1%} in place")
        if not self.keeps_function:
            lines.append("  per-junction residual permutations: the permuted model is a different function")
        if self.unmatched:
            lines.append(f"  only in the base, permuted but not matched: {', '.join(self.unmatched[:8])}")
        return "\n".join(lines)

    def _index(self, name: str, parts: tuple[Part, ...]) -> Tensor:
        pieces, start = [], 0
        for part in parts:
            for group, stack in part.stacks().items():
                have = tuple(self.groups[group].shape) if group in self.groups else stack
                if have != stack:
                    raise IncompatibleCheckpoints(
                        f"{name!r} has {stack[1]} entries along {group!r}, the aligned base has {have[1]}."
                    )
            pieces.append(part.index(self.groups) + start)
            start += part.length
        return torch.cat(pieces)
