"""Per-sample gradients that are never written down: how to add their signs to an integer buffer.

A form holds what determines every sample's gradient of one tensor (say the inputs and output gradients
of a layer). `fold` adds sum_n sign(-g_n) to a buffer; `accumulate` gives one sample's gradient, so that
several uses of one parameter can be summed before the sign is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gradfix.system.processor import crossed, crosses_quickly
from gradfix.votes.batched import kernels

Mend = Callable[[Tensor], Tensor]  # what is done to signs before they are summed
# On a CPU. With few tokens the products are too small to be cut into blocks.
MANY_TOKENS = 64
# Gradients made before they are signed and summed, few enough for the cache.
BLOCK_BYTES = 10 * 2**20
BLOCK_SAMPLES = 16
LEAST_ROWS = 32
COPY_BYTES = 96 * 2**20  # of a product's operands without some of their rows, at a time


class Form(Protocol):
    """All samples' gradients of one tensor."""

    samples: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def accumulate(self, sample: int, out: Tensor) -> None:
        """out += g_sample."""

    def fold(self, votes: Tensor) -> None:
        """votes += sum_n sign(-g_n)."""

    def only(self, rows: slice) -> Form:
        """The same of some samples."""


class Product:
    """g_n = left_n^T right_n, summed over the tokens: every matrix product with a weight.

    `left` is (samples, tokens, rows), `right` is (samples, tokens, columns)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.dtype = left.dtype
        if right.dtype != self.dtype:
            self.dtype = min((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
            left, right = left.to(self.dtype), right.to(self.dtype)
        self.left, self.right = left, right
        self.samples, self.device = left.shape[0], left.device
        self.shape = torch.Size((left.shape[2], right.shape[2]))

    def accumulate(self, sample: int, out: Tensor) -> None:
        out += self.left[sample].T @ self.right[sample]

    def only(self, rows: slice) -> Product:
        return Product(self.left[rows], self.right[rows])

    def fold(self, votes: Tensor) -> None:
        if self.left.shape[1] == 1:
            self._fold_single_token(votes)
        elif not kernels.fold_product(self.left, self.right, votes):
            if self.left.shape[1] < MANY_TOKENS:
                self._fold_signs(self._signs_one_by_one, votes)
            else:
                self._fold_in_strips(votes)

    def _fold_single_token(self, votes: Tensor) -> None:
        """The sign of an outer product is the outer product of signs: one product for all samples."""
        left, right = (side[:, 0].sign().float().nan_to_num_(0) for side in (self.left, self.right))
        votes.sub_((left.T @ right).to(votes.dtype))

    def _fold_signs(self, signs_of: Callable[[Mend], Tensor], votes: Tensor) -> None:
        """Where one sample's gradient is none, it abstains, and the others do not."""
        signs = signs_of(lambda gradients: gradients)
        if bool(signs.sum().isnan()):
            signs = signs_of(lambda gradients: gradients.nan_to_num_(0))
        votes.sub_(signs.to(votes.dtype))

    def _signs_one_by_one(self, mend: Mend) -> Tensor:
        room = self.left.new_empty(self.shape)
        signs = torch.zeros_like(room, dtype=torch.float32 if self.samples > 256 else None)
        for left, right in zip(self.left, self.right):
            signs.add_(mend(crossed(left, right, room).sign_()))
        return signs

    def _fold_in_strips(self, votes: Tensor) -> None:
        """A few rows, and samples, at a time, so that gradients are signed and summed while the cache holds them."""
        side = int(self.shape[1] > self.shape[0])
        height = max(LEAST_ROWS, BLOCK_BYTES // (4 * max(1, self.shape[1 - side])))
        for top in range(0, self.shape[side], height):
            cut = slice(top, top + height)
            left, right = (self.left, self.right[..., cut]) if side else (self.left[..., cut], self.right)
            part, own = Product(left, right), votes[:, cut] if side else votes[cut]
            quick = crosses_quickly(left[:1], right[:1])
            part._fold_signs(part._signs_one_by_one if quick else part._signs_in_blocks, own)

    def _signs_in_blocks(self, mend: Mend) -> Tensor:
        """The sum of all samples' signs. Blocks are cut off the longer side: products like to be square."""
        side, samples = int(self.shape[1] > self.shape[0]), min(self.samples, BLOCK_SAMPLES)
        long, short = self.shape[side], self.shape[1 - side]
        height = min(long, max(LEAST_ROWS, BLOCK_BYTES // max(1, samples * short * self.dtype.itemsize)))
        height = -(-long // -(-long // height))  # all of nearly one height
        signs = self.left.new_zeros(self.shape, dtype=torch.promote_types(self.dtype, torch.float32))
        room = self.left.new_empty(samples * height * short)
        for top in range(0, long, height):
            strip = signs.narrow(side, top, min(height, long - top))
            for first in range(0, self.samples, samples):
                some, own = self.left[first : first + samples].mT, self.right[first : first + samples]
                if side:
                    own = own[:, :, top : top + height]
                else:
                    some = some[:, top : top + height]
                gradients = room[: len(some) * strip.numel()].view(len(some), *strip.shape)
                torch.bmm(some, own, out=gradients)
                strip.add_(mend(gradients.sign_()).sum(0, dtype=signs.dtype))
        return signs


class TableRows:
    """g_n adds row t of `values` to row index[n, t]: an embedding table."""

    def __init__(self, index: Tensor, values: Tensor, rows: int) -> None:
        self.index, self.values = index, values
        self.samples, self.dtype, self.device = index.shape[0], values.dtype, values.device
        self.shape = torch.Size((rows, values.shape[-1]))

    def accumulate(self, sample: int, out: Tensor) -> None:
        out.index_add_(0, self.index[sample], self.values[sample].to(out.dtype))

    def only(self, rows: slice) -> TableRows:
        return TableRows(self.index[rows], self.values[rows], self.shape[0])

    def fold(self, votes: Tensor) -> None:
        """Entries of one sample and row are summed; as many sums as entries are kept, so no size depends on data."""
        rows = self.shape[0]
        if not self.index.numel():
            return
        owner = torch.arange(self.samples, device=self.device)[:, None]
        keys, order = (self.index + owner * rows).flatten().sort(stable=True)
        number = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).long()]).cumsum(0)
        place = torch.empty_like(number).scatter_(0, order, number)
        wide = torch.promote_types(self.dtype, torch.float32)
        sums = torch.zeros(keys.numel(), self.shape[1], dtype=wide, device=self.device)
        sums.index_add_(0, place, self.values.flatten(0, 1).to(wide))
        target = torch.zeros_like(keys).scatter_(0, number, keys % rows)  # unused sums add 0 to row 0
        votes.index_add_(0, target, sums.sign_().to(votes.dtype), alpha=-1)


class Tied:
    """The sum of a product and of rows: a table that embeds tokens and scores them as well.

    A sample's few rows are taken out of its product, where they then count nothing, and vote for themselves."""

    def __init__(self, product: Product, rows: TableRows) -> None:
        self.product, self.rows = product, rows
        self.samples, self.shape, self.device = product.samples, product.shape, product.device
        self.dtype = torch.promote_types(product.dtype, rows.dtype)

    def accumulate(self, sample: int, out: Tensor) -> None:
        self.product.accumulate(sample, out)
        self.rows.accumulate(sample, out)

    def only(self, rows: slice) -> Tied:
        return Tied(self.product.only(rows), self.rows.only(rows))

    def fold(self, votes: Tensor) -> None:
        one = self.product.left[0].nbytes + self.rows.index.shape[1] * self.shape[1] * 8
        step = max(1, COPY_BYTES // max(1, one))
        for start in range(0, self.samples, step):
            self._fold_some(slice(start, start + step), votes)

    def _fold_some(self, samples: slice, votes: Tensor) -> None:
        left, right = self.product.left[samples], self.product.right[samples]
        index, values = self.rows.index[samples], self.rows.values[samples]
        wide = torch.promote_types(self.dtype, torch.float32)
        columns = index[:, None].expand(-1, left.shape[1], -1)
        scores = left.gather(2, columns).mT.to(wide) @ right.to(wide)
        # A row is scored once, however often it occurs.
        scores.masked_fill_(_seen_before(index)[..., None], 0)
        Product(left.scatter(2, columns, 0), right).fold(votes)
        TableRows(index, scores.add_(values), self.shape[0]).fold(votes)


def _seen_before(index: Tensor) -> Tensor:
    """Where an entry repeats an earlier one of its row."""
    ordered, order = index.sort(dim=1, stable=True)
    repeats = torch.zeros_like(index, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeats).scatter_(1, order, repeats)


class Dense:
    """Every sample's gradient, written down: only for small tensors such as biases and norms."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.samples, self.shape = values.shape[0], values.shape[1:]
        self.dtype, self.device = values.dtype, values.device

    def accumulate(self, sample: int, out: Tensor) -> None:
        out += self.values[sample]

    def only(self, rows: slice) -> Dense:
        return Dense(self.values[rows])

    def fold(self, votes: Tensor) -> None:
        votes.sub_(self.values.sign().nan_to_num_(0).sum(0, dtype=torch.int32).to(votes.dtype))


class OneByOne:
    """Gradients computed one sample at a time by a function of the sample's number."""

    def __init__(self, gradient: Callable[[int], Tensor], samples: int, like: Tensor) -> None:
        self.gradient, self.samples, self.like = gradient, samples, like
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device

    def accumulate(self, sample: int, out: Tensor) -> None:
        out += self.gradient(sample)

    def only(self, rows: slice) -> OneByOne:
        chosen = range(self.samples)[rows]
        return OneByOne(lambda number: self.gradient(chosen[number]), len(chosen), self.like)

    def fold(self, votes: Tensor) -> None:
        for sample in range(self.samples):
            votes.sub_(self.gradient(sample).sign().to(votes.dtype))


class Sum:
    """Several uses of one parameter: their gradients are added before the sign is taken."""

    def __init__(self, parts: Sequence[tuple[Form, Callable[[Tensor], Tensor]]], shape: torch.Size) -> None:
        self.parts, self.shape = parts, shape
        first = parts[0][0]
        self.samples, self.device = first.samples, first.device
        self.dtype = first.dtype
        for form, _ in parts[1:]:
            self.dtype = torch.promote_types(self.dtype, form.dtype)

    def accumulate(self, sample: int, out: Tensor) -> None:
        for form, region in self.parts:
            form.accumulate(sample, region(out))

    def only(self, rows: slice) -> Sum:
        return Sum([(form.only(rows), region) for form, region in self.parts], self.shape)

    def fold(self, votes: Tensor) -> None:
        wide = torch.promote_types(self.dtype, torch.float32)
        gradient = torch.empty(self.shape, dtype=wide, device=self.device)
        for sample in range(self.samples):
            self.accumulate(sample, gradient.zero_())
            votes.sub_(gradient.sign_().to(votes.dtype))


def densify(form: Form) -> Dense:
    """Write every sample's gradient down, to send it further back through a derived weight."""
    if isinstance(form, Dense):
        return form
    values = torch.zeros(form.samples, *form.shape, dtype=form.dtype, device=form.device)
    for sample in range(form.samples):
        form.accumulate(sample, values[sample])
    return Dense(values)


def combine(parts: Sequence[tuple[Form, Callable[[Tensor], Tensor]]], shape: torch.Size) -> Form:
    """One form for several uses that cover the same entries, the cheap way where there is one."""
    forms = [form for form, _ in parts]
    if any(form.shape != shape for form in forms):
        return Sum(parts, shape)
    if all(isinstance(form, Product) for form in forms):
        lefts, rights = [form.left for form in forms], [form.right for form in forms]  # type: ignore[attr-defined]
        return Product(torch.cat(lefts, 1), torch.cat(rights, 1))
    if all(isinstance(form, TableRows) for form in forms):
        index = torch.cat([form.index for form in forms], 1)  # type: ignore[attr-defined]
        return TableRows(index, torch.cat([form.values for form in forms], 1), shape[0])  # type: ignore[attr-defined]
    kinds = {kind: [part for part in parts if isinstance(part[0], kind)] for kind in (Product, TableRows)}
    if all(kinds.values()) and sum(map(len, kinds.values())) == len(parts):
        product, rows = (combine(some, shape) for some in kinds.values())
        return Tied(product, rows)  # type: ignore[arg-type]
    if all(isinstance(form, Dense) for form in forms):
        return Dense(torch.stack([form.values for form in forms]).sum(0))  # type: ignore[attr-defined]
    return Sum(parts, shape)


def settle(uses: Sequence[tuple[Form, Tensor]], whole: Tensor) -> Iterator[tuple[Form, Tensor]]:
    """One form for every set of overlapping uses of a weight, and the part of its tally `whole` that it votes for.

    Entries used more than once are summed before the sign."""
    groups: list[list[tuple[Form, Tensor]]] = []
    for use in uses:
        touching = [group for group in groups if any(_overlap(use[1], votes) for _, votes in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([use, *(member for group in touching for member in group)])
    for group in groups:
        first = group[0][1]
        if all(_geometry(votes) == _geometry(first) for _, votes in group):
            yield combine([(form, lambda out: out) for form, _ in group], first.shape), first
        else:
            yield Sum([(form, partial(_region, like=votes, of=whole)) for form, votes in group], whole.shape), whole


def _geometry(view: Tensor) -> tuple[Any, ...]:
    return view.shape, view.stride(), view.storage_offset()


def _overlap(a: Tensor, b: Tensor) -> bool:
    (first, last), (other_first, other_last) = _extent(a), _extent(b)
    return first <= other_last and other_first <= last


def _extent(view: Tensor) -> tuple[int, int]:
    start = int(view.storage_offset())
    return start, start + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))


def overlaps_itself(view: Tensor) -> bool:
    """Whether some entries are the same place in memory, as in an expanded or unfolded weight."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _region(out: Tensor, like: Tensor, of: Tensor) -> Tensor:
    return out.as_strided(like.shape, like.stride(), like.storage_offset() - of.storage_offset())
