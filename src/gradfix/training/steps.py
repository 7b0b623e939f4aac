"""The one training loop: steps of AdamW, the order of the examples, the rates, and the way back.

Fine-tuning, few-shot fine-tuning and lessons from a teacher differ in their losses and in what they do between
two steps; the steps themselves are these.

Small models in small batches keep a card waiting for its launches. All steps of a lesson do the same to other rows of the
same tensors, so they may be recorded once and played: rows and rate are written to where the recording reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradfix.checkpoints.slices import is_split, on_the_leader, split_like
from gradfix.errors import GradfixError
from gradfix.registry import Registry
from gradfix.system import modules
from gradfix.system.meter import step_taken
from gradfix.system.processes import current
from gradfix.tasks.base import Bound
from gradfix.vectors.scale import Coefficients
from gradfix.vectors.taskvector import TaskVector

Schedule = Callable[[float], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")
Rows = tuple[Tensor, ...]
LAUNCHED = 2  # steps before a recording: the optimizer's moments are there then
WORTH = 8  # steps that must be left for a recording to pay


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
    """Named parameters under AdamW. `rate` and `diverged` are told the step's number, counted from 0, of `steps` in all.

    A loss that is not finite raises what `diverged` makes of it. With `masters`, half-precision weights are stepped
    through float32 copies, because a step of 1e-5 rounds away in bfloat16. `along` steps on beside the weights."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rate: Callable[[int], float],
        diverged: Callable[[int, float], GradfixError],
        *,
        steps: int,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        masters: bool = False,
        along: Coefficients | None = None,
    ) -> None:
        exact = (torch.float32, torch.float64)
        self.parameters, self.rate, self.diverged, self.steps = parameters, rate, diverged, steps
        self.masters = {
            name: nn.Parameter(p.detach().float()) if masters and p.dtype not in exact else p
            for name, p in parameters.items()
        }
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), weight_decay=weight_decay, betas=betas)
        self.along = along if along is not None and along.ways else None

    def rates(self, rate: Any) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
        """Every optimizer with its own rate, where that of the weights is this one."""
        yield self.optimizer, rate
        if self.along is not None:
            yield self.along.optimizer, rate * self.along.share

    def move(self) -> None:
        """The step itself: all gradients are there, and all rates are set."""
        if self.along is not None:
            self.along.look()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.along is not None:
            self.along.go()

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
        for optimizer, rate in self.rates(self.rate(number)):
            for settings in optimizer.param_groups:
                settings["lr"] = rate
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
                parameter.grad = None
        self.move()
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


def take_steps(
    training: Training,
    rows: Sequence[Rows],
    ordinary: Callable[..., Iterable[Tensor | Callable[[], Tensor]]],
    alike: Callable[..., Tensor],
) -> None:
    """A step for each entry of `rows`, which says what it is about.

    `ordinary(*rows)` gives the losses that `Training.step` takes. `alike(*rows)` is their sum, made so that shapes do not change
    from step to step and the host reads no value: it may be recorded. Both may write to tensors that outlive a step. Products of
    float32 on a card are rounded to TF32 meanwhile: small steps do not notice, and take half the time."""
    with modules.rounded_products(next(iter(training.parameters.values()))):
        _take_steps(training, rows, ordinary, alike)


def _take_steps(
    training: Training,
    rows: Sequence[Rows],
    ordinary: Callable[..., Iterable[Tensor | Callable[[], Tensor]]],
    alike: Callable[..., Tensor],
) -> None:
    launched = LAUNCHED if len(rows) >= LAUNCHED + WORTH and can_replay(training) else len(rows)
    for number in range(launched):
        training.step(number, ordinary(*rows[number]))
    played = _recorded(training, rows, launched, alike) if launched < len(rows) else None
    if played is not None:
        played.run(launched)
        return
    for number in range(launched, len(rows)):
        training.step(number, ordinary(*rows[number]))


def can_replay(training: Training) -> bool:
    """Whether all that is trained lies on one card, in one process, and is stepped in its own precision."""
    weights = list(training.parameters.values())
    own = all(training.masters[name] is weight for name, weight in training.parameters.items())
    return (
        own
        and current().size == 1
        and len({w.device for w in weights}) == 1
        and modules.on_a_card(weights[0])
        and not is_split(weights[0])
    )


def _recorded(training: Training, rows: Sequence[Rows], first: int, alike: Callable[..., Tensor]) -> Played | None:
    try:
        device = next(iter(training.parameters.values())).device
        columns = tuple(torch.stack(column).to(device) for column in zip(*rows, strict=True))
        own = tuple(column[first].clone() for column in columns)
        with torch.no_grad():
            gains = modules.waits_for_launches(lambda: alike(*own))
        return Played(training, own, columns, alike) if gains else None
    except Exception:  # whatever a model does that cannot be recorded, its steps can still be launched
        training.optimizer.zero_grad(set_to_none=True)
        return None


class Played:
    """A recorded step. It reads its rows and its rate where they are written before every play."""

    def __init__(self, training: Training, own: Rows, columns: Rows, loss: Callable[..., Tensor]) -> None:
        self.training, self.own, self.columns = training, own, columns
        device = own[0].device
        self.loss, self.rates = torch.zeros((), device=device), list[Tensor]()
        for optimizer, _ in training.rates(0.0):
            self.rates.append(torch.zeros((), device=device))
            for state in optimizer.state.values():
                state["step"] = state["step"].to(device)
            for settings in optimizer.param_groups:
                settings |= {"capturable": device.type == "cuda", "fused": device.type == "cuda", "lr": self.rates[-1]}

        def once() -> None:
            value = loss(*own)
            self.loss.copy_(value.detach())
            value.backward()
            training.move()

        self.play = modules.capture(once)

    def run(self, first: int) -> None:
        """Play the steps from number `first` on; the host looks at their losses once, at the end."""
        steps, device = len(self.columns[0]), self.loss.device
        rates = torch.tensor([self.training.rate(step) for step in range(steps)], device=device)
        losses = torch.zeros(steps, device=device)
        for step in range(first, steps):
            for own, column in zip(self.own, self.columns, strict=True):
                own.copy_(column[step])
            for own_rate, (_, rate) in zip(self.rates, self.training.rates(rates[step]), strict=True):
                own_rate.copy_(rate)
            self.play()
            losses[step].copy_(self.loss)
        step_taken(steps, self.training.steps)
        odd = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if odd:
            raise self.training.diverged(odd[0], float(losses[odd[0]]))
