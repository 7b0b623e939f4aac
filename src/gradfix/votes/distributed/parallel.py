"""Data parallel votes: every process asks its share of the samples, one sum of integers brings them together.

Votes are integers, so neither the number of processes nor the order matters. Every sample meets the same
numbers as in one process: the loop engine's samples keep the padding of their batch, the batched engine's
batches stay whole. The result is the same bit for bit, as long as a process has as many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.system.processes import Group, together
from gradfix.vectors.signvotes import SignVotes, Tally, dtype_for
from gradfix.votes.collect import Engine, choose_engine, finish, finite_samples, refuse_bad, voting_parameters
from gradfix.votes.engines.loop import Batch, Loss, batch_size, loop, take
from gradfix.votes.resume import resumable, vote_key


@dataclass(frozen=True)
class Batches:
    """Batches that are put together when asked for, so that a process makes only those it needs."""

    collate: Callable[[Sequence[Any]], Batch]
    rows: Sequence[Any]
    size: int

    def __len__(self) -> int:
        return (len(self.rows) + self.size - 1) // self.size

    def __getitem__(self, index: int) -> Batch:
        return self.collate(self.rows[index * self.size : (index + 1) * self.size])


def collect_in_parallel(
    group: Group,
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    engine: str = "auto",
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    where: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> SignVotes:
    """What `collect_votes` gives for all batches, on every process of the group."""
    tally = Tally(voting_parameters(model))
    bad: list[str] = []  # "number of the sample, tab, what is wrong with it"
    place = 0

    def own(by_sample: bool) -> Iterator[Batch]:
        nonlocal place
        for first, part in share_of(group, batches, by_sample):
            place = first
            yield part

    with left_as_it_was(model):
        fold, notes = _agreed_engine(group, engine, model, loss, batches, tally)
        parts = own(by_sample=fold is loop)
        with together(group):
            if checkpoint is not None:
                key = vote_key(model, "majority", engine, identity)
                parts = resumable(checkpoint, tally, parts, key=key, bad=bad)
            for part in parts:
                good, skipped = finite_samples(model, loss, part, first=place, where=where)
                bad += [f"{place}\t{text}" for text in skipped]
                if good is not None:
                    fold(model, loss, good, tally)
                if progress is not None:
                    progress(batch_size(part))
    said = [text.split("\t", 1) for some in group.gather(bad) for text in some]
    found = sorted((int(number), text) for number, text in said)
    _add_up(group, tally)
    votes: list[SignVotes] = []
    with together(group):
        _refuse_bad(found, batches, where is not None)
        if tally.count == 0:
            raise DataError("no samples to vote with; check the data and --shots.")
        votes.append(finish(model, tally, [*(text for _, text in found), *notes]))
    return votes[0]


def share_of(group: Group, batches: Batches, by_sample: bool) -> Iterator[tuple[int, Batch]]:
    """This process's consecutive part of the samples, cut where the batches are cut, each with its first sample.

    Without `by_sample` whole batches are dealt, and a process may go away empty-handed."""
    size, count = batches.size, len(batches.rows)
    units, width = (count, 1) if by_sample else (len(batches), size)
    first = units * group.rank // group.size * width
    last = min(units * (group.rank + 1) // group.size * width, count)
    while first < last:
        index, row = divmod(first, size)
        stop = min(last, (index + 1) * size)
        yield first, take(batches[index], slice(row, stop - index * size))
        first = stop


def _agreed_engine(
    group: Group, engine: str, model: nn.Module, loss: Loss, batches: Batches, tally: Tally
) -> tuple[Engine, list[str]]:
    """The engine one process would choose: every process tries it on the first batch, and all must like it."""
    fold: Engine = loop
    notes: list[str] = []
    with together(group):
        for index in range(len(batches)):
            good, _ = finite_samples(model, loss, batches[index], first=0)
            if good is not None:
                fold, notes = choose_engine(engine, model, loss, good, tally)
                break
    refusals = [said for said in group.gather(notes if fold is loop else None) if said is not None]
    return (loop, list(refusals[0])) if refusals else (fold, list(notes))


def _refuse_bad(found: Sequence[tuple[int, str]], batches: Batches, named: bool) -> None:
    """Stop where one process would have stopped."""
    bad = [text for _, text in found]
    for number, (place, _) in enumerate(found, 1):
        seen = (
            len(batches.rows) if named else min((place // batches.size + 1) * batches.size, len(batches.rows))
        )
        refuse_bad(bad[:number], seen)


def _add_up(group: Group, tally: Tally) -> None:
    """Sum the tallies of all processes, tensor by tensor; int32, because neither gloo nor NCCL knows int16."""
    count = sum(group.gather(tally.count))
    sums = {}
    for name, buffer in tally.items():
        whole = buffer.to(torch.int32)
        dist.all_reduce(whole)
        sums[name] = whole.to(dtype_for(count))
    tally.load(sums, count)
