"""The task protocol: what gradfix needs to know about a family of models.

A `Task` opens a checkpoint with the family's own loader and returns a `Bound` one: the model with
everything that belongs to that side (its head, its tokenizer or image transform). The core never sees
more of a task than `loss(model, batch)` and a score."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.checkpoints.open import raw_bytes
from gradfix.data.rows import where
from gradfix.errors import DataError, UsageError
from gradfix.registry import Registry
from gradfix.system.processes import current

Example = Mapping[str, Any]  # the columns of one row: "text" or "image", ..., and "label" as a string
Batch = dict[str, Tensor]
Prompts = str | Sequence[str]  # one prompt of a label, or several that are averaged
A_PASS = 32  # tokens that take as long on a CPU as one pass more
LETTERS = 4  # of a token


@dataclass(frozen=True)
class Marks:
    """What a model's answers to a set of examples are worth: sums, and the answers in the order of the batches.

    `right` counts right answers, or adds up shares of one; `hits` says which are right; `further` are sums of other
    measures by name. `losses` are those of the answers, where each has one of its own."""

    right: float
    loss: float
    count: int
    answers: list[int]
    hits: list[bool]
    further: Mapping[str, float] = field(default_factory=dict)
    losses: Sequence[float] = ()


class Bound(ABC):
    """One checkpoint, ready to be asked: model, head and transform of that side."""

    model: nn.Module
    labels: list[str]
    source: Path | None = None
    notes: Sequence[str] = ()
    measure: str = "accuracy"  # what the share of right answers is called

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> Batch:
        """Tensors with samples first, on the model's device; labels under "labels"."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per sample, shape (batch,); differentiable in the model's weights."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The index into `labels` of each sample's answer."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores per label, shape (batch, labels): what a teacher hands on. Softmax gives probabilities."""
        raise UsageError(f"{type(self).__name__} has no closed label set to score.")

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Answers and losses together; override it where one forward pass gives both."""
        return self.predict(model, batch), self.loss(model, batch)

    def mark(self, model: nn.Module, batches: Iterable[Batch]) -> Marks:
        """The score of a whole set, without gradients; override it where examples are no questions of their own."""

        def judge(batch: Batch) -> tuple[list[bool], float, list[int], list[float]]:
            guesses, losses = self.judge(model, batch)
            hits, double = (guesses == batch["labels"]).tolist(), losses.double()
            return hits, float(double.sum()), guesses.tolist(), double.tolist()

        found = current().each(
            judge, batches
        )  # processes that share the work each take some; the sums are those of one
        hits = [hit for some, _, _, _ in found for hit in some]
        answers = [answer for _, _, some, _ in found for answer in some]
        losses = [loss for *_, some in found for loss in some]
        return Marks(sum(hits), sum(loss for _, loss, _, _ in found), len(answers), answers, hits, losses=losses)

    def training_loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        """One loss per example of a training step; override it where the examples of a step serve each other."""
        return self.loss(model, self.collate(examples))

    def step_losses(self, model: nn.Module, examples: Sequence[Example]) -> list[Callable[[], Tensor]]:
        """The sum of a training step's losses, in parts that the processes which share the step make, one each."""
        return [partial(self.summed_loss, model, piece) for piece in current().pieces(examples)]

    def summed_loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        return self.training_loss(model, examples).sum()

    def linked(self, examples: Sequence[Example], anew: bool = False) -> Sequence[Example]:
        """The examples of one set, each knowing the others where the task asks about them together.

        Examples that know a set already keep it, unless they are to be linked `anew`."""
        return examples

    @abstractmethod
    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """One vector per sample from the frozen encoder, for example selection."""

    def trainable(self) -> list[str]:
        """Names of the parameters fine-tuning may move; heads that belong to the side stay frozen."""
        return [name for name, _ in self.model.named_parameters()]

    def head_names(self) -> list[str]:
        """Names of the parameters of a head that is part of the model; none where there is no such thing."""
        return []

    def unmoved(self) -> frozenset[str]:
        """Names of the parameters that are no part of the task: a transport leaves them as the target has them.

        The score does not see them, so to move them would write another model than the one that was measured."""
        return frozenset()

    def cuts(self) -> tuple[str, ...]:
        """How many of the texts seen so far were too long, and at what length they were cut; nothing if none was."""
        return ()

    def save_extras(self, folder: Path) -> None:  # noqa: B027
        """Write what belongs to this side but not to the weights (a zero-shot head, say) into `folder`."""

    def asked(self) -> str:
        """What the loss depends on besides weights and examples: labels, prompts, lengths, a frozen head.

        Interrupted work is taken up only where this is the same. A bound whose options stand in an object
        of its own names that object as well."""
        return settings_of(self)

    def batches(self, examples: Sequence[Example], size: int = 16) -> Iterator[Batch]:
        for first in range(0, len(examples), size):
            yield self.collate(examples[first : first + size])

    def scoring_batches(self, examples: Sequence[Example], size: int = 16) -> Iterator[Batch]:
        """Batches of like lengths, for sums over samples: short texts are not padded to long ones."""
        ordered = [examples[place] for place in by_length(examples)]
        for first in range(0, len(ordered), size):
            yield from map(self.collate, self.stretches(ordered[first : first + size]))

    def stretches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """The examples by length, in parts that take the least time one after the other.

        Override it where examples must stay together."""
        if not computes_padding(self.model):
            return [list(examples)]
        return [[examples[place] for place in part] for part in alike([_letters(one) / LETTERS for one in examples])]


