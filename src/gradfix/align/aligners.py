"""Align base A to target B, so that A's task vector lands on the units of B it was trained for.

Both methods share one machinery and one rule: the permuted A computes the same function as A."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradfix.align.alignment import Alignment
from gradfix.align.head_counts import HeadCounts, config_of
from gradfix.align.heads import pair_heads
from gradfix.align.layout import Layout, Residual, build_layout
from gradfix.align.matching import Matching
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.errors import IncompatibleCheckpoints
from gradfix.registry import Registry

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
    family: str | None = None,
    heads: HeadCounts | None = None,
    kv_heads: HeadCounts | None = None,
    config: Mapping[str, Any] | None = None,
    residual: Residual = "shared",
    seed: int = 0,
) -> Alignment:
    """Find the permutations of `base` that bring it nearest to `target`.

    Each side is a path, a state dict or an nn.Module, both with the same kind of names. The family
    is found from the tensor names. Head counts come from `heads` and `kv_heads` (a number, or
    {"vision": 12, "text": 8}), from `config`, from the model, or from the folder's config.json.
    residual="per-junction" gives every point of the residual stream its own permutation, as the
    original TransFusion does; the permuted model is then no longer the same function."""
    aligner = ALIGNERS[method]
    ours, theirs = open_checkpoint(base), open_checkpoint(target)
    known = config or config_of(ours) or config_of(theirs)
    layout = layout_of(ours, family=family, heads=heads, kv_heads=kv_heads, config=known, residual=residual)
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


def layout_of(checkpoint: Checkpoint, **options: Any) -> Layout:
    """The spec of a checkpoint; options as in `align`."""
    return build_layout({name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()}, **options)


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
