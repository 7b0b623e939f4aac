"""Operations that pick rows by an index: which of them may hand a row to another sample.

A head on the masked tokens alone, say, sees rows whose owners change from batch to batch. The class token at each
text's end does not: it is picked from its own sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_WORDS = ("Index", "Gather", "Scatter", "MaskedSelect", "Take")
_ALONG = {torch.gather, Tensor.gather, torch.index_select, Tensor.index_select}


def keeps_rows(func: Any, args: Sequence[Any], samples: int, depends: Callable[[Tensor], bool]) -> bool:
    """Whether an indexing call leaves every row with its sample, whatever the batch; `depends` on the batch or not."""
    data = args[0] if args else None
    if not isinstance(data, Tensor) or not data.ndim or data.shape[0] != samples:
        return False
    if func is Tensor.__setitem__:
        return not (isinstance(args[2], Tensor) and args[2].requires_grad)
    if func in _ALONG and len(args) > 1 and isinstance(args[1], int):
        return args[1] % data.ndim != 0
    if func is not Tensor.__getitem__:
        return False
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if isinstance(first, slice):
        return first == slice(None)
    return isinstance(first, Tensor) and not depends(first) and _counts(first, samples)


def _counts(index: Tensor, samples: int) -> bool:
    """0, 1, 2 ... along the first dimension, the same in all others."""
    if index.dtype != torch.long or not index.ndim or index.shape[0] != samples:
        return False
    return bool((index.reshape(samples, -1) == torch.arange(samples, device=index.device)[:, None]).all())


def picks(node: Any) -> bool:
    return any(word in node.name() for word in _WORDS)
