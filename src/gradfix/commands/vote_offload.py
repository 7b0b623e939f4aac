"""`gradfix vote --offload`: one device, weights that do not fit stay on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.write import locked, make_parent
from gradfix.commands.configs import VoteConfig
from gradfix.commands.guard import guard_outputs
from gradfix.commands.setting import device_of, draw, setting
from gradfix.commands.vote import (
    Step,
    VoteResult,
    asked_of,
    forget_partial_votes,
    on_disk,
    origin_of,
    partial_vote,
)
from gradfix.errors import OutputError, UsageError
from gradfix.system.processes import launched
from gradfix.tasks.loading import BUILDER
from gradfix.votes.distributed.offload import collect_offloaded
from gradfix.votes.distributed.placing import Offloaded, load_offloaded


def vote_offloaded(config: VoteConfig, progress: Step | None = None) -> VoteResult:
    """The votes of the loop engine; weights are read from disk three times for every sample."""
    if config.processes > 1 or launched() or config.sharded:
        raise UsageError("--offload is for one process; several processes split the model with --sharded.")
    if config.vote != "majority":
        raise UsageError("--vote mean is not there for offloaded models.")
    guard_outputs(config)
    start = setting(config)
    shots = draw(start, config, base=config.base)
    out = Path(config.out)
    make_parent(out)
    device = device_of(config.device)
    limit = _size(config.max_memory)
    limits = None if limit is None else {"cpu" if device == "cpu" else 0: limit}
    folder = Path(str(config.offload))
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; give a folder for the weights that do not fit as --offload.")
    built: list[Offloaded] = []

    def builder(make: Callable[[], nn.Module], checkpoint: Checkpoint) -> nn.Module:
        built.append(load_offloaded(make, checkpoint, folder, limits))
        return built[-1].model

    make_parent(folder)
    with (
        locked(out),
        locked(folder),
    ):  # another vote would overwrite the weights this one reads from the folder
        token = BUILDER.set(builder)
        try:
            bound = start.open(config.target)
        finally:
            BUILDER.reset(token)
        if len(built) != 1:
            raise UsageError(f"--offload knows transformers models only, not those of {config.target}.")
        about = origin_of(config, bound, shots.fewshot)
        target = open_checkpoint(config.target)
        weights = target.identity() or target.fingerprint()
        votes = collect_offloaded(
            bound.model, bound.loss, bound.batches(shots.fewshot, config.batch_size), built[0].ties,
            checkpoint=partial_vote(out) if config.resume else None,
            identity=repr(("offload", weights, asked_of(start.task, bound), about)), progress=progress,
        )  # fmt: skip
        votes = on_disk(votes, bound, config.target, about, built[0].names)
        votes.save(out)
        if config.resume:
            forget_partial_votes(config)
    return VoteResult(out, votes, (*shots.notes, *votes.notes))


def _size(text: str | None) -> str | None:
    from accelerate.utils.modeling import convert_file_size_to_int

    try:
        if text is not None and convert_file_size_to_int(text) < 1:
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"--max-memory must be a size such as 20GiB or 500MB, got {text!r}.") from None
    return text
