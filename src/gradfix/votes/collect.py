"""Collect votes: ask each labelled sample which way every weight should move.

The model's weights, gradients and mode come back exactly as they were. Batch size and engine affect
speed, never the result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradfix.checkpoints.identity import probe_module, values_of
from gradfix.checkpoints.names import name_map
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.registry import Registry, unknown
from gradfix.system.modules import left_as_it_was
from gradfix.vectors.signvotes import SignVotes, Sums, Tally, dtype_for
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.batched.engine import batched
from gradfix.votes.engines.loop import (
    SILENT,
    Batch,
    Loss,
    NotFinite,
    backward,
    batch_size,
    folding,
    loop,
    samples,
    take,
)

Engine = Callable[[nn.Module, Loss, Batch, Tally], None]
ENGINES: Registry[Engine] = Registry("engine")
ENGINES.register("loop")(loop)
ENGINES.register("batched")(batched)

BAD_SAMPLE_SHARE = 0.01


def collect_votes(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    vote: Literal["majority", "mean"] = "majority",
    engine: str = "auto",
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    where: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> SignVotes:
    """Count, per weight, the samples that want it to grow minus those that want it to shrink.

    `loss(model, batch)` returns one loss per sample. `vote="mean"` takes the sign of the summed
    gradient instead; its entries are 0 or plus/minus the sample count, a unanimous vote.
    With `checkpoint`, finished batches are saved there and skipped when the same call runs again;
    `identity` then names what the loss depends on besides model and batches. `where` are the samples' names
    for messages."""
    if vote == "mean":
        return _mean_votes(model, loss, batches, progress, checkpoint, identity, where)
    if vote != "majority":
        raise UsageError(unknown("vote", vote, ["majority", "mean"]))
    tally = Tally(_at_least_one(voting_parameters(model)))
    notes: list[str] = []
    bad: list[str] = []
    with left_as_it_was(model):
        fold: Engine | None = None
        if checkpoint is not None:
            from gradfix.votes.resume import resumable, vote_key

            batches, fold, notes = _engine_of_the_first(engine, model, loss, batches, tally)
            key = vote_key(model, "majority", engine, identity)
            batches = resumable(checkpoint, tally, batches, key=key, bad=bad)
        notes += _run(engine, model, loss, batches, tally, progress, bad, fold, where)
    if tally.count == 0:
        raise DataError("no samples to vote with; check the data and --shots.")
    return finish(model, tally, [*bad, *notes])


def finish(model: nn.Module, tally: Tally, notes: list[str]) -> SignVotes:
    """The finished count under the model's names, tied to its weights."""
    _refuse_silence(tally)
    return SignVotes(tally.votes(), tally.count, **_about(model), notes=tuple(notes))


def _run(
    engine: str,
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    tally: Tally,
    progress: Callable[[int], None] | None,
    bad: list[str],
    fold: Engine | None,
    where: Sequence[str] | None,
) -> list[str]:
    """Fold all batches; samples without a finite loss go to `bad`. Returns the notes of the engine."""
    notes: list[str] = []
    if fold is None and engine != "auto":
        fold = ENGINES[engine]
    for batch in batches:
        if fold is batched and _folded(fold, model, loss, batch, tally):
            if progress is not None:
                progress(batch_size(batch))
            continue
        seen = tally.count + len(bad)  # more than zero at first when an interrupted vote goes on
        good, skipped = finite_samples(model, loss, batch, first=seen, where=where)
        seen += batch_size(batch)
        bad.extend(skipped)
        refuse_bad(bad, seen if where is None else len(where))
        if good is not None:
            if fold is None:
                fold, note = choose_engine(engine, model, loss, good, tally)
                notes.extend(note)
            fold(model, loss, good, tally)
        if progress is not None:
            progress(batch_size(batch))
    return notes


def refuse_bad(bad: Sequence[str], samples: int) -> None:
    """A few bad samples are left out; more than one in a hundred means that something else is wrong.

    Of all samples where their number is known, else of those seen so far."""
    if len(bad) > BAD_SAMPLE_SHARE * samples:
        raise DataError(
            f"{len(bad)} of {samples} samples give a loss that is not finite, first {bad[0]}. "
            "Repair or remove them, or compute in another --dtype."
        )


