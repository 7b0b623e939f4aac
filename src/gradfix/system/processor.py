"""What a processor does better than torch asks of it: pieces of work on threads of their own, and products of matrices.

Torch's own threads share every single operation; on a small piece they mostly wait for each other (on a busy
machine fifty times as long as they work), and sums depend on their number.

Torch gives float32 products to MKL, which uses half the width of AMD's processors. oneDNN, which comes with torch too,
uses all of it: the same precision in less than half the time. Inside `quick_products` linear maps go there, and votes
take each sample's gradient there."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MOST_WORKERS = 4
LARGE_BLOCK = 8 << 20
WORTH = 2**21  # multiplications from which a product repays the way round

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside the block; the number before comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PieceWorkers(ThreadPoolExecutor):
    """Workers for `ahead`, one per core but for the `spare` ones; each runs torch on one thread."""

    def __init__(self, spare: int = 0) -> None:
        self.count = max(1, min((os.cpu_count() or 1) - spare, MOST_WORKERS))
        super().__init__(self.count, initializer=torch.set_num_threads, initargs=(1,))
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Pieces are freed and asked for all the time, and glibc gives freed memory back to the system, to be fetched
    again page by page: a tenth of a stream's time. It stops once it has seen a large block come and go."""
    torch.empty(LARGE_BLOCK, dtype=torch.uint8)


def ahead(pool: PieceWorkers, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map` in order, a few items ahead of the caller: memory stays at those few."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > pool.count:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def quick_products(model: nn.Module) -> Iterator[None]:
    """A model's linear maps of float32 on a CPU by the faster library, forward and backward; elsewhere nothing changes.

    Sums run in another order, so the last bits differ. What is not a plain product (tensors of other types, torch.func,
    compiled models, autocast, activations that are made again) goes the usual way."""
    here = any(weight.is_cpu and weight.dtype == torch.float32 for weight in model.parameters())
    # A mode slows down every call; a card would wait for it.
    with _Quick() if here and onednn_is_faster() else nullcontext():
        yield


@functools.cache
def onednn_is_faster(told: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is a processor that MKL leaves half idle, and this torch can do otherwise."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and told.is_file()):
        return False
    return "AuthenticAMD" in told.read_text(errors="replace") and _agrees()


def _agrees() -> bool:
    """Whether torch's own door to the other library is where it was, and what comes out is right."""
    data, weight, bias = (torch.linspace(-1, 1, 16 * rows).reshape(rows, 16) for rows in (6, 4, 1))
    try:
        found = product(data, weight, bias[0, :4])
        _transforming(), _recomputed()  # whatever they say: they can be asked
        return torch.allclose(found, functional.linear(data, weight, bias[0, :4]), atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):  # it is no public one
        return False


def product(data: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """data @ weight.T + bias by oneDNN. Nothing is noted for a backward pass."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(data, weight, bias, "none", [], "")
    return found


def _transforming() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _recomputed() -> bool:
    """Whether what a backward pass needs is not kept but made again: in it, where no mode is heard, so the usual way."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(data, weight)
        return product(data, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        data, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if wanted[0] else None,
            product(rows.t(), data.flatten(0, -2).t()) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


class _Quick(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and _plain(*args):
            return _Linear.apply(*args) if len(args) == 3 else _Linear.apply(*args, None)
        return func(*args, **(kwargs or {}))


def _plain(data: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        data.dim() > 1
        and _takes((data, weight) if bias is None else (data, weight, bias), data.numel() * len(weight))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not _transforming()
        and not _recomputed()
    )


def crossed(left: Tensor, right: Tensor, room: Tensor | None = None) -> Tensor:
    """left^T right by the faster library; in `room`, where it is given and torch's own library is the faster one."""
    return product(left.T, right.T) if crosses_quickly(left, right) else torch.mm(left.T, right, out=room)


def crosses_quickly(left: Tensor, right: Tensor) -> bool:
    """Whether products of these, over all dimensions but their last, are a matter for oneDNN."""
    return _takes((left, right), left.numel() * right.shape[-1]) and onednn_is_faster()


def _takes(given: Sequence[Tensor], multiplications: int) -> bool:
    own = all(type(one) in (Tensor, nn.Parameter) and one.dtype == torch.float32 and one.is_cpu for one in given)
    return own and multiplications >= WORTH
