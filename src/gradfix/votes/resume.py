"""Go on where an interrupted vote stopped.

After each step the tally is saved beside the output; the next run with the same model and batches skips
what is already counted. Votes are sums of integers, and the mean rule adds its samples in their order, so the
result is the same bit for bit."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.checkpoints.open import raw_bytes
from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.errors import CorruptInput
from gradfix.system.processes import Group, together
from gradfix.votes.engines.passes import Batch, leaves_of
from gradfix.votes.tally import Tally

SAVE_EVERY_SECONDS = 10.0
SAVE_SHARE = 0.05  # the votes of a large model take a while to save: at most this much of the time

Bad = tuple[int, str]  # a sample's number, and what is wrong with it


class VoteStep(NamedTuple):
    """The samples of one step, and the number of the first of them."""

    first: int
    batch: Batch


class PartialVote:
    """Where a process keeps its partial vote, and when it puts it there."""

    def __init__(self, path: Path, every: float | None = None) -> None:
        self.path, self.every = path, SAVE_EVERY_SECONDS if every is None else every
        self.pause, self.last = self.every, time.monotonic()

    def remaining(self, tally: Tally, steps: Iterable[VoteStep], key: str, bad: list[Bad]) -> Iterator[VoteStep]:
        """Yield the steps that are not yet counted, saving the tally between them.

        `key` names whatever else the votes depend on; `bad` are the samples left out so far, kept with the count
        so that a resumed vote names and weighs them too."""
        chain = hashlib.sha256(key.encode())
        done, saved_chain = self.load(tally, key, bad)
        pending = done > 0
        for number, step in enumerate(steps, 1):
            _update(chain, step.batch)
            if pending:
                if number < done:
                    continue
                pending = False
                if chain.hexdigest() == saved_chain:
                    continue
                raise of_another_vote(self.path)
            yield step
            if self.due():
                self.save(tally, key, number, chain.hexdigest(), bad)
        if pending:
            raise of_another_vote(self.path)

    def load(self, tally: Tally, key: str, bad: list[Bad]) -> tuple[int, str]:
        """Fill the tally; how many steps it holds and the digest of what they were, or nothing (0)."""
        if not self.path.is_file():
            return 0, ""
        state = State(self.path)
        about = state.about
        if about.get("format") != "gradfix.partial" or about.get("key") != key:
            raise of_another_vote(self.path)
        tally.load(dict(state.items()), int(about["count"]))
        bad.extend((int(number), text) for number, text in json.loads(about["bad"]))
        return int(about["batches"]), about["chain"]

    def due(self) -> bool:
        return time.monotonic() - self.last >= self.pause

    def save(self, tally: Tally, key: str, done: int, chain: str, bad: Sequence[Bad]) -> None:
        begin = time.monotonic()
        about = {"format": "gradfix.partial", "count": str(tally.count), "batches": str(done), "chain": chain}
        save_state(self.path, dict(tally.items()), {**about, "key": key, "bad": json.dumps(bad)})
        self.last = time.monotonic()
        self.pause = max(self.every, (self.last - begin) / SAVE_SHARE) if self.every else 0.0


class PartialVoteInStep(PartialVote):
    """For processes that go in step: all of them must go on from the same step, or none.

    Every process keeps its last two partial votes in two files by turns. A kill can catch some processes before and
    some after a save, but never two saves apart, so one step is in a file of each of them."""

    def __init__(self, group: Group, paths: Sequence[Path], every: float | None = None) -> None:
        super().__init__(paths[0], every)
        self.group, self.paths = group, list(paths)

    def load(self, tally: Tally, key: str, bad: list[Bad]) -> tuple[int, str]:
        """The latest step that every process has; nothing where there is none."""
        held: dict[int, Path] = {}
        with together(self.group):
            for path in self.paths:
                if path.is_file():
                    held[_steps_in(path, key)] = path
        common = set.intersection(*map(set, self.group.gather(list(held))))
        found: tuple[int, str] = (0, "")
        with together(self.group):
            if common:
                self.path = held[max(common)]
                found = super().load(tally, key, bad)
                self._turn()
        return found

    def due(self) -> bool:
        leads: bool = self.group.gather(super().due())[0]
        return leads

    def save(self, tally: Tally, key: str, done: int, chain: str, bad: Sequence[Bad]) -> None:
        super().save(tally, key, done, chain, bad)
        self._turn()

    def _turn(self) -> None:
        """The next save goes to the other file."""
        self.path = next(path for path in self.paths if path != self.path)


def _steps_in(path: Path, key: str) -> int:
    """How many steps a partial vote holds; that of another vote is refused."""
    about = SafetensorsFile(path).metadata
    if about.get("format") != "gradfix.partial" or about.get("key") != key:
        raise of_another_vote(path)
    try:
        return int(about["batches"])
    except (KeyError, ValueError):
        raise CorruptInput(f"{path} is a damaged partial vote. Delete it, or pass --no-resume.") from None


def of_another_vote(path: Path) -> CorruptInput:
    return CorruptInput(
        f"{path} belongs to another vote (other data, options, batch size or model). Delete it, or pass --no-resume."
    )


def weights_key(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """sha256 over names, dtypes, shapes and every byte."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in tensors.items():
        digest.update(f"\n{name}\t{tuple(tensor.shape)}\t{tensor.dtype}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def vote_key(model: nn.Module, *settings: object) -> str:
    """All that shapes a vote besides its batches: settings, device, and every weight and buffer of the model.

    Those that do not vote are included: they shape the votes of the others. Of a weight that is split over
    processes, each looks at its own slice."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    devices = sorted({tensor.device.type for tensor in tensors.values()})
    return weights_key({name: local(tensor) for name, tensor in tensors.items()}, repr((settings, devices)))


def local(tensor: Tensor) -> Tensor:
    """This process's slice of a tensor that is split over several, or all of one that is not."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach()


def _update(digest: hashlib._Hash, batch: Batch) -> None:
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
