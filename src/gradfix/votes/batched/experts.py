"""Vote rules for mixtures of experts: weights stacked along their first dimension, of which every row uses some.

Rows come sorted by expert (grouped products) or with their expert's weight beside them (a table of matrices). Experts that
are asked one after the other need no rule of their own: their weights are parts of the stack, their rows have owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfix.votes.batched.forms import Form, Product, TableRows
from gradfix.votes.batched.layers import Call, IsWeight, Reshaped, Rule, Samples, bind, register
from gradfix.votes.batched.sample_rows import Layout, owned


class Stacked:
    """One form for every expert; they share no entries."""

    def __init__(self, parts: Sequence[tuple[int, Form]], samples: int, like: Tensor) -> None:
        self.parts, self.samples, self.like = parts, samples, like
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device

    def accumulate(self, sample: int, out: Tensor) -> None:
        for place, form in self.parts:
            form.accumulate(sample, out[place])

    def only(self, rows: slice) -> Stacked:
        parts = [(place, form.only(rows)) for place, form in self.parts]
        return Stacked(parts, len(range(self.samples)[rows]), self.like)

    def fold(self, votes: Tensor) -> None:
        for place, form in self.parts:
            form.fold(votes[place])


def _grouped_functions() -> tuple[Callable[..., Any], ...]:
    """Names that only some releases of torch have."""
    found = (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    return tuple(function for function in found if function is not None)


@register("grouped_mm")
class GroupedProduct(Rule):
    """y = x W[e] for consecutive groups of rows, one expert each: rows `offs[e - 1]` to `offs[e]`."""

    functions = _grouped_functions()
    names = ("grouped_mm_fallback",)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        bound = bind("data weight offs", args, kwargs)
        data, weight, offsets = bound["data"], bound["weight"], bound.get("offs")
        if is_weight(data) or not is_weight(weight) or offsets is None or (data.ndim, weight.ndim) != (2, 3):
            return None
        return Call({"weight": weight}, {"input": data, "ends": offsets})

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim == 0

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        rows, start, parts = owned(samples.layout, len(gradient), samples.count), 0, []
        for expert, end in enumerate(call.inputs["ends"].tolist()):
            if end > start:
                own = Samples(samples.count, rows.part(start, end))
                product = Product(own.split(call.inputs["input"][start:end]), own.split(gradient[start:end]))
                parts.append((expert, product))
            start = end
        return {"weight": Stacked(parts, samples.count, call.weights["weight"])}


@register("pick")
class Pick(Rule):
    """y = W[index] with an index that the samples chose: every row has its expert's weight beside it."""

    functions = (Tensor.__getitem__, torch.index_select, Tensor.index_select)
    owns_output = False

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        index = args[-1] if not kwargs and isinstance(args[-1], Tensor) else None
        plain = len(args) == 2 or (len(args) == 3 and args[1] == 0)
        if index is None or not plain or not is_weight(args[0]) or is_weight(index):
            return None
        if index.dtype not in (torch.int64, torch.int32) or not index.ndim:
            return None
        return Call({"weight": args[0]}, {"index": index}, {"rows": args[0].shape[0]})

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim < call.inputs["index"].ndim

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        weight, rows = call.weights["weight"], call.options["rows"]
        index = samples.split(call.inputs["index"]).reshape(samples.count, -1) % rows
        values = samples.tokens(gradient, weight.ndim - 1)
        table = TableRows(index.long(), values, rows)
        return {"weight": table if weight.ndim == 2 else Reshaped(table, weight.shape)}
