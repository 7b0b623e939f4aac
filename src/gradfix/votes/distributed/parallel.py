"""Data parallel votes: every process asks its share of the samples, one sum of integers brings them together.

Votes are integers, so neither the number of processes nor the order matters. Every sample meets the same
numbers as in one process: the loop engine's samples keep the padding of their batch, the batched engine's
batches stay whole. The result is the same bit for bit, as long as a process has as many threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from gradfix.system.processes import Group, together
from gradfix.vectors.signvotes import SignVotes, dtype_for
from gradfix.votes.collect import InMemory
from gradfix.votes.engines.loop import Batches, loop
from gradfix.votes.engines.passes import Loss, take
from gradfix.votes.resume import Bad, VoteStep
from gradfix.votes.runs import refuse_bad
from gradfix.votes.tally import Tally


class InParallel(InMemory):
    """What `InMemory` gives for all batches, on every process of the group."""

    batches: Batches

    def __init__(self, group: Group, model: nn.Module, loss: Loss, batches: Batches, engine: str = "auto") -> None:
        super().__init__(model, loss, batches, engine)
        self.group = group

    def steps(self) -> Iterator[VoteStep]:
        if self.asked == "auto":
            self._agree()
        return share_of(self.group, self.batches, by_sample=self.engine is loop)

    def _agree(self) -> None:
        """On the engine one process would choose: every process tries it on the first batch, and all must like it."""
        self.engine = loop
        with together(self.group):
            for batch in self.batches:
                first = self.choose(VoteStep(0, batch))
                if first is not None and first.good is not None:
                    self.confirm(first)
                if first is None or first.good is not None:
                    break
        said = self.group.gather(self.notes if self.engine is loop else None)
        refusals = [notes for notes in said if notes is not None]
        if refusals:
            self.engine, self.notes = loop, list(refusals[0])

    def failing_together(self) -> AbstractContextManager[None]:
        return together(self.group)

    def refuse_bad(self, bad: Sequence[Bad], step: VoteStep) -> None:
        """What one process leaves out says nothing yet."""

    def result(self, bad: list[Bad]) -> SignVotes:
        found = gathered(self.group, bad)
        add_up(self.group, self.tally)
        votes: list[SignVotes] = []
        with together(self.group):
            for number, (place, _) in enumerate(found, 1):  # stop where one process would have stopped
                size, count = self.batches.size, len(self.batches.rows)
                seen = count if self.where is not None else min((place // size + 1) * size, count)
                refuse_bad(found[:number], seen)
            votes.append(super().result(found))
        return votes[0]


def share_of(group: Group, batches: Batches, by_sample: bool) -> Iterator[VoteStep]:
    """This process's consecutive part of the samples, cut where the batches are cut.

    Without `by_sample` whole batches are given out, and a process may go away empty-handed."""
    size, count = batches.size, len(batches.rows)
    units, width = (count, 1) if by_sample else (len(batches), size)
    first = units * group.rank // group.size * width
    last = min(units * (group.rank + 1) // group.size * width, count)
    while first < last:
        index, row = divmod(first, size)
        stop = min(last, (index + 1) * size)
        yield VoteStep(first, take(batches[index], slice(row, stop - index * size)))
        first = stop


def gathered(group: Group, bad: Sequence[Bad]) -> list[Bad]:
    """The bad samples of all processes, in their order."""
    return sorted(entry for some in group.gather(list(bad)) for entry in some)


def add_up(group: Group, tally: Tally) -> None:
    """Sum the tallies of all processes, tensor by tensor; int32, because neither gloo nor NCCL knows int16."""
    count = sum(group.gather(tally.count))
    sums = {}
    for name, buffer in tally.items():
        whole = buffer.to(torch.int32)
        dist.all_reduce(whole)
        sums[name] = whole.to(dtype_for(count))
    tally.load(sums, count)
