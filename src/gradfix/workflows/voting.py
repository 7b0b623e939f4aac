"""`gradfix vote`: votes of a target on labelled examples, as a file under on-disk names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradfix.checkpoints.folder import target_fingerprint
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.processes import launched
from gradfix.tasks.base import Bound
from gradfix.votes.collect import collect_votes
from gradfix.votes.tally import SignVotes
from gradfix.workflows.configs import VoteConfig
from gradfix.workflows.setting import draw, setting

Step = Callable[[int], None]


@dataclass(frozen=True)
class VoteResult:
    out: Path
    votes: SignVotes
    notes: tuple[str, ...]


def run_vote(config: VoteConfig, progress: Step | None = None) -> VoteResult:
    """Draw the few-shot set, ask the target's gradients, write the votes tied to the target's hash."""
    if config.processes > 1 or launched():
        from gradfix.workflows.distributed import vote_as_rank, vote_in_processes

        return vote_as_rank(config) if launched() else vote_in_processes(config, progress)
    start = setting(config)
    shots = draw(start, config, base=config.base)
    bound = start.open(config.target)
    out = Path(config.out)
    resume = out.with_name(f".{out.name}.part") if config.resume else None
    votes = collect_votes(
        bound.model,
        bound.loss,
        bound.batches(shots.fewshot, config.batch_size),
        vote=config.vote,  # type: ignore[arg-type]
        engine=config.engine,
        checkpoint=resume,
        progress=progress,
    )
    votes = on_disk(votes, bound, config.target)
    votes.save(out)
    if resume is not None:
        resume.unlink(missing_ok=True)
    return VoteResult(out, votes, (*shots.notes, *votes.notes))


def on_disk(votes: SignVotes, bound: Bound, target: str) -> SignVotes:
    """The same votes under the checkpoint's own names, tied to its hash."""
    checkpoint = open_checkpoint(target)
    mapping = name_map(bound.model, checkpoint.names())
    tensors = mapping.to_disk({name: tensor.cpu() for name, tensor in votes.items()})
    return SignVotes(
        {name: tensor for name, tensor in tensors.items() if name in checkpoint},
        votes.count,
        rule=votes.rule,
        target_hash=target_fingerprint(checkpoint),
        probe={},
        notes=votes.notes,
    )
