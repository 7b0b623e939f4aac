"""Align base A to target B, so that A's task vector lands on the units of B it was trained for.

Everything that lives on A's axes can be moved: A itself, its fine-tune, a task vector. Permuted A
computes the same function as A, so a task vector moved along still belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from gradfix.align.layout import AxisMap, LayoutOptions, config_of, layout_of
from gradfix.align.matching import Matching, pair_heads
from gradfix.align.spec import AxisPart
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.errors import IncompatibleCheckpoints
from gradfix.registry import Registry
from gradfix.vectors.taskvector import TaskVector

Weights = TypeVar("Weights", bound=Mapping[str, Tensor])


@dataclass(frozen=True)
class Alignment:
    """Permutations that carry base A's units to the places of target B's.

    `groups` holds stacks of permutations, (copies, size): new position i reads old position p[i].
    `unmatched` are tensors only A has: they are permuted, but had no say."""

    layout: AxisMap
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

    def _index(self, name: str, parts: tuple[AxisPart, ...]) -> Tensor:
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


# An aligner sets the permutations of a matching and returns the number of sweeps it took.
Aligner = Callable[[Matching, int], int]
ALIGNERS: Registry[Aligner] = Registry("aligner")


@ALIGNERS.register("transfusion")
def transfusion(matching: Matching, seed: int) -> int:
    """Pair heads by their spectra, then everything else by weight matching."""
    pair_heads(matching)
    matching.start()
    return matching.sweep(seed)


@ALIGNERS.register("rebasin")
def weight_matching(matching: Matching, seed: int) -> int:
    """Git Re-Basin: weight matching alone; heads keep their order."""
    matching.start()
    return matching.sweep(seed)


def align(
    base: Source | Checkpoint,
    target: Source | Checkpoint,
    *,
    method: str = "transfusion",
    seed: int = 0,
    **options: Unpack[LayoutOptions],
) -> Alignment:
    """Find the permutations of `base` that bring it nearest to `target`.

    Each side is a path, a state dict or an nn.Module, both with the same kind of names. Options: `family`, else
    it is found from the tensor names; `heads` and `kv_heads` (a number, or {"vision": 12, "text": 8}) or `config`,
    else the counts come from the model or from the folder's config.json;
    residual="per-junction" gives every point of the residual stream its own permutation, as the
    original TransFusion does; the permuted model is then no longer the same function."""
    aligner = ALIGNERS[method]
    ours, theirs = open_checkpoint(base), open_checkpoint(target)
    options["config"] = options.get("config") or config_of(ours) or config_of(theirs)
    layout = layout_of(ours, **options)
    shared = _shared_names(ours, theirs)
    matching = Matching(layout, ours.state(), {name: theirs.read(name) for name in shared})
    before = matching.cosine()
    sweeps = aligner(matching, seed)
    return Alignment(
        layout,
        matching.groups,
        method,
        sweeps,
        before,
        matching.cosine(),
        tuple(name for name in ours.names() if name not in set(shared)),
    )


def _shared_names(base: Checkpoint, target: Checkpoint) -> list[str]:
    present = set(target.names())
    shared = [name for name in base.names() if name in present]
    if not shared:
        raise IncompatibleCheckpoints(
            f"{base} and {target} share no tensor name, first {base.names()[0]!r}. "
            "Give both as folders, or both as models: names on disk differ from names in the module."
        )
    for name in shared:
        ours, theirs = list(base.info(name).shape), list(target.info(name).shape)
        if ours != theirs:
            raise IncompatibleCheckpoints(
                f"{name!r} is {ours} in the base and {theirs} in the target; alignment needs equal shapes. "
                "Match a resized vocabulary by token first."
            )
    return shared
