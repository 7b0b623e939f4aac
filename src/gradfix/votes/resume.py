"""Go on where an interrupted vote stopped.

After each batch the tally is saved beside the output; the next run with the same model and batches skips
what is already counted. Votes are sums of integers, so the result is the same bit for bit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import CorruptInput
from gradfix.votes.loop import Batch
from gradfix.votes.tally import Tally

SAVE_EVERY_SECONDS = 10.0


def resumable(
    path: Path, tally: Tally, batches: Iterable[Batch], every: float = SAVE_EVERY_SECONDS
) -> Iterator[Batch]:
    """Yield the batches that are not yet counted, saving the tally between them."""
    model_key = _weights_key(tally)
    chain = hashlib.sha256(model_key.encode())
    done, saved_chain = _load(path, tally, model_key)
    pending = done > 0
    last = time.monotonic()
    for index, batch in enumerate(batches):
        _update(chain, batch)
        if pending:
            if index + 1 < done:
                continue
            pending = False
            if chain.hexdigest() == saved_chain:
                continue
            raise CorruptInput(
                f"{path} belongs to another vote (other data, batch size or model). Delete it, or pass --no-resume."
            )
        yield batch
        if time.monotonic() - last >= every:
            _save(path, tally, model_key, index + 1, chain.hexdigest())
            last = time.monotonic()


def _save(path: Path, tally: Tally, key: str, done: int, chain: str) -> None:
    metadata = {
        "format": "gradfix.partial",
        "count": str(tally.count),
        "batches": str(done),
        "chain": chain,
        "key": key,
    }
    save_tensors(path, {name: buffer.cpu().contiguous() for name, buffer in tally.items()}, metadata)


def _load(path: Path, tally: Tally, key: str) -> tuple[int, str]:
    if not path.is_file():
        return 0, ""
    file = SafetensorsFile(path)
    about = file.metadata
    if about.get("format") != "gradfix.partial" or about.get("key") != key:
        raise CorruptInput(f"{path} belongs to another vote. Delete it, or pass --no-resume.")
    tally.load({name: file.read(name) for name in file.entries}, int(about["count"]))
    return int(about["batches"]), about["chain"]


def _weights_key(tally: Tally) -> str:
    digest = hashlib.sha256()
    for name, parameter in tally.parameters.items():
        sample = parameter.detach().reshape(-1)[:64].double().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}{sample.tolist()}".encode())
    return digest.hexdigest()


def _update(digest: hashlib._Hash, batch: Batch) -> None:
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
