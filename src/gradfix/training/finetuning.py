"""Fine-tune a bound model: the recipe that makes task vectors, and the few-shot baselines.

The defaults are the paper's. A run is a function of its arguments and seed: interrupted and resumed, it ends
in the same bits. Half-precision weights are trained through float32 copies, because a step of 1e-5 rounds away
in bfloat16."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.data.rows import exact_hash
from gradfix.errors import CorruptInput, DataError, UnsafeResult, UsageError
from gradfix.registry import Registry
from gradfix.tasks.base import Bound, Example
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.resume import weights_key

Schedule = Callable[[float], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")
SAVE_EVERY_SECONDS = 30.0
SAVE_SHARE = 0.05  # saving a large model takes a while: at most this much of the time
ONE_STEP_RATE = 1e-5


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to fine-tune; `warmup` is a share of the steps below 1, a number of steps from 1 on."""

    steps: int = 2000
    batch_size: int = 128
    lr: float = 1e-5
    weight_decay: float = 0.1
    warmup: float = 0.1
    seed: int = 0
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        amounts = (self.lr, self.weight_decay, self.warmup)
        if not self.lr > 0 or not all(0 <= amount < math.inf for amount in amounts):
            raise UsageError(
                "lr must be positive; weight_decay and warmup must not be negative, and all finite."
            )
        if not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"the seed must fit into 64 bits, got {self.seed}.")
        SCHEDULES[self.schedule]

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * SCHEDULES[self.schedule]((step - warm) / max(self.steps - warm, 1))


