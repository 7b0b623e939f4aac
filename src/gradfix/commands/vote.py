"""`gradfix vote`: votes of a target on labelled examples, as a file under on-disk names."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradfix.checkpoints.folder import device_name, versions
from gradfix.checkpoints.identity import target_fingerprint
from gradfix.checkpoints.names import NameMap
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import discard, locked, make_parent, refuse_odd_file
from gradfix.commands.configs import VoteConfig
from gradfix.commands.guard import guard_outputs
from gradfix.commands.halving import halving_batches, in_notes
from gradfix.commands.setting import draw, setting
from gradfix.data import Row
from gradfix.data.rows import exact_hash
from gradfix.errors import UsageError
from gradfix.system.processes import launched
from gradfix.tasks.base import Bound, Task
from gradfix.vectors.signvotes import SignVotes, votes_to_disk
from gradfix.votes.collect import collect_votes

Step = Callable[[int], None]


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
        raise UsageError(
            "--sharded splits the model over processes: give --processes N, or start with torchrun."
        )
    if config.offload is not None:
        from gradfix.commands.vote_offload import vote_offloaded

        return vote_offloaded(config, progress)
    if config.processes > 1 or launched():
        from gradfix.commands.vote_processes import vote_as_rank, vote_in_processes

        return vote_as_rank(config) if launched() else vote_in_processes(config, progress)
    guard_outputs(config)
    refuse_odd_file(Path(config.out))
    start = setting(config)
    shots = draw(start, config, base=config.base)
    out = Path(config.out)
    resume = partial_vote(out) if config.resume else None
    make_parent(out)
    with locked(out):
        bound = start.open(config.target)
        votes = collect_votes(
            bound.model,
            bound.loss,
            bound.batches(shots.fewshot, config.batch_size),
            vote=config.vote,  # type: ignore[arg-type]
            engine=config.engine,
            checkpoint=resume,
            identity=asked_of(start.task, bound),
            where=[row.where for row in shots.fewshot],
            progress=progress,
        )
        votes = on_disk(votes, bound, config.target, origin_of(config, bound, shots.fewshot))
        votes.save(out)
        if resume is not None:
            forget_partial_votes(config)
    return VoteResult(out, votes, (*shots.notes, *votes.notes))


def asked_of(task: Task, bound: Bound) -> str:
    """What a vote depends on besides model, batches and engine: the task's settings and the prompts."""
    return repr((vars(task), getattr(bound, "prompts", None)))


def origin_of(config: VoteConfig, bound: Bound, fewshot: Sequence[Row]) -> dict[str, Any]:
    """What the bits of these votes depend on besides the target: settings, examples, device, versions."""
    names = (
        "task",
        "shots",
        "seed",
        "select",
        "vote",
        "engine",
        "batch_size",
        "dtype",
        "pooling",
        "max_length",
    )
    examples = hashlib.sha256("".join(f"{exact_hash(row)}\n" for row in fewshot).encode())
    device = next(bound.model.parameters()).device
    return {
        "settings": {name: getattr(config, name) for name in names},
        "examples": examples.hexdigest(),
        "device": device_name(device),
        **versions(),
    }


def on_disk(
    votes: SignVotes,
    bound: Bound,
    target: str,
    origin: Mapping[str, Any] | None = None,
    names: NameMap | None = None,
) -> SignVotes:
    """The same votes under the checkpoint's own names, tied to its hash.

    `names` are those from before the model was taken apart, where it was."""
    checkpoint = open_checkpoint(target)
    named = votes_to_disk(votes, names or bound.model, checkpoint)
    origin = votes.origin if origin is None else origin
    return named.changed(named, target_hash=target_fingerprint(checkpoint), probe={}, origin=origin)
