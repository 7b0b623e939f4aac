"""Distillation: a few steps that make one model answer like another, without forgetting the labels at hand.

The teacher is the tuned old model. It is rebuilt from what every transport has, base A and the task vector, so a
LoRA or a vector file serves as well as a full fine-tune; it answers every input once, beforehand. The student is
trained in place: the caller decides whether its weights are kept."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Source, open_checkpoint
from gradfix.errors import DataError
from gradfix.system.modules import at_work, rounded_products
from gradfix.system.processes import current
from gradfix.tasks.base import Bound, Task, alike as of_like_length, computes_padding
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.reading import speaks
from gradfix.training.costs import Work
from gradfix.training.steps import Training, draws, take_steps, trainable_weights
from gradfix.vectors.scale import Coefficients
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply

Batch = Mapping[str, Tensor]
ENOUGH = 320  # real unlabelled inputs that need no made-up ones beside them
SEEN = 4  # times that a labelled sample is seen where there are many
GENTLER = 4  # how much smaller the steps are where the first ones led away from the teacher


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """How the student is taught. The defaults are flat: half or twice of any of them costs little.

    `rate` is in units of the task vector's typical size per weight, so it fits models of any width. `betas` forget
    fast: in a few dozen steps the usual ones carry the first, steep gradients to the end.
    `prior` is how many labelled samples the teacher's word is worth; `pool` how many inputs it is asked about. `mapped`
    of them, `map_batch` at a time, compare the units of both bases; `probes` others judge where to start. `natural` is
    the share of the made-up inputs that hold a piece of a natural sentence, `piece` how much of a text a piece may take.
    `along` is the rate at which every matrix learns how far to go along the vector, in multiples of its way so far.
    `price` is what everything together may take, in samples read forward (backward is as much as twice forward): 11.9 %
    of 400 steps of 64. Inputs that are long beside the known ones are given fewer steps."""

    steps: int = 36
    rate: float = 0.2
    betas: tuple[float, float] = (0.5, 0.9)
    labelled: int = 12
    unlabelled: int = 40
    pool: int = 1440
    temperature: float = 2.0
    prior: float = 16.0
    probes: int = 48
    mapped: int = 128
    map_batch: int = 64
    natural: float = 0.5
    piece: float = 1.0
    along: float = 0.4
    price: int = 9150

    def affordable(self, spent: Work, each: float) -> Teaching:
        """With as many steps as are left to pay for where one reads so many samples; half of them in any case."""
        left = self.price - spent.samples
        return replace(self, steps=min(self.steps, max(int(left / (3 * each)), -(-self.steps // 2))))

    def real(self) -> Teaching:
        """More and smaller steps: what real inputs repay and made-up ones do not, and what answers to the latter would cost."""
        return replace(self, steps=self.steps * 5 // 2, labelled=self.labelled // 2, unlabelled=self.unlabelled // 2)

    def for_labels(self, count: int) -> Teaching:
        """With as many labelled samples in a step as see each of so many a few times, up to half of the step.

        A handful is seen often enough; hundreds say more than as many made-up inputs would."""
        size = self.labelled + self.unlabelled
        labelled = max(self.labelled, min(round(SEEN * count / self.steps), size // 2))
        asked = size - labelled
        needed = self.steps * asked + self.mapped + self.probes
        return replace(self, labelled=labelled, unlabelled=asked, pool=min(self.pool, max(needed, ENOUGH)))

    def of_texts(self) -> Teaching:
        """More inputs, half as long, in more steps: as many tokens, and more that is new in them."""
        return replace(
            self, steps=self.steps * 7 // 4, labelled=self.labelled // 2, pool=self.pool * 7 // 4, piece=self.piece / 2
        )

    def stretches(self) -> list[tuple[int, float]]:
        """How many inputs are made up of pieces how long, in the order of a lesson.

        The first compare units and the last judge a start: both want texts as long as they are met."""
        ends = self.mapped + self.probes
        if self.piece == 1 or self.pool <= ends:
            return [(self.pool, self.piece)]
        return [(self.mapped, 1.0), (self.pool - ends, self.piece), (self.probes, 1.0)]


@dataclass(frozen=True)
class Lesson:
    """Inputs the student is taught on, and the teacher's logits for them; `theirs` are they as the teacher reads them.

    `usual` is how many tokens a known text has on average; 0 where inputs are not made of tokens."""

    inputs: Batch
    answers: Tensor
    theirs: Batch = field(default_factory=dict)
    usual: float = 0.0

    def __len__(self) -> int:
        return len(self.answers)

    def length(self, rows: slice = slice(None)) -> float:
        """How long these inputs are beside the known ones: what a pass costs."""
        return tokens_of(picked(self.inputs, rows)) / self.usual if self.usual else 1.0

    def take(self, rows: Tensor) -> Lesson:
        return Lesson(take(self.inputs, rows), self.answers[rows.to(self.answers.device)])


def tokens_of(batch: Batch) -> float:
    """How many tokens a text of a batch has, on average."""
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return float(seen.sum(-1).double().mean())


def picked(batch: Batch, rows: Tensor | slice) -> dict[str, Tensor]:
    """Some samples of a batch, as wide as it is."""
    return {name: tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)] for name, tensor in batch.items()}


def take(batch: Batch, rows: Tensor) -> dict[str, Tensor]:
    """Some samples of a batch, token sequences cut to the longest of them."""
    found = picked(batch, rows)
    if "attention_mask" in found:
        mask = found["attention_mask"]
        seen = mask.bool().flatten(0, -2).any(0).nonzero()
        width = int(seen.max()) + 1 if len(seen) else mask.shape[-1]
        for name, tensor in found.items():
            if tensor.shape == mask.shape:
                found[name] = tensor[..., :width]
    return found


def can_teach(bound: Bound) -> bool:
    """Whether a model of this task has answers to hand on: scores over a closed label set, or how texts relate."""
    return isinstance(bound, EmbeddingBound) or (type(bound).logits is not Bound.logits and bool(bound.labels))


def teacher_of(bound: Bound, base: Source, tau: TaskVector, task: Task | None = None) -> Bound | None:
    """The tuned old model as a bound one: base A with its own head and transform, plus the task vector.

    From an open checkpoint alone, without a task to open it, only models that carry their head can be built;
    None where nobody can, or where the task has nothing to teach."""
    if not can_teach(bound) and not speaks(bound):
        return None
    weight = next(bound.model.parameters())
    if task is not None and isinstance(base, (str, os.PathLike)):
        old = task.open(base, dtype=weight.dtype, device=weight.device)
    elif not hasattr(bound, "head"):
        old = copy.copy(bound)
        old.model = copy.deepcopy(bound.model)
        _fill(old.model, base)
    else:
        return None
    names = dict(old.model.named_parameters())
    mapped = tau if set(tau) <= set(names) else name_map(old.model, list(tau)).to_module(tau)
    apply(old.model, {name: delta for name, delta in mapped.items() if name in names})
    return old


@torch.no_grad()
def _fill(model: nn.Module, base: Source) -> None:
    """The base's values in place of the model's own, for every tensor that both have."""
    state: Mapping[str, Tensor] = open_checkpoint(base).state()
    known = dict(model.named_parameters())
    if not set(known) <= set(state):
        state = name_map(model, list(state)).to_module(state)
    for name in known.keys() & state.keys():
        known[name].copy_(state[name])


@torch.no_grad()
def answers(bound: Bound, batch: Batch, size: int = 128) -> Tensor:
    """The model's logits, in pieces of similar length; products are rounded as in `take_steps`."""
    count = len(next(iter(batch.values())))
    order = torch.arange(count)
    if "attention_mask" in batch:
        order = batch["attention_mask"].flatten(1).sum(1).argsort().cpu()
    with at_work(bound.model), rounded_products(next(bound.model.parameters())):
        ask = current().each(lambda rows: logits_of(bound, take(batch, rows)).float(), order.split(size))
    found = torch.cat(ask)
    return found[order.argsort().to(found.device)]


