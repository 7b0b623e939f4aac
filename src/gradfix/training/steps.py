"""The one training loop: steps of AdamW, the order of the examples, the rates, and the way back.

Fine-tuning, few-shot fine-tuning and lessons from a teacher differ in their losses and in what they do between
two steps; the steps themselves are these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradfix.checkpoints.slices import is_split, on_the_leader, split_like
from gradfix.errors import GradfixError
from gradfix.registry import Registry
from gradfix.system.meter import step_taken
from gradfix.system.processes import current
from gradfix.tasks.base import Bound
from gradfix.vectors.taskvector import TaskVector

Schedule = Callable[[float], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")
LESSONS = 1000  # steps that are looked through for the end of a schedule of unknown length


@SCHEDULES.register("cosine")
def cosine(done: float) -> float:
    """From 1 to 0 along half a cosine; `done` is the share of the steps after the warm-up."""
    return 0.5 * (1 + math.cos(math.pi * done))


@SCHEDULES.register("linear")
def linear(done: float) -> float:
    return 1 - done


@SCHEDULES.register("constant")
def constant(done: float) -> float:
    return 1.0


def warmed(step: int, lr: float, steps: int, warm: int, schedule: Schedule = cosine) -> float:
    """The learning rate of a step, counted from 0: linear over `warm` steps, then as the schedule says."""
    if step < warm:
        return lr * (step + 1) / warm
    return lr * schedule((step - warm) / max(steps - warm, 1))


def draws(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """The rows of each step: shuffled passes over `count` examples, cut into batches of one size."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


class Training:
    """Named parameters under AdamW. `rate` and `diverged` are told the step's number, counted from 0.

    A loss that is not finite raises what `diverged` makes of it. With `masters`, half-precision weights are stepped
    through float32 copies, because a step of 1e-5 rounds away in bfloat16."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rate: Callable[[int], float],
        diverged: Callable[[int, float], GradfixError],
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        masters: bool = False,
        steps: int | None = None,
    ) -> None:
        exact = (torch.float32, torch.float64)
        self.parameters, self.rate, self.diverged = parameters, rate, diverged
        self.masters = {
            name: nn.Parameter(p.detach().float()) if masters and p.dtype not in exact else p
            for name, p in parameters.items()
        }
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), weight_decay=weight_decay, betas=betas)
        # Said or not, a schedule is over where its rate is nothing; progress wants to know.
        self.steps = steps if steps is not None else next((step for step in range(LESSONS) if rate(step) <= 0), None)

    def step(self, number: int, losses: Iterable[Tensor | Callable[[], Tensor]]) -> float:
        """One step down the sum of the losses, each made and sent backward before the next; returns that sum.

        Processes that share the work each take some of the losses, and add up their gradients: a loss that is yet to be
        made is made by one of them alone."""
        group, values = current(), list[float]()
        if group.in_step:
            values = _backward_in_step(losses)
            losses = ()
        for place, loss in enumerate(losses):
            if place % group.size == group.rank:
                made = loss() if callable(loss) else loss
                values.append(float(made.detach()))
                if not math.isfinite(values[-1]):
                    break
                made.backward()
        whole = sum(chain(*group.gather(values)))
        if not math.isfinite(whole):
            raise self.diverged(number, whole)
        apart = {name: p for name, p in self.parameters.items() if not is_split(p)}
        if group.size > 1 and apart:
            add_up_gradients(apart)
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.rate(number)
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._publish()
        step_taken(number + 1, self.steps)
        return whole

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, named "weight/NAME", "exp_avg/NAME", ...; of split ones the whole, on the leader."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"weight/{name}"] = master
            for kind, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value
        return on_the_leader(current(), tensors) if any(map(is_split, self.masters.values())) else tensors

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Go on from a `state`."""
        places = {name: index for index, name in enumerate(self.masters)}
        moments: dict[int, dict[str, Tensor]] = {}
        for entry, tensor in tensors:
            kind, _, name = entry.partition("/")
            if kind == "weight":
                self.masters[name].copy_(split_like(tensor, self.masters[name]))
            else:
                moments.setdefault(places[name], {})[kind] = split_like(tensor, self.masters[name])
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self._publish()


def _backward_in_step(losses: Iterable[Tensor | Callable[[], Tensor]]) -> list[float]:
    """Send the losses back through a split model: every backward pass is one of all processes, and sums their gradients.

    A loss that all have made goes back in equal shares. Of those yet to be made each process takes one at a time, and
    takes part with nothing where there are too few."""
    group, values = current(), list[float]()
    waiting: list[Callable[[], Tensor]] = []

    def turn() -> None:
        made = waiting[min(group.rank, len(waiting) - 1)]()
        if group.rank < len(waiting):
            values.append(float(made.detach()))
        (made * float(group.rank < len(waiting))).backward()
        waiting.clear()

    for loss in losses:
        if isinstance(loss, Tensor):
            values.append(float(loss.detach()) / group.size)
            (loss / group.size).backward()
            continue
        waiting.append(loss)
        if len(waiting) == group.size:
            turn()
    if waiting:
        turn()
    return values


def add_up_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Every process gets the sum; a weight that no process has a gradient for keeps none."""
    weights = list(parameters.values())
    device = weights[0].device
    known = torch.tensor([p.grad is not None for p in weights], dtype=torch.int32, device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    for parameter, somewhere in zip(weights, known.tolist(), strict=True):
        if somewhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)


def trainable_weights(bound: Bound) -> dict[str, nn.Parameter]:
    names = set(bound.trainable())
    return {name: p for name, p in bound.model.named_parameters() if name in names and p.requires_grad}


def change(model: nn.Module, before: Mapping[str, Tensor]) -> TaskVector:
    """What training changed, in the weights' own dtype."""
    return TaskVector({name: p.detach() - before[name] for name, p in model.named_parameters()})
