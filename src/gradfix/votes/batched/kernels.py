# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""CUDA kernels that count signs while the gradient is still in registers.

One program owns a tile of a weight and walks a group of samples: it builds the tile of one sample's gradient on the
matrix units, adds its sign to a counter in registers and starts over, so no per-sample gradient is written. Without
Triton, or for shapes the copy engine does not take, batched products in chunks do the same through memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the CPU builds of torch come without it
    triton = None

NARROW = (torch.float16, torch.bfloat16, torch.float32)
COPY_BYTES = 96 * 2**20  # of re-ordered 32-bit operands at a time
WIDEST = 16384  # features one program of token_sums can hold
CHUNK_BYTES = 24 * 2**20  # a chunk of per-sample gradients stays in the second-level cache


Tiles = tuple[int, int, int, int, int, int]  # rows, columns, tokens a step, warps, stages, programs a processor
TILES_16: Tiles = (128, 256, 32, 8, 5, 1)
SMALL_TILES_16: Tiles = (128, 128, 32, 4, 5, 2)
TILES_TF32: Tiles = (128, 256, 32, 8, 3, 1)
SMALL_WEIGHT = 2_000_000  # entries below which smaller tiles fill the processors better


def fold_product(left: Tensor, right: Tensor, votes: Tensor) -> bool:
    """votes += sum_n sign(-left_n^T right_n) on a GPU; False where the caller should do it itself."""
    if not left.is_cuda:
        return False
    wide = left.dtype == torch.float32
    tiles = _tiles(left.device, left.dtype, left.shape[1:], right.shape[2])
    if tiles is None or (wide and not torch.backends.cuda.matmul.allow_tf32):
        fold_chunks(left, right, votes)
    elif wide:
        step = max(1, COPY_BYTES // max(1, left[0].nbytes + right[0].nbytes))
        for rows in (slice(start, start + step) for start in range(0, len(left), step)):
            fold_tiles(_tokens_last(left[rows]), _tokens_last(right[rows]), votes, tiles)
    else:
        fold_tiles(_for_copy_engine(left), _for_copy_engine(right), votes, tiles)
    return True


@functools.cache
def _tiles(device: torch.device, dtype: torch.dtype, left: torch.Size, columns: int) -> Tiles | None:
    """How to cut up products of a left operand of these tokens and rows, where they are taken at all."""
    tokens, rows = left
    if triton is None or _capability(device) < 9 or dtype not in NARROW:
        return None
    if rows % 8 or columns % 8 or min(rows, columns) < 64 or tokens < 8:
        return None
    if dtype == torch.float32:
        return TILES_TF32
    return SMALL_TILES_16 if rows * columns < SMALL_WEIGHT else TILES_16


def _for_copy_engine(tensor: Tensor) -> Tensor:
    """As it is where the features are contiguous and everything else is a multiple of 16 bytes apart."""
    outer, inner, last = tensor.stride()
    if last == 1 and outer % 8 == 0 and inner % 8 == 0 and outer and inner and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.contiguous()


def fold_chunks(left: Tensor, right: Tensor, votes: Tensor) -> None:
    """Gradients of a few samples at a time through memory: exact float32, and any shape."""
    samples, rows, columns = left.shape[0], left.shape[2], right.shape[2]
    step = max(1, CHUNK_BYTES // max(1, rows * columns * left.element_size()))
    for start in range(0, samples, step):
        gradients = torch.bmm(left[start : start + step].mT, right[start : start + step])
        if triton is None:
            votes.sub_(gradients.sign_().nan_to_num_(0).sum(0, dtype=torch.int32).to(votes.dtype))
        else:
            grid = (_ceil(rows, 32), _ceil(columns, 128), 1)
            numbers = (gradients.shape[0], rows, columns, *votes.stride())
            _launch(_subtract_signs, grid, (gradients, votes), numbers, (32, 128), num_warps=8)


def sees(tensor: Tensor) -> bool:
    """Whether the small kernels can take this tensor."""
    return triton is not None and tensor.is_cuda and tensor.stride(-1) == 1 and tensor.dtype in NARROW


def fold_rows(values: list[Tensor], votes: list[Tensor]) -> None:
    """votes += sum_n sign(-values_n) for many small tensors together; each votes tensor must be contiguous."""
    kinds = [(len(value), value.dtype) for value in values]
    for samples, dtype in set(kinds):  # joining several dtypes would first convert each tensor
        chosen = [place for place, kind in enumerate(kinds) if kind == (samples, dtype)]
        joined = torch.cat([values[place].reshape(samples, -1) for place in chosen], 1)
        width = joined.shape[1]
        total = torch.zeros(width, dtype=votes[chosen[0]].dtype, device=joined.device)
        grid, numbers = (1, _ceil(width, 256), 1), (samples, 1, width, width, 1)
        _launch(_subtract_signs, grid, (joined, total), numbers, (1, 256), num_warps=4)
        own = [votes[place].view(-1) for place in chosen]
        torch._foreach_add_(own, list(total.split([tensor.numel() for tensor in own])))


def token_sums(gradient: Tensor, data: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """Per sample, over its tokens: the sum of gradient * normalised(data), and of gradient alone.

    `kind` is "layer" (mean and variance), "rms" or "plain" (data as it is)."""
    samples, tokens, width = gradient.shape
    block = 1 << (width - 1).bit_length()
    rows = max(1, min(16, 4096 // block))
    parts = 1 if samples >= 64 else min(_ceil(tokens, rows), _ceil(528, samples))
    share = _ceil(_ceil(tokens, rows), parts) * rows
    out = torch.empty(2, samples, parts, width, dtype=torch.float32, device=gradient.device)
    strides = (*gradient.stride()[:2], *data.stride()[:2])
    numbers = (tokens, width, share, out.stride(0), eps, *strides)
    constants = ({"plain": 0, "rms": 1, "layer": 2}[kind], rows, block)
    _launch(_token_sums, (samples, parts, 1), (gradient, data, out), numbers, constants, num_warps=8)
    products, sums = out.sum(2) if parts > 1 else out[:, :, 0]
    return products, sums


def fold_tiles(left: Tensor, right: Tensor, votes: Tensor, tiles: Tiles) -> None:
    """The fused product: 16-bit operands as (samples, tokens, features), 32-bit ones with the tokens last."""
    work = _tile_work(left.shape, right.shape, left.dtype == torch.float32, tiles, _processors(left.device))
    counts = torch.empty(work.counts, dtype=torch.int8, device=left.device)
    operands = (_Operand(left, work.blocks[0]), _Operand(right, work.blocks[1]), counts)
    constants = (*work.constants, left.is_cuda)
    _launch(_count_signs, work.grid, operands, work.numbers, constants, num_warps=tiles[3], num_stages=tiles[4])
    _, rows, columns = work.counts
    grid = (_ceil(rows, 32), _ceil(columns, 128), 1)
    numbers = (*work.counts, *votes.stride())
    _launch(_subtract_counts, grid, (counts, votes), numbers, (32, 128), num_warps=4)


@dataclass(frozen=True)
class _Work:
    counts: tuple[int, int, int]
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    blocks: tuple[list[int], list[int]]


@functools.cache
def _tile_work(left: torch.Size, right: torch.Size, tokens_last: bool, tiles: Tiles, processors: int) -> _Work:
    """How a product of these shapes is cut up; the same for every batch, so it is worked out once."""
    block_m, block_n, block_k, _, _, per_processor = tiles
    samples, features = left[0], 1 if tokens_last else 2
    rows, columns, tokens = left[features], right[features], left[3 - features]
    count = _ceil(rows, block_m) * _ceil(columns, block_n)
    groups = _groups(samples, count, processors * per_processor)
    numbers = (samples, _ceil(samples, groups), rows, columns, _ceil(tokens, block_k))
    block_left, block_right = ([1, side, block_k] if tokens_last else [1, block_k, side] for side in (block_m, block_n))
    constants = (block_m, block_n, block_k, tokens_last)
    return _Work((groups, rows, columns), (count, groups, 1), numbers, constants, (block_left, block_right))


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


class _Operand:
    """A block-wise view for the copy engine, light to make: one per launch."""

    __slots__ = ("base", "block", "dtype", "shape", "strides")
    padding = "zero"

    def __init__(self, base: Tensor, block: list[int]) -> None:
        self.base, self.block, self.dtype = base, block, base.dtype
        self.shape, self.strides = base.shape, base.stride()

    def data_ptr(self) -> int:
        return 0

    def described(self) -> Any:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), self.block)


_COMPILED: dict[Any, Any] = {}


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Any], numbers: Any, constants: Any, **options: int
) -> None:  # fmt: skip
    """Launch, and remember the compiled kernel: choosing it again costs Triton more than the launch itself."""
    kinds = tuple([(t.dtype, t.data_ptr() % 16) for t in tensors])
    device = tensors[-1].get_device()
    key = (id(kernel), numbers, constants, kinds, device)
    compiled = _COMPILED.get(key)
    if compiled is None:
        described = [t.described() if isinstance(t, _Operand) else t for t in tensors]
        _COMPILED[key] = kernel[grid](*described, *numbers, *constants, **options)
        return
    stream, about = torch._C._cuda_getCurrentRawStream(device), compiled.packed_metadata
    given = (*tensors, *numbers, *constants)
    compiled.run(*grid, stream, compiled.function, about, None, None, None, *given)


@functools.cache
def _groups(samples: int, tiles: int, slots: int) -> int:
    """Into how many groups to cut the samples, so that the last wave of programs is not nearly empty.

    A group counts in eight bits, hence at most 127 samples."""
    fewest = -(-samples // 127)

    def cost(groups: int) -> float:
        waves, share = -(-tiles * groups // slots), -(-samples // groups)
        return waves * (share + 1.5)

    return min(range(fewest, max(fewest, samples // 4) + 1), key=cost)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _tokens_last(tensor: Tensor) -> Tensor:
    """(samples, features, tokens): 32-bit matrix units read both operands along the summed dimension."""
    samples, tokens, width = tensor.shape
    padded = -(-tokens // 4) * 4  # the copy engine wants strides of 16 bytes
    out = torch.empty(samples, width, padded, dtype=tensor.dtype, device=tensor.device)
    grid = (_ceil(padded, 64), _ceil(width, 64), samples)
    _launch(_transpose, grid, (tensor, out), (tokens, padded, width, *tensor.stride()), (64, 64), num_warps=4)
    return out


if triton is not None:

    @triton.jit
    def _sign(x, SATURATE: tl.constexpr):
        """-1, 0 or 1, and 0 for what is no number: two saturating products, which turn NaN into 0."""
        if SATURATE:
            result = tl.inline_asm_elementwise(
                "{.reg .f32 up, down; mul.rn.ftz.sat.f32 up, $1, 0f7F000000; "
                "mul.rn.ftz.sat.f32 down, $1, 0fFF000000; sub.rn.ftz.f32 $0, up, down;}",
                "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            result = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
        return result

    @triton.jit
    def _count_signs(
        left, right, counts, samples, share, rows, columns, steps,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS_LAST: tl.constexpr,
        SATURATE: tl.constexpr,
    ):  # fmt: skip
        """counts[group, tile] = sum over the group's samples of sign(left_n^T right_n)."""
        tile, group = tl.program_id(0), tl.program_id(1)
        tiles_n = tl.cdiv(columns, BLOCK_N)
        row, column = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
        first = group * share
        last = tl.minimum(first + share, samples)
        # Two neighbours share one float: the even one counts units, the odd one units of 4096.
        pairs = tl.zeros((BLOCK_M, BLOCK_N // 2), dtype=tl.float32)
        for sample in tl.range(first, last, flatten=True):
            gradient = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for step in tl.range(0, steps):
                if TOKENS_LAST:
                    a = left.load([sample, row, step * BLOCK_K]).reshape(BLOCK_M, BLOCK_K)
                    b = right.load([sample, column, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
                    gradient = tl.dot(a, b.T, gradient)
                else:
                    a = left.load([sample, step * BLOCK_K, row]).reshape(BLOCK_K, BLOCK_M)
                    b = right.load([sample, step * BLOCK_K, column]).reshape(BLOCK_K, BLOCK_N)
                    gradient = tl.dot(a.T, b, gradient)
            even, odd = tl.split(tl.reshape(gradient, (BLOCK_M, BLOCK_N // 2, 2)))
            pairs += _sign(even, SATURATE)
            pairs += _sign(odd, SATURATE) * 4096
        both_counts = pairs.to(tl.int32)
        odd_count = (both_counts + 2048) >> 12
        even_count = both_counts - odd_count * 4096
        both = tl.reshape(tl.join(even_count, odd_count), (BLOCK_M, BLOCK_N)).to(tl.int8)
        m = row + tl.arange(0, BLOCK_M)
        n = column + tl.arange(0, BLOCK_N)
        place = counts + group.to(tl.int64) * rows * columns + m[:, None] * columns + n[None, :]
        tl.store(place, both, mask=(m[:, None] < rows) & (n[None, :] < columns))

    @triton.jit
    def _subtract_counts(
        counts, votes, groups, rows, columns, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
    ):
        """votes -= sum over groups of counts."""
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (m < rows) & (n < columns)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        place = counts + m * columns + n
        for _ in range(groups):
            total += tl.load(place, mask=inside, other=0).to(tl.int32)
            place += rows * columns
        target = votes + m.to(tl.int64) * stride_m + n * stride_n
        kept = tl.load(target, mask=inside, other=0)
        tl.store(target, kept - total.to(kept.dtype), mask=inside)

    @triton.jit
    def _subtract_signs(
        gradients, votes, samples, rows, columns, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
    ):  # fmt: skip
        """votes -= sum_n sign(gradients_n)."""
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (m < rows) & (n < columns)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        place = gradients + m.to(tl.int64) * columns + n
        for _ in range(samples):
            g = tl.load(place, mask=inside, other=0)
            total += (g > 0).to(tl.int32) - (g < 0).to(tl.int32)
            place += rows * columns
        target = votes + m.to(tl.int64) * stride_m + n * stride_n
        kept = tl.load(target, mask=inside, other=0)
        tl.store(target, kept - total.to(kept.dtype), mask=inside)

    @triton.jit
    def _token_sums(
        gradient, data, out, tokens, width, share, plane, eps, stride_gs, stride_gt, stride_ds, stride_dt,
        KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """out[0] = sum over a share of one sample's tokens of gradient * normalised(data), out[1] = of gradient."""
        sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = tl.arange(0, BLOCK)[None, :]
        products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        end = tl.minimum((part + 1) * share, tokens)
        for start in range(part * share, end, ROWS):
            token = start + tl.arange(0, ROWS)[:, None]
            inside = (token < end) & (column < width)
            g = tl.load(gradient + sample * stride_gs + token * stride_gt + column, mask=inside, other=0)
            x = tl.load(data + sample * stride_ds + token * stride_dt + column, mask=inside, other=0)
            g, x = g.to(tl.float32), x.to(tl.float32)
            if KIND == 2:
                x = tl.where(inside, x - tl.sum(x, 1)[:, None] / width, 0.0)
            if KIND > 0:
                x = x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + eps)
            products += g * x
            sums += g
        place = out + (sample * tl.num_programs(1) + part) * width + tl.arange(0, BLOCK)
        mask = tl.arange(0, BLOCK) < width
        tl.store(place, tl.sum(products, 0), mask=mask)
        tl.store(place + plane, tl.sum(sums, 0), mask=mask)

    @triton.jit
    def _transpose(
        source, target, tokens, padded, width, stride_s, stride_t, stride_w, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr
    ):  # fmt: skip
        """(samples, tokens, features) to (samples, features, tokens), tokens padded with zeros."""
        sample = tl.program_id(2).to(tl.int64)
        t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = (t[:, None] < tokens) & (w[None, :] < width)
        place = source + sample * stride_s + t[:, None] * stride_t + w[None, :] * stride_w
        block = tl.load(place, mask=mask, other=0)
        goal = target + sample * width * padded + w[:, None] * padded + t[None, :]
        tl.store(goal, tl.trans(block), mask=(w[:, None] < width) & (t[None, :] < padded))
