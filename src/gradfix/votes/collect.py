"""Collect votes: ask each labelled sample which way every weight should move.

The whole model lies in this process. Batch size and engine affect speed, never the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import probe_module, values_later, values_of
from gradfix.checkpoints.names import name_map
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.registry import Registry, unknown
from gradfix.vectors.signvotes import SignVotes, dtype_for
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.batched.engine import MIXED, batched, computed_in, differ
from gradfix.votes.engines.auto import (
    ChosenEngine,
    Hope,
    Parts,
    choose,
    ends,
    fold_checked,
    fold_hoped,
    held,
    hope,
    remember,
    remembered,
)  # fmt: skip
from gradfix.votes.engines.loop import SILENT, Engine, NotFinite, backward, folding, loop
from gradfix.votes.engines.passes import Batch, Loss, samples
from gradfix.votes.resume import Bad, PartialVote, VoteStep, vote_key
from gradfix.votes.runs import Progress, VoteRun, collect, plain, refuse_nothing, uncompiled, voting_parameters
from gradfix.votes.tally import Sums, Tally

ENGINES: Registry[Engine] = Registry("engine")
ENGINES.register("loop")(loop)
ENGINES.register("batched")(batched)

GLANCE = 32  # votes of a tensor that mostly tell that it has some


class InMemory(VoteRun[SignVotes]):
    """The whole model in this process; an engine folds a batch at a time."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Iterable[Batch], engine: str = "auto") -> None:
        super().__init__(model, loss, batches, Tally(voting_parameters(model)))
        self.asked, self.notes = engine, list[str]()
        self.engine: Engine | None = None if engine == "auto" else ENGINES[engine]
        self._first: _FirstBatch | None = None
        self._hoped: _Hoped | None = None
        self.stay = isinstance(batches, (list, tuple))  # a loader may write its next batch over the last one

    def key(self, identity: str) -> str:
        return vote_key(self.model, "majority", self.asked, identity)

    def steps(self) -> Iterator[VoteStep]:
        for step in super().steps():
            if self.engine is None and self._hoped is None:  # even when it is counted: a resumed vote keeps its engine
                self._first = self.choose(step)
            yield step
            if self._first is not None:  # it was counted before
                self.confirm(self._first)

    def choose(self, step: VoteStep) -> _FirstBatch | None:
        """The engine that is remembered for this model; if none is, the step's batch, on which one is to be chosen."""
        known = remembered(self.model, self.loss, step.batch, self.tally)
        if known is not None:
            self.engine, self.notes = known.engine, [known.note]
            return None
        return _FirstBatch(step.first, step.batch, Parts(self.look, step.batch), [])

    def _decide(self, first: _FirstBatch) -> None:
        """Pick the fastest engine that this model may have, by a plan."""
        assert first.good is not None
        losses = first.parts.losses()
        first.good, first.bad = self.finite(VoteStep(first.number, first.good), losses)
        first.losses = losses[torch.isfinite(losses)]
        if first.good is not None:
            first.choice = choose(self.model, self.loss, first.good, self.tally)
            self.engine, self.notes = first.choice.engine, [first.choice.note]
            first.dtype = computed_in(self.model, self.loss, first.good, self.tally)

    def fold(self, step: VoteStep) -> list[Bad]:
        if self._first is not None and self._first.number == step.first:
            return self._fold_first(self._first)
        if self.engine is batched:
            try:  # it looks at its own losses: no forward pass just to see that they are finite
                batched(self.model, self.loss, step.batch, self.tally)
                return []
            except NotFinite:
                pass
        good, bad = self.finite(step)
        if good is not None:
            assert self.engine is not None
            self.engine(self.model, self.loss, good, self.tally)
        return bad

    def ahead(self, steps: Iterable[VoteStep]) -> Iterator[tuple[VoteStep, list[Bad]]]:
        """A first batch that is checked is settled when a few more are launched: a device has work in the meantime."""
        turn = iter(steps)
        while True:
            try:
                step = next(turn, None)
            except Exception:
                yield from self._settled()  # what is wrong with earlier batches comes first
                raise
            if step is not None and self._launched(step):
                continue
            yield from self._settled()
            if step is None:
                return
            yield step, self.fold(step)

    def _launched(self, step: VoteStep) -> bool:
        """Whether the step is the first, or follows it, and was folded in hope."""
        first, hoped = self._first, self._hoped
        kept = None if first is None and hoped is None else held(step.batch, self.tally, self.stay)
        if kept is None:
            return False
        if hoped is None:
            assert first is not None
            first.good, first.parts = kept, Parts(self.look, kept)
            begun = hope(self.model, self.loss, kept, self.tally, first.parts)
            if begun is None:
                first.hopeless = True
                return False
            self._first, self._hoped = None, _Hoped(first, begun, [])
        elif not hoped.hope.follow(kept):
            return False
        assert self._hoped is not None
        self._hoped.steps.append(VoteStep(step.first, kept))
        return True

    def _settled(self) -> Iterator[tuple[VoteStep, list[Bad]]]:
        """What was folded in hope counts now, or is folded in another way."""
        if self._hoped is None:
            return
        first, begun, (step, *others) = self._hoped.first, self._hoped.hope, self._hoped.steps
        self._hoped = None
        first.choice = begun.settle()
        counts = begun.counts
        del begun
        if first.choice is not None and first.choice.engine is not loop:
            self.engine, self.notes = first.choice.engine, [first.choice.note]
            self._settle(first)
            yield step, [] if counts else self.fold(step)
        else:
            yield step, self._fold_chosen(first)
        for step in others:
            yield step, [] if counts else self.fold(step)

    def _fold_first(self, first: _FirstBatch) -> list[Bad]:
        if not first.hopeless:
            first.choice = fold_hoped(self.model, self.loss, first.good, self.tally, first.parts)
        return self._fold_chosen(first)

    def _fold_chosen(self, first: _FirstBatch) -> list[Bad]:
        """The first batch by the engine that is chosen; where none is, one is chosen by a plan."""
        if first.choice is not None:
            self.engine, self.notes = first.choice.engine, [first.choice.note]
        else:
            self._decide(first)
            if first.good is not None and self.engine is not loop:
                assert first.choice is not None
                given = (self.model, self.loss, first.good, self.tally, first.losses)
                first.reason = fold_checked(first.choice, *given)
        if first.good is not None and self.engine is loop:
            loop(self.model, self.loss, first.good, self.tally)
        self._settle(first)
        return first.bad

    def confirm(self, first: _FirstBatch) -> None:
        """Choose where nobody folds the first batch: by few samples, and by the losses of all together."""
        self._decide(first)
        if first.good is not None and self.engine is not loop:
            assert first.choice is not None
            aside = Tally(self.tally.parameters)
            first.reason = fold_checked(first.choice, self.model, self.loss, ends(first.good), aside)
            assert first.losses is not None
            if first.reason is None and differ(self.look(first.good), first.losses, first.dtype):
                first.reason = MIXED
        self._settle(first)

    def _settle(self, first: _FirstBatch) -> None:
        self._first = None
        if first.reason is not None:
            self.tally.looped.clear()
            self.engine, self.notes = loop, [f"engine loop: {first.reason}."]
        elif first.choice is not None:
            remember(first.choice, self.model, self.loss, first.good, self.tally)

    def result(self, bad: list[Bad]) -> SignVotes:
        """The finished count under the model's names, tied to its weights."""
        refuse_nothing(self.tally)
        glance = _glance(self.tally)
        about = _about(self.model)  # names are found while the device is still busy
        _refuse_silence(self.tally, glance)
        told = [f"engine batched: {note}" for note in self.tally.told()]
        notes = (*(text for _, text in bad), *self.notes, *told, *_without_recomputation(self.model))
        return SignVotes(self.tally.votes(), self.tally.count, **about, notes=notes)


