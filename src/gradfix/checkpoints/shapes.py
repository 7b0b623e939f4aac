"""Whether two models have one shape: as many layers, as wide, under the same names, with one vocabulary.

Told from names and shapes alone. A tensor that is merely missing is no other shape but a fault, and is
left to the account of the trio."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradfix.checkpoints.matched import (
    TOKEN_TABLE,
    folder_of,
    match_prefix,
    read_vocabulary,
    same_tokenizer,
    strangers,
)
from gradfix.checkpoints.weights import Checkpoint

LAYER = re.compile(
    r"^(?P<before>.*?(layers?|blocks?|h|resblocks|transformer\.layer))\.(?P<i>\d+)\.(?P<inside>.+)$"
)


def depths(names: Iterable[str]) -> dict[str, int]:
    """Number of layers by the name before the layer's number."""
    found: dict[str, int] = {}
    for name in names:
        match = LAYER.match(name)
        if match is not None:
            found[match["before"]] = max(found.get(match["before"], 0), int(match["i"]) + 1)
    return found


def another_shape(base: Checkpoint, target: Checkpoint) -> str | None:
    """In what the target's shape is another than the base's; None where weight can be added to weight."""
    base = match_prefix(base, target)
    goal = set(target.names())
    shared = [name for name in base.names() if name in goal]
    ours, theirs = depths(base.names()), depths(target.names())
    for stack, count in ours.items():
        if stack in theirs and theirs[stack] != count:
            return f"{theirs[stack]} layers instead of {count} under {stack!r}"
    if len(shared) * 2 < len(base.names()) and ours and theirs:
        return "another architecture: most of the weights go by other names"
    for name in shared:
        before, after = base.info(name).shape, target.info(name).shape
        if LAYER.match(name) and len(before) == len(after) == 2 and before != after:
            return f"{name!r} is {list(after)} instead of {list(before)}"
    return _another_vocabulary(base, target)


def _another_vocabulary(base: Checkpoint, target: Checkpoint) -> str | None:
    """Two tokenizers with fewer than half of their tokens in common."""
    tables = [name for name in base.names() if TOKEN_TABLE.search(name) and name in target]
    if not tables or base.path is None or target.path is None or same_tokenizer(base, target):
        return None
    if folder_of(base.path) == folder_of(target.path):
        return None
    before, after = read_vocabulary(base.path), read_vocabulary(target.path)
    if before is None or after is None or not strangers(before, after):
        return None
    return f"another vocabulary: {len(before.keys() & after.keys())} of {len(before)} tokens in common"
