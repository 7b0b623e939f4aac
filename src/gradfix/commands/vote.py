"""`gradfix vote`: votes of a target on labelled examples, as a file under on-disk names.

`Vote` is the frame of every vote, from the checks to the file; its subclasses say what differs for several processes
(`--processes N` starts them, torchrun brings its own), a model split over them, and one that stays on disk."""

from __future__ import annotations

import gc
import glob
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradfix.checkpoints.folder import device_name, versions
from gradfix.checkpoints.identity import check_probe, is_target, target_fingerprint
from gradfix.checkpoints.names import NameMap
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.write import discard, locked, make_parent, refuse_odd_file
from gradfix.commands.configs import VoteConfig
from gradfix.commands.guard import guard_outputs, halving_batches, in_notes
from gradfix.commands.setting import Prepared, draw, offload_folder, room_for_weights, setting
from gradfix.data import Row
from gradfix.data.rows import exact_hash
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.system.processes import Group, Step, in_processes, joined, launched, report, together
from gradfix.tasks.base import Bound, Task
from gradfix.vectors.signvotes import SignVotes, votes_to_disk
from gradfix.votes.collect import collect_votes
from gradfix.votes.engines.loop import Batches
from gradfix.votes.resume import PartialVote, PartialVoteInStep
from gradfix.votes.runs import collect

ORIGIN = ("task", "shots", "seed", "select", "vote", "engine", "batch_size", "dtype", "pooling",
          "max_length")  # fmt: skip


@dataclass(frozen=True)
class VoteResult:
    out: Path
    votes: SignVotes
    notes: tuple[str, ...]


def partial_vote(out: Path, process: str = "") -> Path:
    """Where an interrupted vote is kept; each of several processes has its own."""
    return out.with_name(f".{out.name}.{process}part")


def forget_partial_votes(config: VoteConfig) -> None:
    """What earlier runs kept for this output, however many processes they had."""
    out = Path(config.out)
    for path in {partial_vote(out), *out.parent.glob(f".{glob.escape(out.name)}.*-of-*.part")}:
        discard(path)


@halving_batches(in_notes, forget_partial_votes)
def run_vote(config: VoteConfig, progress: Step | None = None) -> VoteResult:
    """Draw the few-shot set, ask the target's gradients, write the votes tied to the target's hash."""
    if config.sharded and config.processes < 2 and not launched():
        raise UsageError("--sharded splits the model over processes: give --processes N, or start with torchrun.")
    if config.offload is not None:
        return OffloadedVote(config, progress).run()
    if launched():
        return vote_as_rank(config)
    if config.processes > 1:
        notes = in_processes(_notes_of_rank, config, config.processes, progress)
        return VoteResult(Path(config.out), SignVotes.load(config.out), notes)
    return Vote(config, progress).run()


def vote_as_rank(config: VoteConfig) -> VoteResult:
    """This process's part of the vote. Every process returns the sum; only rank 0 writes it."""
    with joined() as group:
        try:
            config = replace(config, device=group.device(config.device))
            kind = ShardedVote if config.sharded else ParallelVote
            return kind(config, group).run()
        finally:
            gc.collect()  # FSDP's modules must be gone before their group is


def _notes_of_rank(config: VoteConfig) -> tuple[str, ...]:
    return vote_as_rank(config).notes