@dataclass
class _FirstBatch:
    """The batch on which an engine is chosen: its good samples, and, where a plan is needed, their losses taken in parts."""

    number: int
    good: Batch | None
    parts: Parts
    bad: list[Bad]
    losses: Tensor | None = None
    choice: ChosenEngine | None = None
    dtype: torch.dtype = torch.float32
    reason: str | None = None  # why the engine is not to be trusted
    hopeless: bool = False  # it was tried without a plan


class _Hoped(NamedTuple):
    """The first batch and those that followed it, folded and not yet settled."""

    first: _FirstBatch
    hope: Hope
    steps: list[VoteStep]


class MeanInMemory(VoteRun[Sums]):
    """The gradients of all samples, added up one after the other."""

    tally: Sums

    def __init__(self, model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> None:
        super().__init__(model, loss, batches, Sums(voting_parameters(model)))

    def key(self, identity: str) -> str:
        return vote_key(self.model, "mean", identity)

    def hooks(self) -> AbstractContextManager[None]:
        def add(name: str, gradient: Tensor) -> None:
            self.tally[name].add_(gradient.to_dense() if gradient.is_sparse else gradient)

        return folding(self.tally.parameters, add)

    def fold(self, step: VoteStep) -> list[Bad]:
        for number, sample in enumerate(samples(step.batch), step.first):
            self.tally.reserve(1)
            value = backward(self.loss, self.model, sample)
            if not torch.isfinite(value):
                raise DataError(
                    f"{self.name(number)} gives a loss of {float(value)}. Repair or remove it, or compute in "
                    "another --dtype."
                )
        return []

    def result(self, bad: list[Bad]) -> Sums:
        if self.tally.count == 0:
            raise DataError("no samples to take a gradient of; check the data and --shots.")
        _refuse_infinite(self.tally)
        return self.tally


def collect_votes(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    vote: Literal["majority", "mean"] = "majority",
    engine: str = "auto",
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    progress: Progress | None = None,
) -> SignVotes:
    """Count, per weight, the samples that want it to grow minus those that want it to shrink.

    `loss(model, batch)` returns one loss per sample. `vote="mean"` takes the sign of the summed
    gradient instead; its entries are 0 or plus/minus the sample count, a unanimous vote.
    With `checkpoint`, finished batches are saved there and skipped when the same call runs again;
    `identity` then names what the loss depends on besides model and batches."""
    if vote not in ("majority", "mean"):
        raise UsageError(unknown("vote", vote, ["majority", "mean"]))
    partial = None if checkpoint is None else PartialVote(checkpoint)
    model = uncompiled(model)
    if vote == "majority":
        return collect(InMemory(model, loss, batches, engine), partial, identity, progress)
    sums = collect(MeanInMemory(model, loss, batches), partial, identity, progress)
    _refuse_silence(sums, _glance(sums))
    dtype = dtype_for(sums.count)
    votes = {name: (-g.sign()).to(dtype) * sums.count for name, g in sums.mean().items()}
    return SignVotes(votes, sums.count, rule="mean", **_about(model))


def collect_gradient(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> TaskVector:
    """The mean gradient over all samples, in float32 or better; the real-valued reference of `magnitude`."""
    return TaskVector(collect(MeanInMemory(model, loss, batches)).mean())


def _glance(tally: Tally) -> Callable[[], list[list[Any]]]:
    """The first votes of every tensor, asked for while the device is still busy."""
    return values_later([buffer.flatten()[:GLANCE] for _, buffer in tally.items()])


def _refuse_silence(tally: Tally, glance: Callable[[], list[list[Any]]]) -> None:
    quiet = [(name, buffer) for (name, buffer), votes in zip(tally.items(), glance()) if not any(votes)]
    spoken = values_of([buffer.any() for _, buffer in quiet])
    silent = [name for (name, _), spoke in zip(quiet, spoken) if spoke == [False]]
    if len(silent) == len(tally.parameters):
        raise UnsafeResult(SILENT)
    if silent:
        warnings.warn(
            f"{len(silent)} tensors abstained (unused, or tied in every entry), first {silent[0]!r}.", stacklevel=4
        )


def _refuse_infinite(sums: Sums) -> None:
    """A NaN in one sample's gradient is one in the sum, whose sign is then nobody's."""
    names, buffers = zip(*sums.items())
    finite = values_of([torch.isfinite(buffer).all() for buffer in buffers])
    odd = [name for name, good in zip(names, finite) if good == [False]]
    if odd:
        raise DataError(
            f"gradients of {len(odd)} tensors are not finite though every loss is, first {odd[0]!r}. "
            "Compute in another --dtype, or take --vote majority, where such a sample abstains."
        )


def _without_recomputation(model: nn.Module) -> list[str]:
    """transformers recomputes activations in training mode alone; votes are taken in evaluation mode."""
    if any(vars(module).get("gradient_checkpointing") is True for module in model.modules()):
        return ["gradient checkpointing rests in evaluation mode: passes keep all activations."]
    return []


def _about(model: nn.Module) -> dict[str, Any]:
    """What votes remember of their model: names that differ on disk, and a few of its weights."""
    renamed = name_map(model).renamed
    differing = {plain(name): plain(disk) for name, disk in renamed.items() if plain(name) != plain(disk)}
    probe = {plain(name): values for name, values in probe_module(model, renamed).items()}
    return {"disk_names": differing, "probe": probe}