def settings_of(*things: object) -> str:
    """The plain values and the tensors among the attributes of these objects, spelled out for comparison.

    Whatever else they hold (a model, a tokenizer, a path) counts by its type alone, and notes not at all."""
    attributes = [{name: value for name, value in vars(thing).items() if name != "notes"} for thing in things]
    return repr(_plain(attributes))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), hashlib.sha256(raw_bytes(value)).hexdigest()
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__.removeprefix("FSDP")


def by_length(examples: Sequence[Example]) -> list[int]:
    """Places of the examples, short texts first; images keep their order."""
    return sorted(range(len(examples)), key=lambda place: _letters(examples[place]))


def _letters(example: Example) -> int:
    return sum(len(str(example.get(column) or "")) for column in ("text", "text_pair", "prompt", "messages"))


def computes_padding(model: nn.Module) -> bool:
    """Whether padding takes as long as tokens do: on a CPU. A card is done with all of it at once, and processes that go
    in step must all make as many passes."""
    return next(model.parameters()).device.type == "cpu" and not current().in_step


def alike(lengths: Sequence[float]) -> list[list[int]]:
    """Places in stretches of like lengths, short ones first, with the least padding and the fewest stretches together."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    price: list[tuple[float, int]] = [(0.0, 0)]  # of the first so many, and where their last stretch begins
    for end, place in enumerate(order, 1):
        price.append(min((price[first][0] + (end - first) * lengths[place] + A_PASS, first) for first in range(end)))
    found: list[list[int]] = []
    end = len(order)
    while end:
        first = price[end][1]
        found.append(order[first:end])
        end = first
    return found[::-1]


class ClosedSet(Bound):
    """A bound model that scores every label: one forward gives losses and answers."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.logits(model, batch), batch["labels"], reduction="none")

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.logits(model, batch).argmax(-1)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.logits(model, batch)
        return logits.argmax(-1), functional.cross_entropy(logits, batch["labels"], reduction="none")


class Task(ABC):
    """A family of models and what is asked of them; holds the labels, no weights."""

    labels: dict[str, Prompts]  # label name -> prompt or prompts (the name itself where none is needed)
    takes_bare: ClassVar[bool] = False  # whether texts without any label are examples

    @abstractmethod
    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> Bound:
        """Load a checkpoint; non-empty loading info (missing or unexpected keys) is an error.

        A frozen head comes from the extras saved beside the weights, else from `head_from` (the
        pre-trained checkpoint of that side), else from the checkpoint itself. `base` is what an adapter among the
        two is put on (by default `head_from`, then the base it names), and where a bare weights file has its config
        and tokenizer."""


TASKS: Registry[type[Task]] = Registry("task")
"""Constructors by name; each takes `labels: Mapping[str, Prompts]` and its own keyword options."""


def label_indices(examples: Sequence[Example], labels: Mapping[str, int]) -> Tensor:
    """The answers as class numbers; a label outside the set is an error, never class 0."""
    found = []
    for index, example in enumerate(examples):
        label = str(example.get("label"))
        if label not in labels:
            raise DataError(f"{where(example, index)}: label {label!r} is not one of {', '.join(map(repr, labels))}.")
        found.append(labels[label])
    return torch.tensor(found, dtype=torch.long)
