"""A model is lent: whatever is done with it, it comes back as it was. And its device: the room there is, and work recorded there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradfix.system.processor import quick_products


def device_room(device: torch.device) -> int:
    """Bytes that this process may still take: what is free, and what it holds itself and does not use."""
    if device.type != "cuda":
        return _free_memory()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _free_memory(told: Path = Path("/proc/meminfo")) -> int:
    if not told.is_file():  # not on Linux: half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in told.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


@dataclass(frozen=True)
class LeftOnDisk:
    """For every name of a weight the first name of the same tensor, and by what its files are known again."""

    ties: dict[str, str]
    identity: str


ON_DISK: WeakKeyDictionary[nn.Module, LeftOnDisk] = WeakKeyDictionary()


def offloaded(model: nn.Module) -> bool:
    """Whether the weights of this model come from disk whenever they are needed."""
    return model in ON_DISK


@contextmanager
def at_work(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside, and products by the faster library; modes and gradients restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    if any(mode for _, mode in modes):
        model.eval()
    for parameter, gradient in gradients:
        if gradient is not None:
            parameter.grad = None
    try:
        with quick_products(model):
            yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


def on_a_card(weight: Tensor) -> bool:
    return weight.device.type == "cuda"


@contextmanager
def rounded_products(weight: Tensor) -> Iterator[None]:
    """TF32 for float32 products inside, where the weight lies on a card; what was set before comes back."""
    if not on_a_card(weight):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def restored(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights before, by name; they come back bit for bit."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])


def capture(once: Callable[[], None]) -> Callable[[], None]:
    """Record what a function launches; the function itself runs on the host only, and computes nothing yet."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    try:
        # Other threads (a loader that pins memory) go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            once()
    except BaseException:
        # A recording that breaks off leaves the generator waiting for its end.
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay


def waits_for_launches(work: Callable[[], object], idle: float = 0.3) -> bool:
    """Whether the card is done with this work nearly as soon as the last of it is launched: it waits for the host then."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - launched < idle * (time.perf_counter() - began)
