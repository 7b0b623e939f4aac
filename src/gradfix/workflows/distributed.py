"""`gradfix vote` in several processes: `--processes N` starts them, torchrun brings its own.

Both run `vote_as_rank`; rank 0 writes the file."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from gradfix.checkpoints.write import discard, locked, make_parent
from gradfix.errors import UsageError
from gradfix.processes import Group, Step, in_processes, joined, report, together
from gradfix.votes.parallel import Batches, collect_in_parallel
from gradfix.votes.tally import SignVotes
from gradfix.workflows.configs import VoteConfig
from gradfix.workflows.guard import guard_outputs
from gradfix.workflows.setting import draw, setting
from gradfix.workflows.voting import VoteResult, on_disk, origin_of


def vote_in_processes(config: VoteConfig, progress: Step | None = None) -> VoteResult:
    """Start the processes, wait for them, read what they wrote."""
    notes = in_processes(_noted, config, config.processes, progress)
    return VoteResult(Path(config.out), SignVotes.load(config.out), notes)


def _noted(config: VoteConfig) -> tuple[str, ...]:
    return vote_as_rank(config).notes


def vote_as_rank(config: VoteConfig) -> VoteResult:
    """This process's part of the vote. Every process returns the sum; only rank 0 writes it."""
    with joined() as group:
        return _vote(group, config)


def _vote(group: Group, config: VoteConfig) -> VoteResult:
    out = Path(config.out)
    with contextlib.ExitStack() as held:
        with together(group):
            if config.vote != "majority":
                raise UsageError(
                    "--vote mean adds up real numbers, whose sum depends on the order: use one process."
                )
            guard_outputs(config)
            if group.leads:
                make_parent(out)
                held.enter_context(locked(out))
            config = replace(config, device=group.device(config.device))
            start = setting(config)
            shots = draw(start, config, base=config.base)
            bound = start.open(config.target)
        resume = out.with_name(f".{out.name}.{group.rank}-of-{group.size}.part") if config.resume else None
        votes = collect_in_parallel(
            group, bound.model, bound.loss, Batches(bound.collate, shots.fewshot, config.batch_size),
            config.engine, checkpoint=resume, identity=repr(vars(start.task)),
            where=[row.where for row in shots.fewshot], progress=report,
        )  # fmt: skip
        with together(group):  # nobody forgets its part before the sum is on disk
            if group.leads:
                votes = on_disk(votes, bound, config.target, origin_of(config, bound, shots.fewshot))
                votes.save(out)
        if resume is not None:
            discard(resume)
    return VoteResult(out, votes, (*shots.notes, *votes.notes))
