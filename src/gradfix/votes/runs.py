"""How any vote is taken: one loop over steps, whatever a step is folded by.

`collect` takes every vote; a `VoteRun` tells it how a step is folded and how counts are brought together, for a model in
one process, in several, split over them, or on disk. The model's weights, gradients and mode come back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gradfix.errors import DataError, UnsafeResult
from gradfix.system.modules import at_work
from gradfix.votes.batched import recorded
from gradfix.votes.engines.loop import SILENT, Batches
from gradfix.votes.engines.passes import Batch, Loss, batch_size, losses_of, nothing_left_behind, take
from gradfix.votes.resume import Bad, PartialVote, VoteStep
from gradfix.votes.tally import Tally

BAD_SAMPLE_SHARE = 0.01

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

    def folded(self, steps: Iterable[VoteStep]) -> Iterator[tuple[VoteStep, list[Bad]]]:
        """One step after the other, each when it is counted, with its samples that are not."""
        for step in steps:
            yield step, self.fold(step)

    def ahead(self, steps: Iterable[VoteStep]) -> Iterator[tuple[VoteStep, list[Bad]]]:
        """The same, but later steps may be asked for before one is counted for good: nothing may be saved in between."""
        return self.folded(steps)

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
        with at_work(run.model), nothing_left_behind(run.model), run.hooks():
            steps = run.steps()
            if partial is not None:
                steps = partial.remaining(run.tally, steps, run.key(identity), bad)
            with run.failing_together():
                for step, found in run.ahead(steps) if partial is None else run.folded(steps):
                    bad += found
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


def voting_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each distinct trainable parameter once, under its canonical name; tied ones vote once."""
    named = uncompiled(model).named_parameters()
    found = {plain(name): p for name, p in named if p.requires_grad and p.is_floating_point()}
    if not found:
        raise UnsafeResult(SILENT)
    return found


def refuse_nothing(tally: Tally) -> None:
    if tally.count == 0:
        raise DataError("no samples to vote with; check the data and --shots.")


def uncompiled(model: nn.Module) -> nn.Module:
    """What a model was compiled from: it has the same weights, under their own names."""
    own = getattr(model, "_orig_mod", None)
    return own if isinstance(own, nn.Module) else model


def plain(name: str) -> str:
    """A weight's name without those of compiled parts around it."""
    return name.replace("_orig_mod.", "")
