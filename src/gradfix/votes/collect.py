"""Collect votes: ask each labelled sample which way every weight should move.

One loop, `collect`, takes every vote; a `VoteRun` tells it how a step is folded and how counts are brought together,
for a model in one process, in several, split over them, or on disk. The model's weights, gradients and mode come
back exactly as they were. Batch size and engine affect speed, never the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import probe_module, values_of
from gradfix.checkpoints.names import name_map
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.registry import Registry, unknown
from gradfix.system.modules import left_as_it_was
from gradfix.vectors.signvotes import SignVotes, dtype_for
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.batched import recorded
from gradfix.votes.batched.engine import MIXED, batched, computed_in, differ
from gradfix.votes.engines.auto import (
    ChosenEngine,
    Parts,
    choose,
    ends,
    fold_checked,
    fold_hoped,
    remember,
    remembered,
)  # fmt: skip
from gradfix.votes.engines.loop import SILENT, Batches, Engine, NotFinite, backward, folding, loop
from gradfix.votes.engines.passes import Batch, Loss, batch_size, losses_of, nothing_left_behind, samples, take
from gradfix.votes.resume import Bad, PartialVote, VoteStep, vote_key
from gradfix.votes.tally import Sums, Tally

ENGINES: Registry[Engine] = Registry("engine")
ENGINES.register("loop")(loop)
ENGINES.register("batched")(batched)

BAD_SAMPLE_SHARE = 0.01
GLANCE = 32  # votes of a tensor that mostly tell that it has some

Progress = Callable[[int], None]
Result = TypeVar("Result")


class VoteRun(Generic[Result]):
    """One way to take a vote: which steps this process takes, how one is folded, and what becomes of the counts."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Iterable[Batch], tally: Tally) -> None:
        self.model, self.loss, self.batches, self.tally = uncompiled(model), loss, batches, tally
        self.where = batches.where if isinstance(batches, Batches) else None

    def steps(self) -> Iterator[VoteStep]:
        first = 0
        for batch in self.batches:
            yield VoteStep(first, batch)
            first += batch_size(batch)

    def fold(self, step: VoteStep) -> list[Bad]:
        """Count the step's samples but for those without a finite loss."""
        raise NotImplementedError

    def result(self, bad: list[Bad]) -> Result:
        """After the last step: what the vote gives, once it is known to mean something."""
        raise NotImplementedError

    def key(self, identity: str) -> str:
        """What a partial vote must share with this one, besides the batches."""
        raise NotImplementedError

    def hooks(self) -> AbstractContextManager[Any]:
        """What the model carries while votes are taken."""
        return nullcontext()

    def failing_together(self) -> AbstractContextManager[Any]:
        """An error of one process is one of all, where there are several."""
        return nullcontext()

    def refuse_bad(self, bad: Sequence[Bad], step: VoteStep) -> None:
        seen = step.first + batch_size(step.batch)
        refuse_bad(bad, seen if self.where is None else len(self.where))

    def name(self, number: int) -> str:
        return f"sample {number}" if self.where is None else self.where[number]

    def look(self, batch: Batch) -> Tensor:
        """The losses of all samples."""
        with torch.no_grad():
            losses = losses_of(self.model, self.loss, batch)
        size = batch_size(batch)
        if losses.shape != (size,):
            raise DataError(
                f"loss(model, batch) must return one loss per sample, shape ({size},); got {tuple(losses.shape)}."
            )
        return losses

    def finite(self, step: VoteStep, losses: Tensor | None = None) -> tuple[Batch | None, list[Bad]]:
        """Leave out samples whose loss is NaN or Inf: the sign of NaN is 0, so they would vote in silence."""
        losses = self.look(step.batch) if losses is None else losses
        finite = torch.isfinite(losses)
        if bool(finite.all()):
            return step.batch, []
        odd = [int(place) for place in (~finite).nonzero().flatten()]
        bad = [(step.first + place, self.told(step.first + place, losses[place])) for place in odd]
        kept = finite.nonzero().flatten().cpu()  # the loss may have moved the batch to its device
        return (take(step.batch, kept) if kept.numel() else None), bad

    def told(self, number: int, loss: Tensor) -> str:
        return f"{self.name(number)}: loss is {float(loss)}"


