"""Views of weights: which entries of a tally they stand for, and whether two of them share any."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def geometry(view: Tensor) -> tuple[Any, ...]:
    return view.shape, view.stride(), view.storage_offset()


def overlap(a: Tensor, b: Tensor) -> bool:
    first, last = _extent(a)
    other_first, other_last = _extent(b)
    return first <= other_last and other_first <= last


def _extent(view: Tensor) -> tuple[int, int]:
    start = view.storage_offset()
    return int(start), int(
        start + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
    )


def overlaps_itself(view: Tensor) -> bool:
    """Whether some entries are the same place in memory, as in an expanded or unfolded weight."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def region(out: Tensor, like: Tensor) -> Tensor:
    return out.as_strided(like.shape, like.stride(), like.storage_offset())
