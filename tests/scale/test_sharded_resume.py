"""A sharded vote whose processes are killed goes on from the last step that all of them have, with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradfix.cli import run
from gradfix.commands.configs import VoteConfig
from gradfix.commands.vote import vote_as_rank
from gradfix.errors import CorruptInput
from gradfix.system.processes import Group, LostProcess, in_processes
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes import resume
from gradfix.votes.resume import PartialVoteInStep, VoteStep
from gradfix.votes.tally import Tally
from tiny import save_tiny, toy_texts, write_rows

SAMPLES, PROCESSES = 10, 2


def _vote(job: tuple[dict[str, Any], int]) -> None:
    """One process of a vote that saves after every step; rank 1 is killed in the middle of save number `job[1]`."""
    options, deadly = job
    resume.SAVE_EVERY_SECONDS = 0.0
    save, made = resume.save_state, []

    def dying(*arguments: Any) -> None:
        made.append(1)
        if os.environ["RANK"] == "1" and len(made) == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments)

    resume.save_state = dying
    vote_as_rank(VoteConfig(**options))


def test_a_killed_vote_goes_on_with_the_same_bits(tmp_path):
    target = save_tiny("llama", tmp_path / "target", 2)
    write_rows(tmp_path / "data", "train", toy_texts(SAMPLES))
    common = ["vote", "--target", str(target), "--data", str(tmp_path / "data"), "--task", "causal",
              "--shots", "5", "--dtype", "fp64", "--engine", "loop", "--batch-size", "4", "--quiet"]  # fmt: skip
    assert run([*common, "--out", str(tmp_path / "whole.safetensors")]) == 0
    out = tmp_path / "out" / "votes.safetensors"
    options = {
        "target": str(target), "data": str(tmp_path / "data"), "task": "causal", "shots": 5, "dtype": "fp64",
        "engine": "loop", "batch_size": 4, "out": str(out), "sharded": True, "processes": PROCESSES,
    }  # fmt: skip
    with pytest.raises(LostProcess, match="exit -9"):
        in_processes(_vote, (options, 3), PROCESSES)
    assert not out.exists() and len(list(out.parent.glob("*.part"))) == 2 * PROCESSES
    steps: list[int] = []
    in_processes(_vote, (options, 0), PROCESSES, steps.append)
    assert sum(steps) == SAMPLES - 2 * PROCESSES  # both had saved two steps, one of them also the third
    expected, found = SignVotes.load(tmp_path / "whole.safetensors"), SignVotes.load(out)
    assert (found.count, found.target_hash) == (expected.count, expected.target_hash)
    assert set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in expected)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


class _Among(Group):
    """A place in a group whose other process has saved the steps `others`."""

    others: tuple[int, ...] = (1, 2, 3)

    def gather(self, value: Any) -> list[Any]:
        return [value, list(self.others)] if isinstance(value, list) else [value]


def _tally() -> Tally:
    return Tally({"weight": nn.Parameter(torch.zeros(4))})


def _counted(folder: Path, key: str = "", most: int = 9, others: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    """The steps that are really taken when the vote ends early after `most` of them."""
    group = _Among(0, 2, 0)
    object.__setattr__(group, "others", others)
    tally, taken = _tally(), []
    partial = PartialVoteInStep(group, [folder / "a", folder / "b"], 0.0)
    steps = [VoteStep(number, number) for number in range(1, 6)]
    for step, _ in partial.remaining(tally, steps, key, []):
        if len(taken) == most:
            break
        tally.reserve(1)
        tally["weight"].add_(step)
        taken.append(step)
    assert len(taken) == most or tally["weight"].tolist() == [15.0] * 4
    return taken


def test_all_go_on_from_the_latest_step_they_share(tmp_path):
    assert _counted(tmp_path, most=3) == [1, 2, 3]  # saved: 2 and 3
    assert _counted(tmp_path, others=(2,)) == [3, 4, 5]
    assert _counted(tmp_path, most=1, others=(4, 5)) == []
    assert _counted(tmp_path, most=3, others=(1,)) == [1, 2, 3]  # nothing in common: from the start
    with pytest.raises(CorruptInput, match="belongs to another vote"):
        _counted(tmp_path, key="other examples")
