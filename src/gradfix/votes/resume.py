"""Go on where an interrupted vote stopped.

After each batch the tally is saved beside the output; the next run with the same model and batches skips
what is already counted. Votes are sums of integers, and the mean rule adds its samples in their order, so the
result is the same bit for bit."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.checkpoints.open import raw_bytes
from gradfix.errors import CorruptInput
from gradfix.vectors.signvotes import Tally
from gradfix.votes.engines.loop import Batch

SAVE_EVERY_SECONDS = 10.0
SAVE_SHARE = 0.05  # the votes of a large model take a while to save: at most this much of the time


class Shelf:
    """Where a process keeps its partial vote, and when it puts it there."""

    def __init__(self, path: Path, every: float = SAVE_EVERY_SECONDS) -> None:
        self.path, self.every = path, every
        self.pause, self.last = every, time.monotonic()

    def load(self, tally: Tally, key: str, bad: list[str]) -> tuple[int, str]:
        """Fill the tally; how many batches it holds and the digest of what they were, or nothing (0)."""
        return load_partial(self.path, tally, key, bad)

    def due(self) -> bool:
        return time.monotonic() - self.last >= self.pause

    def save(self, tally: Tally, key: str, done: int, chain: str, bad: list[str]) -> None:
        begin = time.monotonic()
        save_partial(self.path, tally, key, done, chain, bad)
        self.last = time.monotonic()
        self.pause = max(self.every, (self.last - begin) / SAVE_SHARE) if self.every else 0.0


def resumable(
    path: Path | Shelf,
    tally: Tally,
    batches: Iterable[Batch],
    every: float = SAVE_EVERY_SECONDS,
    *,
    key: str = "",
    bad: list[str] | None = None,
) -> Iterator[Batch]:
    """Yield the batches that are not yet counted, saving the tally between them.

    `key` names whatever else the votes depend on (prompts, frozen weights, options); `bad` are the samples
    left out so far, kept with the count so that a resumed vote names and weighs them too."""
    shelf = path if isinstance(path, Shelf) else Shelf(path, every)
    key = weights_key(tally.parameters, key)
    chain = hashlib.sha256(key.encode())
    skipped = [] if bad is None else bad
    done, saved_chain = shelf.load(tally, key, skipped)
    pending = done > 0
    for index, batch in enumerate(batches):
        _update(chain, batch)
        if pending:
            if index + 1 < done:
                continue
            pending = False
            if chain.hexdigest() == saved_chain:
                continue
            raise stranger(shelf.path)
        yield batch
        if shelf.due():
            shelf.save(tally, key, index + 1, chain.hexdigest(), skipped)
    if pending:
        raise stranger(shelf.path)


def weights_key(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """sha256 over names, dtypes, shapes and every byte."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in tensors.items():
        digest.update(f"\n{name}\t{tuple(tensor.shape)}\t{tensor.dtype}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def vote_key(model: nn.Module, *settings: str) -> str:
    """All that shapes a vote besides its batches: settings, device, and every weight and buffer of the model.

    Those that do not vote are included: they shape the votes of the others."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    devices = sorted({tensor.device.type for tensor in tensors.values()})
    return weights_key(tensors, repr((settings, devices)))


def save_partial(path: Path, tally: Tally, key: str, done: int, chain: str, bad: list[str]) -> None:
    metadata = {
        "format": "gradfix.partial",
        "count": str(tally.count),
        "batches": str(done),
        "chain": chain,
        "key": key,
        "bad": json.dumps(bad),
    }
    save_state(path, dict(tally.items()), metadata)


def load_partial(path: Path, tally: Tally, key: str, bad: list[str]) -> tuple[int, str]:
    if not path.is_file():
        return 0, ""
    state = State(path)
    about = state.about
    if about.get("format") != "gradfix.partial" or about.get("key") != key:
        raise stranger(path)
    tally.load(dict(state.items()), int(about["count"]))
    bad.extend(json.loads(about["bad"]))
    return int(about["batches"]), about["chain"]


def stranger(path: Path) -> CorruptInput:
    return CorruptInput(
        f"{path} belongs to another vote (other data, options, batch size or model). "
        "Delete it, or pass --no-resume."
    )


def _update(digest: hashlib._Hash, batch: Batch) -> None:
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