class Vote:
    """The model whole, in one process."""

    def __init__(self, config: VoteConfig, progress: Step | None, group: Group | None = None) -> None:
        self.config, self.progress, self.group = config, progress, group
        self.out = Path(config.out)
        self.held = ExitStack()  # locks
        self.names: NameMap | None = None  # from before the model was taken apart, where it was

    def run(self) -> VoteResult:
        config = self.config
        with self.held:
            with self.together():
                guard_outputs(config)
                self.refuse()
                start = setting(config)
                shots = draw(start, config, base=config.base)
                config = replace(config, shots=shots.per_class, allow_fewer=shots.allow_fewer)
                if self.group is None or self.group.leads:
                    make_parent(self.out)
                    self.held.enter_context(locked(self.out))
            with self.together():
                bound = self.open(start)
            where = [row.where for row in shots.fewshot]
            batches = Batches(bound.collate, shots.fewshot, config.batch_size, where)
            origin = origin_of(config, bound, shots.fewshot)
            votes = self.collect(bound, batches, asked_of(start.task, bound), origin)
            saved = self.save(votes, bound, origin)
            if config.resume:  # on every process: the others may have disks of their own
                forget_partial_votes(config)
        return VoteResult(self.out, saved, (*shots.notes, *votes.notes))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.group is None else together(self.group)

    def refuse(self) -> None:
        refuse_odd_file(self.out)

    def open(self, start: Prepared) -> Bound:
        return start.open(self.config.target)

    def collect(self, bound: Bound, batches: Batches, asked: str, origin: Mapping[str, Any]) -> Any:
        """Votes under module names; a partial vote must have asked the same."""
        return collect_votes(
            bound.model, bound.loss, batches, self.config.vote, self.config.engine,  # type: ignore[arg-type]
            checkpoint=partial_vote(self.out) if self.config.resume else None, identity=asked,
            progress=self.progress,
        )  # fmt: skip

    def save(self, votes: Any, bound: Bound, origin: Mapping[str, Any]) -> SignVotes:
        """Write the votes; gives them as they were written, where this process has them."""
        with self.together():  # nobody forgets its part before the sum is on disk
            if self.group is None or self.group.leads:
                votes = on_disk(votes, bound, self.config.target, origin, self.names)
                votes.save(self.out)
        found: SignVotes = votes
        return found


class OffloadedVote(Vote):
    """The votes of the loop engine, on one device; weights are read from disk three times for every sample."""

    def refuse(self) -> None:
        super().refuse()
        if self.config.processes > 1 or launched() or self.config.sharded:
            raise UsageError("--offload is for one process; several processes split the model with --sharded.")
        if self.config.vote != "majority":
            raise UsageError("--vote mean is not there for offloaded models.")

    def open(self, start: Prepared) -> Bound:
        from gradfix.votes.distributed.offload import load_offloaded

        limits = room_for_weights(self.config)
        folder = self.held.enter_context(offload_folder(self.config))
        bound, self.model = _open_built(
            start, self.config, "--offload", lambda make, source: load_offloaded(make, source, folder, limits)
        )
        self.names = self.model.names
        return bound

    def collect(self, bound: Bound, batches: Batches, asked: str, origin: Mapping[str, Any]) -> Any:
        from gradfix.votes.distributed.ondisk import OnDisk

        target = open_checkpoint(self.config.target)
        identity = repr(("offload", target.identity() or target.fingerprint(), asked, origin))
        partial = PartialVote(partial_vote(self.out)) if self.config.resume else None
        votes = OnDisk(bound.model, bound.loss, batches, self.model.ties)
        return collect(votes, partial, identity, self.progress)


class ParallelVote(Vote):
    """Every process has the model and asks its share of the samples."""

    group: Group

    def __init__(self, config: VoteConfig, group: Group) -> None:
        super().__init__(config, report, group)

    def refuse(self) -> None:
        if not self.config.sharded:  # whose votes may be a folder
            super().refuse()
        if self.config.vote != "majority":
            raise UsageError("--vote mean adds up real numbers, whose sum depends on the order: use one process.")

    def place(self, turn: str = "") -> Path:
        """Of this process's partial votes."""
        return partial_vote(self.out, f"{self.group.rank}-of-{self.group.size}.{turn}")

    def collect(self, bound: Bound, batches: Batches, asked: str, origin: Mapping[str, Any]) -> Any:
        from gradfix.votes.distributed.parallel import InParallel

        votes = InParallel(self.group, bound.model, bound.loss, batches, self.config.engine)
        partial = PartialVote(self.place()) if self.config.resume else None
        return collect(votes, partial, asked, self.progress)