def finetune(
    bound: Bound,
    examples: Sequence[Example],
    *,
    steps: int = 2000,
    batch_size: int = 128,
    lr: float = 1e-5,
    weight_decay: float = 0.1,
    warmup: float = 0.1,
    seed: int = 0,
    schedule: str = "cosine",
    names: Sequence[str] | None = None,
    micro_batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train `bound.model` in place with AdamW on the mean loss; `names` default to the task's trainable ones.

    `micro_batch` splits a batch to save memory. With `checkpoint`, the state is saved there now and then,
    and the same call goes on from it. Statistics of batch-norm layers stay as they are, so that the result
    differs from the start in trained weights only."""
    recipe = Recipe(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        warmup=warmup,
        seed=seed,
        schedule=schedule,
    )
    _train(bound, examples, recipe, names, micro_batch, progress, checkpoint)


def _train(
    bound: Bound,
    examples: Sequence[Example],
    recipe: Recipe,
    names: Sequence[str] | None = None,
    micro_batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Tensor]:
    """The trained weights in float32 or better; the model holds them in its own dtype."""
    if not examples:
        raise DataError("there are no examples to fine-tune on.")
    with _training(bound, names) as parameters:
        run = _Run(bound, examples, recipe, parameters, micro_batch or recipe.batch_size)
        first = run.resume(checkpoint) if checkpoint is not None else 0
        if progress is not None and first:
            progress(first)
        last_save, pause = time.monotonic(), SAVE_EVERY_SECONDS
        for step, rows in enumerate(_draws(len(examples), recipe)):
            if step < first:
                continue
            run.step(step, rows)
            if progress is not None:
                progress(1)
            if checkpoint is not None and time.monotonic() - last_save >= pause:
                begin = time.monotonic()
                run.save(checkpoint, step + 1)
                last_save = time.monotonic()
                pause = max(SAVE_EVERY_SECONDS, (last_save - begin) / SAVE_SHARE)
        return {name: master.detach() for name, master in run.masters.items()}


def one_step(
    bound: Bound, examples: Sequence[Example], *, lr: float = ONE_STEP_RATE, micro_batch: int = 16
) -> TaskVector:
    """The update of one AdamW step on the whole few-shot set; the model is left as it was."""
    recipe = Recipe(
        steps=1, batch_size=max(len(examples), 1), lr=lr, weight_decay=0.0, warmup=0, schedule="constant"
    )
    with _restored(bound.model) as before:
        return _difference(_train(bound, examples, recipe, micro_batch=micro_batch), before)


def tuned_few_shot(
    bound: Bound,
    fewshot: Sequence[Example],
    score: Callable[[nn.Module], float],
    lrs: Sequence[float] = (1e-5, 3e-5, 1e-4),
    steps: Sequence[int] = (5, 10, 20, 40),
    *,
    batch_size: int = 32,
    seed: int = 0,
) -> TaskVector:
    """Few-shot fine-tuning at the rate and step count that `score` likes best; no step at all is a candidate.

    One run per rate serves all step counts. Of equals, the first tried wins. The model is left as it was."""
    from gradfix.training.fewshot import tune

    with _restored(bound.model) as before:
        best_score, best = score(bound.model), _difference(before, before)
        for rate in lrs:
            _copy_in(bound.model, before)
            for _ in tune(bound, fewshot, rate=rate, stops=steps, batch=batch_size, seed=seed):
                found = score(bound.model)
                if found > best_score:
                    best_score, best = found, _difference(dict(bound.model.named_parameters()), before)
        return best


class _Run:
    """Optimizer state of one fine-tune, and how it is saved."""

    def __init__(
        self,
        bound: Bound,
        examples: Sequence[Example],
        recipe: Recipe,
        parameters: dict[str, nn.Parameter],
        micro_batch: int,
    ) -> None:
        self.bound, self.examples, self.recipe = bound, examples, recipe
        self.parameters, self.micro_batch = parameters, micro_batch
        self.masters = {
            name: p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float())
            for name, p in parameters.items()
        }
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()), lr=recipe.lr, weight_decay=recipe.weight_decay
        )

    def step(self, step: int, rows: Sequence[int]) -> None:
        with _dropout_of(self.recipe.seed, step, self.parameters):
            for first in range(0, len(rows), self.micro_batch):
                part = [self.examples[row] for row in rows[first : first + self.micro_batch]]
                loss = self.bound.loss(self.bound.model, self.bound.collate(part)).sum() / len(rows)
                if not torch.isfinite(loss):
                    raise UnsafeResult(
                        f"the loss is {float(loss.detach())} in step {step}; lower the learning rate."
                    )
                loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(step)
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])

    def _key(self) -> str:
        """Names the run: recipe, what is asked of the model, examples in order, all weights and buffers.

        One batch as the model is shown it stands for the tokenizer or the image transform."""
        rows = hashlib.sha256("".join(map(exact_hash, self.examples)).encode()).hexdigest()
        about = repr((self.recipe, self.micro_batch, self.bound.asked(), rows, list(self.parameters)))
        shown = self.bound.collate(self.examples[: self.micro_batch])
        model = self.bound.model
        weights = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        return weights_key(weights, weights_key(shown, about))

    def resume(self, path: Path) -> int:
        """Load the state of an interrupted run and return the number of its steps; 0 for a fresh one."""
        self.key = self._key()
        if not path.is_file():
            return 0
        saved = State(path)
        if saved.about.get("format") != "gradfix.finetune" or saved.about.get("key") != self.key:
            raise CorruptInput(
                f"{path} belongs to another fine-tune (other data, model or options). Delete it to start over."
            )
        places = {name: index for index, name in enumerate(self.masters)}
        state: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for entry, tensor in saved.items():
                kind, _, name = entry.partition("/")
                if kind == "weight":
                    self.masters[name].copy_(tensor)
                else:
                    state.setdefault(places[name], {})[kind] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self._publish()
        return int(saved.about["steps"])

    def save(self, path: Path, done: int) -> None:
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"weight/{name}"] = master
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value
        save_state(path, tensors, {"format": "gradfix.finetune", "key": self.key, "steps": str(done)})


def _draws(count: int, recipe: Recipe) -> Iterator[list[int]]:
    """The rows of each step: shuffled passes, cut into batches; a set smaller than a batch is one batch."""
    generator = torch.Generator().manual_seed(recipe.seed)
    size = min(recipe.batch_size, count)
    waiting: list[int] = []
    for _ in range(recipe.steps):
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


@contextmanager
def _training(bound: Bound, names: Sequence[str] | None) -> Iterator[dict[str, nn.Parameter]]:
    """Training mode with gradients for the named parameters only; modes, flags and gradients come back."""
    known = dict(bound.model.named_parameters())
    wanted = list(names) if names is not None else bound.trainable()
    odd = [name for name in wanted if name not in known]
    if odd or not wanted:
        raise UsageError(f"nothing to train: no parameter {odd[0]!r}." if odd else "nothing to train.")
    modes = [(module, module.training) for module in bound.model.modules()]
    flags = [(p, p.requires_grad, p.grad) for p in known.values()]
    bound.model.train()
    for module in bound.model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    for name, parameter in known.items():
        parameter.requires_grad_(name in wanted)
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield {name: known[name] for name in known if name in set(wanted)}
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag, gradient in flags:
            parameter.requires_grad_(flag)
            parameter.grad = gradient


@contextmanager
def _dropout_of(seed: int, step: int, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Dropout drawn from (seed, step) alone, so that a resumed step draws the same; global state untouched."""
    devices = sorted({p.device.index or 0 for p in parameters.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:7], "big"))
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield before
    finally:
        _copy_in(model, before)


def _copy_in(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _difference(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> TaskVector:
    """What training changed, in float32 or better; weights it did not touch get a zero."""
    delta = {}
    for name, old in before.items():
        dtype = torch.promote_types(old.dtype, torch.float32)
        delta[name] = after.get(name, old).detach().to(dtype) - old.to(dtype)
    return TaskVector(delta)
