"""A model is lent: whatever is done with it, it comes back as it was. And the room there is for it on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


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
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; modes and gradients restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    if any(mode for _, mode in modes):
        model.eval()
    for parameter, gradient in gradients:
        if gradient is not None:
            parameter.grad = None
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


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
