"""`gradfix vote` in several processes: `--processes N` starts them, torchrun brings its own.

Both run `vote_as_rank`; rank 0 writes the file."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from gradfix.checkpoints.identity import target_fingerprint
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.write import locked, make_parent
from gradfix.commands.configs import VoteConfig
from gradfix.commands.guard import guard_outputs
from gradfix.commands.setting import Setting, Shots, draw, setting
from gradfix.commands.vote import (
    VoteResult,
    asked_of,
    forget_partial_votes,
    on_disk,
    origin_of,
    partial_vote,
)
from gradfix.errors import UsageError
from gradfix.system.processes import Group, Step, in_processes, joined, report, together
from gradfix.tasks.loading import BUILDER
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes.distributed.build import Sharded, build_sharded
from gradfix.votes.distributed.parallel import Batches, collect_in_parallel
from gradfix.votes.distributed.saving import save_sharded
from gradfix.votes.distributed.sharded import collect_sharded, mesh_of
from gradfix.votes.distributed.slots import Slots


def vote_in_processes(config: VoteConfig, progress: Step | None = None) -> VoteResult:
    """Start the processes, wait for them, read what they wrote."""
    notes = in_processes(_noted, config, config.processes, progress)
    return VoteResult(Path(config.out), SignVotes.load(config.out), notes)


def _noted(config: VoteConfig) -> tuple[str, ...]:
    return vote_as_rank(config).notes


def vote_as_rank(config: VoteConfig) -> VoteResult:
    """This process's part of the vote. Every process returns the sum; only rank 0 writes it."""
    with joined() as group:
        try:
            return _vote_sharded(group, config) if config.sharded else _vote(group, config)
        finally:
            gc.collect()  # FSDP's modules must be gone before their group is


def _prepared(group: Group, config: VoteConfig, held: contextlib.ExitStack) -> tuple[Setting, Shots]:
    """Checks, lock and examples; nothing of the model yet."""
    if config.vote != "majority":
        raise UsageError("--vote mean adds up real numbers, whose sum depends on the order: use one process.")
    guard_outputs(config)
    if group.leads:
        make_parent(Path(config.out))
        held.enter_context(locked(Path(config.out)))
    start = setting(config)
    return start, draw(start, config, base=config.base)


def _vote(group: Group, config: VoteConfig) -> VoteResult:
    out = Path(config.out)
    with contextlib.ExitStack() as held:
        with together(group):
            config = replace(config, device=group.device(config.device))
            start, shots = _prepared(group, config, held)
            bound = start.open(config.target)
        resume = partial_vote(out, f"{group.rank}-of-{group.size}.") if config.resume else None
        votes = collect_in_parallel(
            group, bound.model, bound.loss, Batches(bound.collate, shots.fewshot, config.batch_size),
            config.engine, checkpoint=resume, identity=asked_of(start.task, bound),
            where=[row.where for row in shots.fewshot], progress=report,
        )  # fmt: skip
        with together(group):  # nobody forgets its part before the sum is on disk
            if group.leads:
                votes = on_disk(votes, bound, config.target, origin_of(config, bound, shots.fewshot))
                votes.save(out)
        if resume is not None:  # on every process: the others may have disks of their own
            forget_partial_votes(config)
    return VoteResult(out, votes, (*shots.notes, *votes.notes))


def _vote_sharded(group: Group, config: VoteConfig) -> VoteResult:
    """No process holds the model: each reads its slices, votes with the others and hands on its slices."""
    config = replace(config, device=group.device(config.device))
    out = Path(config.out)
    built: list[Sharded] = []
    with contextlib.ExitStack() as held:
        with together(group):
            start, shots = _prepared(group, replace(config, select="random"), held)
            if config.select != "random":
                raise UsageError(
                    "--sharded takes random examples only: choose them first with `gradfix select`."
                )
            mesh = mesh_of(group, str(config.device), config.replicas)

        def builder(make: Callable[[], nn.Module], checkpoint: Checkpoint) -> nn.Module:
            built.append(
                build_sharded(make, checkpoint, mesh, str(config.device), recompute=config.recompute)
            )
            return built[-1].model

        token = BUILDER.set(builder)
        try:
            with together(group):
                bound = start.open(config.target)
        finally:
            BUILDER.reset(token)
        if len(built) != 1:
            raise UsageError(f"--sharded knows transformers models only, not those of {config.target}.")
        whole = built.pop()
        batches = Batches(bound.collate, shots.fewshot, config.batch_size)
        about = origin_of(config, bound, shots.fewshot)
        places = [partial_vote(out, f"{group.rank}-of-{group.size}.{slot}.") for slot in "ab"]
        votes = collect_sharded(
            group, whole.model, whole.signs, bound.loss, batches,
            shelf=Slots(group, places) if config.resume else None,
            identity=repr((asked_of(start.task, bound), config.replicas, about)), progress=report,
        )  # fmt: skip
        checkpoint = open_checkpoint(config.target)
        with together(group):
            identity = target_fingerprint(checkpoint) if group.leads else ""
        identity = group.gather(identity)[0]
        save_sharded(
            group, votes, whole.model, whole.names, checkpoint, out, target_hash=identity, origin=about
        )
        if config.resume:
            forget_partial_votes(config)
    summary = SignVotes({}, votes.count, target_hash=identity, notes=tuple(votes.notes))
    found = SignVotes.load(out) if group.leads and config.processes == 1 else summary
    return VoteResult(out, found, (*shots.notes, *votes.notes))
