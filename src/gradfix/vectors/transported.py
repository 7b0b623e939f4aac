"""Transport in memory: mask a task vector by the target's votes, then add it.

The streaming twin for checkpoints that do not fit is `gradfix.stream.checkpoint`; both run the same rules on the
same numbers, and give the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.slices import is_split, own_slice
from gradfix.checkpoints.weights import CHUNK
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.vectors.diagnostics import notebook_table
from gradfix.vectors.masks import MASKS, Mask
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector

Direction = SignVotes | TaskVector | Mapping[str, Tensor]


@dataclass(frozen=True)
class Transported:
    """A masked task vector and how it came about.

    `kept` is, per tensor, the share of the non-zero entries that survived."""

    update: TaskVector
    kept: dict[str, float]
    config: dict[str, Any] = field(default_factory=dict)

    def kept_share(self) -> float:
        """Over all tensors, weighted by their size."""
        sizes = {name: tensor.numel() for name, tensor in self.update.items()}
        return sum(self.kept[name] * sizes[name] for name in self.kept) / max(sum(sizes.values()), 1)

    def __repr__(self) -> str:
        return f"Transported({self.config.get('mask')}, {self.kept_share():.1%} kept, {self.update!r})"

    def _repr_html_(self) -> str:
        largest = sorted(self.update.items(), key=lambda item: -item[1].numel())[:12]
        rows = [(n, "x".join(map(str, t.shape)), f"{self.kept[n]:.1%}") for n, t in largest]
        return notebook_table(repr(self), ("tensor", "shape", "kept"), rows)


def transport(
    tau: TaskVector,
    direction: Direction | None = None,
    mask: str = "agree",
    *,
    margin: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Transported:
    """Keep the part of `tau` that `direction` allows.

    `direction` is the target's votes, or a task vector of the target itself (the oracle). `magnitude` needs
    the real-valued reference: a TaskVector, minus the mean gradient. `margin` belongs to `veto`, `generator`
    (or a seed) to the random masks. Weights the direction knows nothing about (frozen ones) stay as they are
    in the target: their update is zero."""
    rule = MASKS[mask]
    options = mask_options(mask, direction, margin)
    config: dict[str, Any] = {"mask": mask, **options}
    if rule.sees == "chance":
        config["seed"] = seed_of(generator)
        shown: Mapping[str, Tensor] = _Coins(tau, config["seed"])
    elif rule.sees == "nothing":
        shown = tau
    else:
        shown = _aligned(tau, direction)
    update: dict[str, Tensor] = {}
    kept: dict[str, float] = {}
    for name, delta in tau.items():
        if name not in shown:
            update[name], kept[name] = torch.zeros_like(delta), 0.0
            continue
        seen = shown[name].to(delta.device)
        if rule.sees == "votes" and not isinstance(direction, SignVotes):
            seen = seen.sign()  # one voter, whose numbers are no votes yet
        if seen.shape != delta.shape:
            raise IncompatibleCheckpoints(
                f"tensor {name!r} is {tuple(delta.shape)} in the task vector and {tuple(seen.shape)} in the votes."
            )
        update[name] = mask_piece(rule, delta, seen, options)
        kept[name] = share(int(update[name].count_nonzero()), int(delta.count_nonzero()))
    return Transported(TaskVector(update), kept, config)


class _Coins(Mapping[str, Tensor]):
    """A random direction for every tensor, drawn when asked for."""

    def __init__(self, tau: TaskVector, seed: int) -> None:
        self.tau, self.seed = tau, seed

    def __getitem__(self, name: str) -> Tensor:
        delta = self.tau[name]
        pieces = [torch.empty(0, dtype=torch.int8), *random_directions(self.seed, name, delta.numel())]
        return torch.cat(pieces).view(delta.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tau)

    def __len__(self) -> int:
        return len(self.tau)


def mask_piece(rule: Mask, delta: Tensor, seen: Tensor | None, options: Mapping[str, float]) -> Tensor:
    """Apply one rule to one tensor or flat piece; the single place both transports share."""
    if rule.sees == "direction" and seen is not None:
        seen = seen.sign().to(torch.int8)
    return rule(delta, seen, **options)


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def mask_options(mask: str, direction: Direction | None, margin: float | None) -> dict[str, float]:
    """Check that mask, direction and options belong together, before anything is computed."""
    rule = MASKS[mask]
    if margin is not None and rule.sees != "votes":
        raise UsageError(f"margin belongs to the veto mask, not to {mask!r}.")
    if rule.sees in ("chance", "nothing"):
        return {}
    if direction is None:
        raise UsageError(f"mask {mask!r} needs a direction: votes of the target, or the oracle's task vector.")
    if rule.sees == "reference" and isinstance(direction, SignVotes):
        raise UsageError(
            f"mask {mask!r} needs the real-valued reference, not signs: pass -gradfix.collect_gradient(...)."
        )
    if rule.sees != "votes":
        return {}
    margin = 0.0 if margin is None else float(margin)
    if not 0 <= margin <= 1:
        raise UsageError(f"margin must lie between 0 and 1, got {margin}.")
    return {"count": direction.count if isinstance(direction, SignVotes) else 1, "margin": margin}


def _aligned(tau: TaskVector, direction: Direction | None) -> Mapping[str, Tensor]:
    """Votes by the task vector's names: module names are translated where the votes know both."""
    if direction is None:
        raise UsageError("no direction given.")
    votes: Mapping[str, Tensor] = direction
    if isinstance(direction, SignVotes) and direction.disk_names:
        # A frozen head has no votes, so the names are compared by how many fit, not by whether all do.
        on_disk = {direction.disk_names.get(name, name): tensor for name, tensor in direction.items()}
        if len(set(tau) & set(on_disk)) > len(set(tau) & set(votes)):
            votes = on_disk
    if not set(tau) & set(votes):
        raise IncompatibleCheckpoints(
            f"task vector and votes share no tensor name (first {next(iter(tau), '')!r} and {next(iter(votes), '')!r}). "
            "Take both from checkpoints or both from modules."
        )
    return votes