def collect(
    run: VoteRun[Result], partial: PartialVote | None = None, identity: str = "", progress: Progress | None = None
) -> Result:
    """Take a vote: every step that `partial` does not hold yet is folded, and bad samples are left out.

    `identity` names what the loss depends on besides model and batches."""
    bad: list[Bad] = []
    try:
        with left_as_it_was(run.model), nothing_left_behind(run.model), run.hooks():
            steps = run.steps()
            if partial is not None:
                steps = partial.remaining(run.tally, steps, run.key(identity), bad)
            with run.failing_together():
                for step in steps:
                    bad += run.fold(step)
                    run.refuse_bad(bad, step)
                    if progress is not None:
                        progress(batch_size(step.batch))
    finally:
        recorded.drop(run.model)
    return run.result(bad)


def refuse_bad(bad: Sequence[Bad], samples: int) -> None:
    """A few bad samples are left out; more than one in a hundred means that something else is wrong.

    Of all samples where their number is known, else of those seen so far."""
    if len(bad) > BAD_SAMPLE_SHARE * samples:
        raise DataError(
            f"{len(bad)} of {samples} samples give a loss that is not finite, first {bad[0][1]}. "
            "Repair or remove them, or compute in another --dtype."
        )


class InMemory(VoteRun[SignVotes]):
    """The whole model in this process; an engine folds a batch at a time."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Iterable[Batch], engine: str = "auto") -> None:
        super().__init__(model, loss, batches, Tally(voting_parameters(model)))
        self.asked, self.notes = engine, list[str]()
        self.engine: Engine | None = None if engine == "auto" else ENGINES[engine]
        self._first: _FirstBatch | None = None

    def key(self, identity: str) -> str:
        return vote_key(self.model, "majority", self.asked, identity)

    def steps(self) -> Iterator[VoteStep]:
        for step in super().steps():
            if self.engine is None:  # on the first batch even when it is counted: a resumed vote keeps its engine
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

    def _fold_first(self, first: _FirstBatch) -> list[Bad]:
        first.choice = fold_hoped(self.model, self.loss, first.good, self.tally, first.parts)
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
        about = _about(self.model)  # names are found while the device is still busy
        _refuse_silence(self.tally)
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
    _refuse_silence(sums)
    dtype = dtype_for(sums.count)
    votes = {name: (-g.sign()).to(dtype) * sums.count for name, g in sums.mean().items()}
    return SignVotes(votes, sums.count, rule="mean", **_about(model))


def collect_gradient(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> TaskVector:
    """The mean gradient over all samples, in float32 or better; the real-valued reference of `magnitude`."""
    return TaskVector(collect(MeanInMemory(model, loss, batches)).mean())


def voting_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each distinct trainable parameter once, under its canonical name; tied ones vote once."""
    named = uncompiled(model).named_parameters()
    found = {_plain(name): p for name, p in named if p.requires_grad and p.is_floating_point()}
    if not found:
        raise UnsafeResult(SILENT)
    return found


def refuse_nothing(tally: Tally) -> None:
    if tally.count == 0:
        raise DataError("no samples to vote with; check the data and --shots.")


def _refuse_silence(tally: Tally) -> None:
    first = values_of([buffer.flatten()[:GLANCE] for _, buffer in tally.items()])
    quiet = [(name, buffer) for (name, buffer), votes in zip(tally.items(), first) if not any(votes)]
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


def uncompiled(model: nn.Module) -> nn.Module:
    """What a model was compiled from: it has the same weights, under their own names."""
    own = getattr(model, "_orig_mod", None)
    return own if isinstance(own, nn.Module) else model


def _plain(name: str) -> str:
    """A weight's name without those of compiled parts around it."""
    return name.replace("_orig_mod.", "")


def _without_recomputation(model: nn.Module) -> list[str]:
    """transformers recomputes activations in training mode alone; votes are taken in evaluation mode."""
    if any(vars(module).get("gradient_checkpointing") is True for module in model.modules()):
        return ["gradient checkpointing rests in evaluation mode: passes keep all activations."]
    return []


def _about(model: nn.Module) -> dict[str, Any]:
    """What votes remember of their model: names that differ on disk, and a few of its weights."""
    renamed = name_map(model).renamed
    differing = {_plain(name): _plain(disk) for name, disk in renamed.items() if _plain(name) != _plain(disk)}
    probe = {_plain(name): values for name, values in probe_module(model, renamed).items()}
    return {"disk_names": differing, "probe": probe}