def _folded(fold: Engine, model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> bool:
    """Fold with an engine that looks at its own losses: no forward pass just to see that they are finite."""
    try:
        fold(model, loss, batch, tally)
    except NotFinite:
        return False
    return True


def _engine_of_the_first(
    engine: str, model: nn.Module, loss: Loss, batches: Iterable[Batch], tally: Tally
) -> tuple[Iterable[Batch], Engine | None, list[str]]:
    """Choose on the first batch even when it is already counted: a resumed vote must not change engines."""
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        return [], None, []
    good, _ = finite_samples(model, loss, first, first=0)
    chosen = (None, []) if good is None else choose_engine(engine, model, loss, good, tally)
    return itertools.chain([first], rest), *chosen


def choose_engine(
    engine: str, model: nn.Module, loss: Loss, batch: Batch, tally: Tally
) -> tuple[Engine, list[str]]:
    """`auto` picks the fastest engine that agrees with the loop on the first samples."""
    if engine != "auto":
        return ENGINES[engine], []
    try:
        from gradfix.votes.engines.auto import choose
    except ImportError:
        return loop, []
    return choose(model, loss, batch, tally)


def finite_samples(
    model: nn.Module, loss: Loss, batch: Batch, *, first: int, where: Sequence[str] | None = None
) -> tuple[Batch | None, list[str]]:
    """Leave out samples whose loss is NaN or Inf: the sign of NaN is 0, so they would vote in silence."""
    with torch.no_grad():
        losses = loss(model, batch)
    size = batch_size(batch)
    if losses.shape != (size,):
        raise DataError(
            f"loss(model, batch) must return one loss per sample, shape ({size},); got {tuple(losses.shape)}."
        )
    finite = torch.isfinite(losses)
    if bool(finite.all()):
        return batch, []
    odd = [int(i) for i in (~finite).nonzero().flatten()]
    names = {i: f"sample {first + i}" if where is None else where[first + i] for i in odd}
    skipped = [f"{names[i]}: loss is {float(losses[i])}" for i in odd]
    kept = finite.nonzero().flatten().cpu()  # the loss may have moved the batch to its device
    return (take(batch, kept) if kept.numel() else None), skipped


def collect_gradient(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> TaskVector:
    """The mean gradient over all samples, in float32 or better; the real-valued reference of `magnitude`."""
    return TaskVector(_summed(model, loss, batches).mean())


def _mean_votes(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    progress: Callable[[int], None] | None,
    checkpoint: Path | None,
    identity: str,
    where: Sequence[str] | None,
) -> SignVotes:
    sums = _summed(model, loss, batches, progress, checkpoint, identity, where)
    _refuse_silence(sums)
    dtype = dtype_for(sums.count)
    votes = {name: (-g.sign()).to(dtype) * sums.count for name, g in sums.mean().items()}
    return SignVotes(votes, sums.count, rule="mean", **_about(model))


def _summed(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
    identity: str = "",
    where: Sequence[str] | None = None,
) -> Sums:
    """The gradients of all samples, added up one after the other."""
    sums = Sums(_at_least_one(voting_parameters(model)))

    def fold(name: str, gradient: Tensor) -> None:
        sums[name].add_(gradient.to_dense() if gradient.is_sparse else gradient)

    with left_as_it_was(model), folding(sums, fold):
        if checkpoint is not None:
            from gradfix.votes.resume import resumable, vote_key

            batches = resumable(checkpoint, sums, batches, key=vote_key(model, "mean", identity))
        for batch in batches:
            for sample in samples(batch):
                sums.reserve(1)
                value = backward(loss, model, sample)
                if not torch.isfinite(value):
                    name = f"sample {sums.count - 1}" if where is None else where[sums.count - 1]
                    raise DataError(
                        f"{name} gives a loss of {float(value)}. Repair or remove it, or compute in another --dtype."
                    )
            if progress is not None:
                progress(batch_size(batch))
    if sums.count == 0:
        raise DataError("no samples to take a gradient of; check the data and --shots.")
    _refuse_infinite(sums)
    return sums


def voting_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each distinct trainable parameter once, under its canonical name; tied ones vote once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


def _refuse_silence(tally: Tally) -> None:
    names, buffers = zip(*tally.items())
    spoken = values_of([buffer.any() for buffer in buffers])
    silent = [name for name, spoke in zip(names, spoken) if spoke == [False]]
    if len(silent) == len(tally.parameters):
        raise UnsafeResult(SILENT)
    if silent:
        warnings.warn(
            f"{len(silent)} tensors abstained (unused, or tied in every entry), first {silent[0]!r}.",
            stacklevel=3,
        )


def _at_least_one(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    if not parameters:
        raise UnsafeResult(SILENT)
    return parameters


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


def _about(model: nn.Module) -> dict[str, Any]:
    """What votes remember of their model: names that differ on disk, and a few of its weights."""
    renamed = name_map(model).renamed
    differing = {name: disk for name, disk in renamed.items() if name != disk}
    return {"disk_names": differing, "probe": probe_module(model, renamed)}
