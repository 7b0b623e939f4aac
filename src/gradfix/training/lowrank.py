"""A LoRA on a lent model: small trained factors beside frozen weights, and the model as it was afterwards.

The factors are peft's own layers, so the adapter that is trained is the adapter that is written. They are float32
whatever the model computes in, because their steps would round away in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.lora import factored_norm
from gradfix.checkpoints.slices import is_split, on_the_leader
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.stream.lora_out import LINEAR, TURNED, LoraResult, layer_kinds, truncated
from gradfix.system.modules import offloaded
from gradfix.system.processes import current
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector

ADAPTER = "default"
FIRST_DRAW = 0  # of factors that begin at random: the same whatever was drawn before, so that lessons can go on
Factors = dict[str, tuple[Tensor, Tensor]]


class Adapted:
    """The factors on a model; `parameters` are what is trained."""

    def __init__(self, model: nn.Module, rank: int, paths: list[str]) -> None:
        self.rank = rank
        self.layers: dict[str, Any] = {path: model.get_submodule(path) for path in paths}
        self.turned = {path for path in paths if type(self.layers[path].base_layer).__name__ == "Conv1D"}
        self.parameters: dict[str, nn.Parameter] = {}
        for path, layer in self.layers.items():
            for side in ("lora_A", "lora_B"):
                weight = getattr(layer, side)[ADAPTER].weight
                weight.data = weight.data.float()
                self.parameters[f"{path}.{side}"] = weight.requires_grad_(True)

    def begin(self, start: Mapping[str, Tensor], alpha: float) -> float:
        """Put `alpha * start` into the factors, as far as their rank holds it; the share of its energy that they hold."""
        whole = held = 0.0
        for name in start:
            path = name.removesuffix(".weight")
            known = isinstance(start, LowRank) and start.rank <= self.rank and path in self.layers
            if known:
                left, right = start.factors(name)  # type: ignore[attr-defined]
                energy = kept = factored_norm({name: (left, right)}) ** 2
            else:
                change = start[name].detach().float()
                energy, kept = float(change.double().square().sum()), 0.0
                if path in self.layers and energy:
                    left, right = truncated(change, self.rank)
                    kept = float((left @ right).double().square().sum())
            whole, held = whole + energy, held + kept
            if kept:
                self._fill(path, alpha * left, right)
        return held / whole if whole else 1.0

    @torch.no_grad()
    def _fill(self, path: str, left: Tensor, right: Tensor) -> None:
        if path in self.turned:
            left, right = right.T, left.T
        down, up = self.parameters[f"{path}.lora_A"], self.parameters[f"{path}.lora_B"]
        rank = left.shape[1]
        up.zero_()
        up[:, :rank] = left.to(up)
        down[:rank] = right.to(down)

    def factors(self) -> Factors:
        """By the name of the weight they change: `left @ right` is the change."""
        found: Factors = {}
        for path in self.layers:
            left = self.parameters[f"{path}.lora_B"].detach().float().cpu().clone()
            right = self.parameters[f"{path}.lora_A"].detach().float().cpu().clone()
            found[f"{path}.weight"] = (right.T, left.T) if path in self.turned else (left, right)
        return found


@contextmanager
def adapted(model: nn.Module, rank: int) -> Iterator[Adapted]:
    """Factors beside every linear map but the last one; the weights ask for no gradients meanwhile."""
    from peft import LoraConfig, inject_adapter_in_model

    if rank < 1:
        raise UsageError(f"the rank of a LoRA must be at least 1, got {rank}.")
    last = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = layer_kinds(model)
    paths = [
        name.removesuffix(".weight")
        for name, kind in kinds.items()
        if kind in (LINEAR, TURNED) and model.get_submodule(name.removesuffix(".weight")) is not last
    ]
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modules = {path: model.get_submodule(path) for path in paths}
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=paths, lora_dropout=0.0, bias="none")
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with _shown_whole(modules.values(), next(model.parameters()).device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(FIRST_DRAW)
            inject_adapter_in_model(config, model)
        yield Adapted(model, rank, paths)
    finally:
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module)
        for name, flag in flags.items():
            model.get_parameter(name).requires_grad_(flag)
        for leftover in ("peft_config", "active_adapter"):
            if hasattr(model, leftover):
                delattr(model, leftover)


@contextmanager
def _shown_whole(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """peft takes a weight in slices for a narrower layer, and puts factors where a weight is: it is shown a whole one on
    the device, which takes no memory."""
    held = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
    split = [(m, name, p) for m, name, p in held if is_split(p) or p.is_meta]
    for module, name, p in split:
        like = torch.zeros((), dtype=p.dtype, device=device).expand(p.shape)
        module._parameters[name] = nn.Parameter(like, requires_grad=False)
    try:
        yield
    finally:
        for module, name, p in split:
            module._parameters[name] = p


class LowRank(TaskVector):
    """An update that is kept as its factors; a tensor is multiplied out when it is asked for."""

    def __init__(self, factors: Factors) -> None:
        self._factors = factors

    def __getitem__(self, name: str) -> Tensor:
        left, right = self._factors[name]
        return left @ right

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)

    def norm(self) -> float:
        return factored_norm(self._factors)

    def renamed(self, mapping: Mapping[str, str]) -> LowRank:
        return LowRank({mapping.get(name, name): pair for name, pair in self._factors.items()})

    @property
    def rank(self) -> int:
        return max(left.shape[1] for left, _ in self._factors.values())

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self._factors[name]


@contextmanager
def moved_by(model: nn.Module, update: Mapping[str, Tensor], alpha: float) -> Iterator[None]:
    """The model plus `alpha * update`; factors are put beside the weights, anything else is added to them."""
    if not isinstance(update, LowRank) and offloaded(model):
        from gradfix.votes.distributed.offload import moved_on_disk

        with moved_on_disk(model, update, alpha):
            yield
        return
    if not isinstance(update, LowRank):
        with dialled(model, update) as dial:
            dial.turn(alpha)
            yield
        return
    with adapted(model, update.rank) as lora:
        missing = [name for name in update if name.removesuffix(".weight") not in lora.layers]
        if missing:
            raise IncompatibleCheckpoints(f"tensor {missing[0]!r} belongs to no layer that a LoRA can stand beside.")
        if alpha:
            lora.begin(update, alpha)
        yield


def put_together(update: TaskVector) -> TaskVector:
    """The update of a model that is split over processes, whole on the one that writes it."""
    if not current().in_step or isinstance(update, LowRank):
        return update
    return TaskVector(on_the_leader(current(), update))


def as_adapter(factors: Factors, rank: int) -> LoraResult:
    """Trained factors as they are written: nothing is approximated."""
    shapes = {name: torch.Size((len(left), right.shape[1])) for name, (left, right) in factors.items()}
    return LoraResult(rank, dict(factors), dict.fromkeys(factors, 1.0), 1.0, shapes)
