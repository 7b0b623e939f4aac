"""Fine-tune a bound model: the recipe that makes task vectors, and the few-shot baseline.

The defaults are the paper's. A fine-tune is a function of its arguments and seed: interrupted and resumed, it
ends in the same bits."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.checkpoints.slices import Wholes
from gradfix.data.rows import exact_hash
from gradfix.errors import CorruptInput, DataError, UnsafeResult, UsageError
from gradfix.system.modules import at_work
from gradfix.system.processes import current
from gradfix.system.processor import quick_products
from gradfix.tasks.base import Bound, Example
from gradfix.training.costs import Work
from gradfix.training.steps import SCHEDULES, Training, draws, trainable_weights, warmed
from gradfix.votes.resume import weights_key

SAVE_EVERY_SECONDS = 30.0
PIECE = 128  # samples of a few-shot step that go through the model together
SAVE_SHARE = 0.05  # saving a large model takes a while: at most this much of the time
RAMP = 16  # steps that look for a rate
PAST = 10  # how far beyond the largest rate they look
SHARE = 1 / 16  # of the rate at which the loss was lowest


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
            raise UsageError("lr must be positive; weight_decay and warmup must not be negative, and all finite.")
        if not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"the seed must fit into 64 bits, got {self.seed}.")
        SCHEDULES[self.schedule]

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)
        return warmed(step, self.lr, self.steps, warm, SCHEDULES[self.schedule])


def finetune(
    bound: Bound,
    examples: Sequence[Example],
    *,
    recipe: Recipe | None = None,
    names: Sequence[str] | None = None,
    micro_batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
    **changes: Any,
) -> None:
    """Train `bound.model` in place with AdamW on the mean loss; `names` default to the task's trainable ones.

    `changes` are fields of the recipe: steps (2000), batch_size (128), lr (1e-5), weight_decay (0.1), warmup (0.1),
    seed (0) and schedule ("cosine"). `micro_batch` splits a batch to save memory. With `checkpoint`, the state is
    saved there now and then, and the same call goes on from it. Statistics of batch-norm layers stay as they are,
    so that the result differs from the start in trained weights only."""
    recipe = replace(recipe or Recipe(), **changes)
    if not examples:
        raise DataError("there are no examples to fine-tune on.")
    examples = bound.linked(examples)
    with _training(bound, names) as parameters:
        run = _Run(bound, examples, recipe, parameters, micro_batch or recipe.batch_size)
        first = run.resume(checkpoint) if checkpoint is not None else 0
        if progress is not None and first:
            progress(first)
        last_save, pause = time.monotonic(), SAVE_EVERY_SECONDS
        order = draws(len(examples), min(recipe.batch_size, len(examples)), recipe.seed)
        for step, rows in enumerate(islice(order, recipe.steps)):
            if step < first:
                continue
            run.step(step, rows)
            if progress is not None:
                progress(1)
            if checkpoint is not None and current().agree(time.monotonic() - last_save >= pause):
                begin = time.monotonic()
                run.save(checkpoint, step + 1)
                last_save = time.monotonic()
                pause = max(SAVE_EVERY_SECONDS, (last_save - begin) / SAVE_SHARE)


class _Run:
    """One fine-tune: its steps, and the file it can go on from."""

    def __init__(
        self,
        bound: Bound,
        examples: Sequence[Example],
        recipe: Recipe,
        parameters: dict[str, nn.Parameter],
        micro_batch: int,
    ) -> None:
        self.bound, self.examples, self.recipe, self.micro_batch = bound, examples, recipe, micro_batch
        self.training = Training(
            parameters, recipe.rate, _diverged, weight_decay=recipe.weight_decay, masters=True, steps=recipe.steps
        )

    def step(self, step: int, rows: Sequence[int]) -> None:
        self.training.step(step, self._losses(step, rows))

    def _losses(self, step: int, rows: Sequence[int]) -> Iterator[Callable[[], Tensor]]:
        examples, model = [self.examples[row] for row in rows], self.bound.model
        parts = [examples[first : first + self.micro_batch] for first in range(0, len(rows), self.micro_batch)]
        losses = self.bound.step_losses(model, examples)
        if len(parts) > 1:
            losses = [partial(self.bound.summed_loss, model, part) for part in parts]
        for number, loss in enumerate(losses):
            yield partial(self._loss, f"{self.recipe.seed}:{step}" + f":{number}" * (number > 0), loss, len(rows))

    def _loss(self, draw: str, loss: Callable[[], Tensor], count: int) -> Tensor:
        with _dropout_of(draw, self.training.parameters):
            return loss() / count

    def _key(self) -> str:
        """Names the run: recipe, what is asked of the model, examples in order, all weights and buffers.

        One batch as the model is shown it stands for the tokenizer or the image transform."""
        rows = hashlib.sha256("".join(map(exact_hash, self.examples)).encode()).hexdigest()
        names = list(self.training.parameters)
        about = repr((self.recipe, self.micro_batch, self.bound.asked(), rows, names))
        shown = self.bound.collate(self.examples[: self.micro_batch])
        model = self.bound.model
        weights = Wholes({**dict(model.named_buffers()), **dict(model.named_parameters())})
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
        self.training.load(saved.items())
        return int(saved.about["steps"])

    def save(self, path: Path, done: int) -> None:
        about = {"format": "gradfix.finetune", "key": self.key, "steps": str(done)}
        state = self.training.state()
        if current().leads:
            save_state(path, state, about)


def _diverged(step: int, loss: float) -> UnsafeResult:
    return UnsafeResult(f"the loss is {loss} in step {step}; lower the learning rate.")


def tune(
    bound: Bound,
    examples: Sequence[Example],
    *,
    rate: float | Callable[[int], float],
    stops: Sequence[int],
    batch: int,
    seed: int,
) -> Iterator[tuple[int, Work, float]]:
    """Few-shot fine-tuning; yields (steps done, work so far, the last batch's loss) at each stop, the model as it is then.

    `rate` is constant or told the step's number, counted from 0. Dropout stays off: with a few dozen examples it adds
    more noise than it removes, and a path must be repeatable."""
    rates: Callable[[int], float] = rate if callable(rate) else lambda step: rate

    def diverged(step: int, _: float) -> DataError:
        return DataError(f"few-shot fine-tuning at rate {rates(step):g} diverged in step {step + 1}.")

    training = Training(trainable_weights(bound), rates, diverged, steps=max(stops))
    order = draws(len(examples), min(batch, len(examples)), seed)

    def share(loss: Callable[[], Tensor], count: int) -> Tensor:
        return loss() / count

    def parts(rows: Sequence[int]) -> Iterator[Callable[[], Tensor]]:
        for first in range(0, len(rows), PIECE):
            for part in bound.stretches([examples[row] for row in rows[first : first + PIECE]]):
                for loss in bound.step_losses(bound.model, part):
                    yield partial(share, loss, len(rows))

    work = Work()
    for step, rows in enumerate(islice(order, max(stops))):
        with at_work(bound.model), torch.enable_grad():
            loss = training.step(step, parts(rows))
        work += Work(forward=len(rows), backward=len(rows), steps=1)
        if step + 1 in stops:
            yield step + 1, work, loss


def fitting_rate(
    bound: Bound, examples: Sequence[Example], *, between: tuple[float, float], batch: int, seed: int
) -> tuple[float, Work]:
    """The peak rate for a few dozen steps, found in one short run whose rate grows until the loss no longer falls.

    A small share of the rate at which it was lowest: one that just helps for a step is too much for many. The model is
    trained meanwhile; the caller puts it back."""
    low, high = between[0], between[1] * PAST
    path = tune(
        bound, examples, rate=lambda step: low * (high / low) ** (step / (RAMP - 1)), stops=range(1, RAMP + 1),
        batch=batch, seed=seed,
    )  # fmt: skip
    done, smooth, lowest, found = Work(), math.inf, math.inf, low
    with contextlib.suppress(DataError):  # a loss that is not finite ends the run, and says enough
        for step, work, loss in path:
            done, smooth = work, loss if smooth == math.inf else (smooth + loss) / 2
            if smooth < lowest:
                lowest, found = smooth, low * (high / low) ** ((step - 1) / (RAMP - 1))
    return min(max(found * SHARE, between[0]), between[1]), done


def cooling(peak: float, steps: int) -> Callable[[int], float]:
    """The rate of each step: a tenth to warm up, then half a cosine to nothing."""
    warm = max(1, steps // 10)
    return lambda step: warmed(step, peak, steps, warm)


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
        with torch.enable_grad(), quick_products(bound.model):
            yield {name: known[name] for name in known if name in set(wanted)}
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag, gradient in flags:
            parameter.requires_grad_(flag)
            parameter.grad = gradient


@contextmanager
def _dropout_of(draw: str, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Dropout drawn from a word alone, so that a resumed step draws the same; global state untouched."""
    devices = sorted({p.device.index or 0 for p in parameters.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big"))
        yield