def logits_of(bound: Bound, batch: Batch) -> Tensor:
    return in_stretches(bound.model, batch, lambda part: bound.logits(bound.model, part))


def in_stretches(model: nn.Module, batch: Batch, ask: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """What is asked of a batch, in its order: stretches of like lengths one by one where padding would take time."""
    parts: list[list[int]] = []
    if "attention_mask" in batch and computes_padding(model):
        lengths = batch["attention_mask"].sum(-1).reshape(len(batch["attention_mask"]), -1)
        parts = of_like_length((lengths.amax(1) * lengths.shape[1]).tolist())
    if len(parts) < 2:
        return ask(dict(batch))
    places = [torch.tensor(part) for part in parts]
    found = torch.cat([ask(take(batch, rows)) for rows in places])
    return found[torch.cat(places).argsort()]


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) per sample at a temperature, in units that do not depend on it."""
    wanted = functional.log_softmax(teacher / temperature, -1)
    found = functional.log_softmax(student / temperature, -1)
    return (wanted.exp() * (wanted - found)).sum(-1) * temperature**2


def unbiased_divergence(student: Tensor, teacher: Tensor) -> float:
    """The divergence after giving every class the constant that makes the mean logits equal.

    A constant per class is the first thing any training repairs; what is left says how much the student knows."""
    return float(divergence(student - (student - teacher).mean(0), teacher).mean())


def distil(
    bound: Bound,
    labelled: Batch | None,
    lesson: Lesson,
    rate: float,
    teaching: Teaching,
    seed: int,
    along: Callable[[Mapping[str, nn.Parameter]], Coefficients] | None = None,
    heard: Tensor | None = None,
) -> int:
    """Train `bound.model` in place; returns how many samples went forward and backward, shorter ones as parts of one.

    The loss is w * cross-entropy on the labelled samples + the divergence from the teacher, with w = N / (N + prior) for
    N labelled samples. An empty lesson leaves the cross-entropy alone, no labelled samples the divergence. `heard` is what
    the teacher answers to the labelled ones: with it they count among those that it is followed on. `along` makes the
    coefficients of a vector that are learned beside the weights."""

    def diverged(step: int, _: float) -> DataError:
        return DataError(f"the loss is not finite in step {step + 1} of the polish; try a lower rate.")

    weights = trainable_weights(bound)
    training = Training(
        weights, lambda step: rate * _schedule(step, teaching.steps), diverged, steps=teaching.steps,
        betas=teaching.betas, along=along and along(weights),
    )  # fmt: skip
    count, shares = _known(labelled), shares_of(labelled, lesson, teaching)
    known, asked = draws(count, shares[0], seed + 1), draws(len(lesson), shares[1], seed + 2)
    weight = count / (count + teaching.prior) if len(lesson) else 1.0

    def named(known: Tensor) -> Tensor | None:
        return heard[known.to(heard.device)] if heard is not None and len(lesson) else None

    def ordinary(known: Tensor, asked: Tensor) -> list[Callable[[], Tensor]]:
        seen = take(labelled, known) if labelled is not None else None
        told = lesson.take(asked) if len(lesson) else None
        return _losses(bound, seen, named(known), told, weight, teaching.temperature)

    def alike(known: Tensor, asked: Tensor) -> Tensor:
        seen = picked(labelled, known) if labelled is not None else None
        told = Lesson(picked(lesson.inputs, asked), lesson.answers[asked]) if len(lesson) else None
        return _loss(bound, seen, named(known), told, weight, teaching.temperature)

    rows = [(_whole(next(known)), _whole(next(asked))) for _ in range(teaching.steps)]
    with at_work(bound.model), torch.enable_grad():
        take_steps(training, rows, ordinary, alike)
    return round(teaching.steps * a_step(labelled, lesson, teaching))


def _known(labelled: Batch | None) -> int:
    return 0 if labelled is None else len(labelled["labels"])


def shares_of(labelled: Batch | None, lesson: Lesson, teaching: Teaching) -> tuple[int, int]:
    """How many labelled samples, and how many inputs of the lesson, a step reads."""
    count = _known(labelled)
    wanted = (teaching.labelled, teaching.unlabelled) if count else (0, teaching.labelled + teaching.unlabelled)
    return min(wanted[0], count), min(wanted[1], len(lesson))


def a_step(labelled: Batch | None, lesson: Lesson, teaching: Teaching) -> float:
    """How many samples a step reads, shorter ones as parts of one."""
    known, asked = shares_of(labelled, lesson, teaching)
    return known + asked * lesson.length()


def _whole(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)


def _losses(
    bound: Bound, seen: Batch | None, heard: Tensor | None, told: Lesson | None, weight: float, temperature: float
) -> list[Callable[[], Tensor]]:
    """The loss of one step, in as many parts as there are processes that share it."""
    group = current()
    if group.size == 1:
        return [lambda: _loss(bound, seen, heard, told, weight, temperature)]
    count, others = 0 if seen is None else len(seen["labels"]), 0 if told is None else len(told)
    followed = others + (0 if heard is None else len(heard))

    def part(known: Sequence[int], asked: Sequence[int]) -> Tensor:
        loss: Tensor | float = 0.0
        if len(known) and seen is not None:
            rows = torch.tensor(known)
            piece = take(seen, rows)
            if told is None:
                loss = weight * bound.loss(bound.model, dict(piece)).sum() / count
            else:
                found = logits_of(bound, piece)
                loss = weight * functional.cross_entropy(found, piece["labels"], reduction="sum") / count
                if heard is not None:
                    wanted = heard[rows.to(heard.device)].to(found)
                    loss = loss + divergence(found, wanted, temperature).sum() / followed
        if len(asked) and told is not None:
            lesson = told.take(torch.tensor(asked))
            found = logits_of(bound, lesson.inputs)
            loss = loss + divergence(found, lesson.answers.to(found), temperature).sum() / followed
        assert isinstance(loss, Tensor)
        return loss

    known, asked = (group.pieces(range(some)) for some in (count, others))
    return [partial(part, one, other) for one, other in zip_longest(known, asked, fillvalue=range(0))]


def _loss(
    bound: Bound, seen: Batch | None, heard: Tensor | None, told: Lesson | None, weight: float, temperature: float
) -> Tensor:
    """Labels and teacher in one forward pass."""
    if told is None:
        assert seen is not None
        return bound.loss(bound.model, dict(seen)).mean()
    if seen is None:
        found = logits_of(bound, told.inputs)
        return divergence(found, told.answers.to(found), temperature).mean()
    labels = seen["labels"]
    found = logits_of(bound, join(seen, told.inputs))
    wanted = told.answers.to(found)
    if heard is not None:
        wanted = torch.cat([heard.to(found), wanted])
    lesson = divergence(found[-len(wanted) :], wanted, temperature).mean()
    return weight * functional.cross_entropy(found[: len(labels)], labels) + lesson


def join(first: Batch, second: Batch) -> dict[str, Tensor]:
    """The samples of both batches; shorter token sequences are padded, and masked, on the right."""
    joined = {}
    for name in first:
        if name not in second:
            continue
        parts = [first[name], second[name].to(first[name])]
        if parts[0].dim() in (2, 3) and "attention_mask" in first:
            width = max(part.shape[-1] for part in parts)
            parts = [functional.pad(part, (0, width - part.shape[-1])) for part in parts]
        joined[name] = torch.cat(parts)
    return joined


def typical_size(vector: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """The median over tensors of the root mean square entry; tensors of zeros do not count."""
    sizes = [float(vector[name].double().square().mean().sqrt()) for name in names if name in vector]
    sizes = sorted(size for size in sizes if size > 0)
    return sizes[len(sizes) // 2] if sizes else 0.0


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over a tenth, then half a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - warm) / (steps - warm + 1)))