def seed_of(generator: torch.Generator | int | None, who: str = "the random masks need") -> int:
    if isinstance(generator, int):
        return generator
    if generator is None:
        raise UsageError(f"{who} randomness as an argument: generator=torch.Generator() or a seed.")
    return int(torch.randint(1, 2**62, (), generator=generator))


def random_directions(seed: int, name: str, count: int) -> Iterator[Tensor]:
    """Coin flips for one tensor in pieces of CHUNK entries: the same in memory and in a stream."""
    for index, first in enumerate(range(0, count, CHUNK)):
        size = min(CHUNK, count - first)
        coins = chance(seed, name, index).bytes((size + 7) // 8)
        bits = np.unpackbits(np.frombuffer(coins, dtype=np.uint8))[:size]
        yield torch.from_numpy(bits.astype(np.int8) * 2 - 1)


def chance(seed: int, name: str, index: int) -> np.random.Generator:
    """Randomness that belongs to one piece of one tensor, whatever was drawn before it."""
    key = hashlib.sha256(f"{seed}\0{name}\0{index}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(key[:16], "little")))


def random_like(tau: TaskVector, seed: int) -> TaskVector:
    """A task vector with tau's mean and standard deviation and none of its structure."""
    flat = [tensor.double() for tensor in tau.values()]
    count = sum(tensor.numel() for tensor in flat)
    mean = sum(float(tensor.sum()) for tensor in flat) / count
    variance = sum(float((tensor - mean).square().sum()) for tensor in flat) / max(count - 1, 1)
    generator = torch.Generator().manual_seed(seed)
    return tau.map(lambda name, t: (torch.randn(t.shape, generator=generator) * variance**0.5 + mean).to(t.device))


@torch.no_grad()
def apply(model: nn.Module, update: Mapping[str, Tensor], alpha: float = 1.0) -> None:
    """Add `alpha * update` in place: float32 arithmetic or better, each weight's dtype kept.

    Names may be the module's or those on disk. Every tensor of the update must find its weight."""
    for weight, delta in by_weight(model, update):
        add_scaled(weight, delta, alpha)


def by_weight(model: nn.Module, update: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each weight of the model that the update names, once, with its change; of a split one what this process owns.

    A tied weight goes by several names and the update may hold them all: equal changes are one change, and a
    name without any (it had no votes) yields to one that has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not set(update) <= set(parameters):
        update = name_map(model, update).to_module(update)
    strangers = sorted(set(update) - set(parameters))
    if strangers:
        raise IncompatibleCheckpoints(
            f"the update has {len(strangers)} tensors that the model lacks, first {strangers[0]!r}."
        )
    chosen: dict[int, str] = {}
    for name in update:
        first = chosen.setdefault(id(parameters[name]), name)
        if first == name or torch.equal(update[first], update[name]) or not bool(update[name].any()):
            continue
        if bool(update[first].any()):
            raise IncompatibleCheckpoints(
                f"{first!r} and {name!r} are one tied weight of the model, and the update changes them differently. "
                f"Leave one out: update.subset(n for n in update if n != {name!r})."
            )
        chosen[id(parameters[name])] = name
    return [
        (own_slice(parameters[name].detach(), parameters[name]), own_slice(update[name], parameters[name]))
        if is_split(parameters[name])
        else (parameters[name], update[name])
        for name in chosen.values()
    ]


def add_scaled(weight: Tensor, delta: Tensor, alpha: float) -> None:
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight.copy_(weight.to(wide) + alpha * delta.to(device=weight.device, dtype=wide))