class ShardedVote(ParallelVote):
    """No process holds the model: each reads its slices, votes with the others and hands on its slices."""

    def refuse(self) -> None:
        super().refuse()
        if self.config.select != "random":
            raise UsageError("--sharded takes random examples only: choose them first with `gradfix select`.")

    def open(self, start: Prepared) -> Bound:
        from gradfix.votes.distributed.build import build_sharded, mesh_of

        device, recompute = str(self.config.device), self.config.recompute
        mesh = mesh_of(self.group, device, self.config.replicas)
        bound, self.model = _open_built(
            start, self.config, "--sharded",
            lambda make, source: build_sharded(make, source, mesh, device, recompute=recompute),
        )  # fmt: skip
        return bound

    def collect(self, bound: Bound, batches: Batches, asked: str, origin: Mapping[str, Any]) -> Any:
        from gradfix.votes.distributed.sharded import InShards

        votes = InShards(self.group, self.model.model, self.model.signs, bound.loss, batches)
        turns = [self.place("a."), self.place("b.")]
        partial = PartialVoteInStep(self.group, turns) if self.config.resume else None
        return collect(votes, partial, repr((asked, self.config.replicas, origin)), self.progress)

    def save(self, votes: Any, bound: Bound, origin: Mapping[str, Any]) -> SignVotes:
        from gradfix.votes.distributed.sharded import save_sharded

        checkpoint = open_checkpoint(self.config.target)
        with self.together():
            target = target_fingerprint(checkpoint) if self.group.leads else ""
        target = self.group.gather(target)[0]
        save_sharded(self.group, votes, self.model, checkpoint, self.out, target_hash=target, origin=origin)
        if self.group.leads and self.config.processes == 1:  # torchrun's leader speaks to the user itself
            return SignVotes.load(self.out)
        return SignVotes({}, votes.count, target_hash=target)


def _open_built(
    start: Prepared, config: VoteConfig, option: str, build: Callable[[Callable[[], nn.Module], Checkpoint], Any]
) -> tuple[Bound, Any]:
    """The target with a model of `build` in place of its own loader's, and what `build` gave."""
    from gradfix.tasks.loading import Builder, building

    built: list[Any] = []

    def make_known(make: Callable[[], nn.Module], checkpoint: Checkpoint) -> nn.Module:
        built.append(build(make, checkpoint))
        model: nn.Module = built[-1].model
        return model

    with building(Builder(make_known)):
        bound = start.open(config.target)
    if len(built) != 1:
        raise UsageError(f"{option} knows transformers models only, not those of {config.target}.")
    return bound, built[0]


def asked_of(task: Task, bound: Bound) -> str:
    """What a vote depends on besides model, batches and engine: the task's settings and the prompts."""
    return repr((vars(task), getattr(bound, "prompts", None)))


def origin_of(config: VoteConfig, bound: Bound, fewshot: Sequence[Row]) -> dict[str, Any]:
    """What the bits of these votes depend on besides the target: settings, examples, device, versions."""
    examples = hashlib.sha256("".join(f"{exact_hash(row)}\n" for row in fewshot).encode())
    device = next(bound.model.parameters()).device
    return {
        "settings": {name: getattr(config, name) for name in ORIGIN},
        "examples": examples.hexdigest(),
        "device": device_name(device),
        **versions(),
    }


def on_disk(
    votes: SignVotes, bound: Bound, target: str, origin: Mapping[str, Any] | None = None, names: NameMap | None = None
) -> SignVotes:
    """The same votes under the checkpoint's own names, tied to its hash.

    `names` are those from before the model was taken apart, where it was."""
    checkpoint = open_checkpoint(target)
    named = votes_to_disk(votes, names or bound.model, checkpoint)
    origin = votes.origin if origin is None else origin
    return named.changed(named, target_hash=target_fingerprint(checkpoint), probe={}, origin=origin)


def plan_vote(config: VoteConfig) -> str:
    """Data, task, few-shot set and target are checked; no model is loaded."""
    shots = draw(setting(config), config, base=config.base)
    target = open_checkpoint(config.target)
    return f"would ask {target} about {len(shots.fewshot)} examples and write the votes to {config.out}"


def require_target(votes: SignVotes, target: Checkpoint) -> None:
    """Votes belong to one target: refuse them on another, by probe or by hash."""
    check_probe(votes.probe, target)
    if votes.target_hash is not None and not is_target(votes.target_hash, target):
        raise IncompatibleCheckpoints(
            f"the votes were taken on other weights than {target}. Vote again on this target."
        )
