"""Whose weights are these? Fingerprints of files or contents, and probes of a few values per tensor.

Votes belong to one set of weights. A probe survives a change of dtype (votes are often taken in bf16 on a checkpoint
stored in fp32) and costs nothing, so it is checked before anything is written. The full hashes are checked as
well, once the target has streamed by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.hashes import hash_file, hexadecimal
from gradfix.checkpoints.weights import Checkpoint
from gradfix.errors import IncompatibleCheckpoints

BY_FILES, BY_SHA256 = "blake3:", "files:"  # how a fingerprint of files begins, now and in older votes
PROBES = 8
RELATIVE, ABSOLUTE = 0.02, 1e-5  # bf16 rounds by 0.004; two releases differ by far more

Probe = dict[str, list[float]]


def target_fingerprint(target: Checkpoint, files: Mapping[str, str] | None = None) -> str:
    """The identity votes are tied to: file hashes for checkpoints on disk, content for those in memory."""
    if not target.files:
        return target.fingerprint()
    return _of_files(BY_FILES, files or {path.name: hash_file(path) for path in target.files})


def is_target(recorded: str, target: Checkpoint, files: Mapping[str, str] | None = None) -> bool:
    """Was this fingerprint taken of these weights? Those of older votes are sha256 and cost one reading."""
    if recorded.startswith(BY_SHA256):
        older = {path.name: hash_file(path, "sha256") for path in target.files}
        return bool(older) and recorded == _of_files(BY_SHA256, older)
    return recorded == target_fingerprint(target, files)


def comparable(fingerprints: Iterable[str]) -> bool:
    """Do these fingerprints differ only if the weights do? Those of files in two algorithms tell nothing."""
    kinds = {next((kind for kind in (BY_FILES, BY_SHA256) if f.startswith(kind)), "") for f in fingerprints}
    return not kinds >= {BY_FILES, BY_SHA256}


def _of_files(kind: str, hashes: Mapping[str, str]) -> str:
    return kind + "+".join(hexadecimal(hashes[name])[:32] for name in sorted(hashes))


def probe_module(model: nn.Module, renamed: Mapping[str, str]) -> Probe:
    """Probed values under on-disk names (`renamed` has the module's); tensors that are split on disk are left out."""
    parameters = dict(model.named_parameters())
    chosen = [(disk, parameters[name]) for name, disk in renamed.items() if parameters[name].numel()]
    with torch.no_grad():
        values = values_of([p.flatten()[:PROBES] for _, p in chosen])
    return {disk: [round(value, 8) for value in few] for (disk, _), few in zip(chosen, values)}


def values_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The values of many small tensors; each device is waited for once a dtype."""
    return values_later(tensors)()


def values_later(tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
    """The same, but devices are only waited for when the values are asked for, and not for what they were given since."""
    sent = list[tuple[list[int], Tensor]]()
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if (tensor.device, tensor.dtype) == kind]
        flat = torch.cat([tensors[place].flatten() for place in places])
        sent.append((places, flat.detach().to("cpu", non_blocking=True)))
    sizes = [tensor.numel() for tensor in tensors]
    arrived = [torch.cuda.current_stream(d).record_event() for d in {t.device for t in tensors} if d.type == "cuda"]

    def read() -> list[list[Any]]:
        for event in arrived:
            event.synchronize()
        out: list[list[Any]] = [[] for _ in sizes]
        for places, flat in sent:
            values, start = flat.tolist(), 0
            for place in places:
                out[place], start = values[start : start + sizes[place]], start + sizes[place]
        return out

    return read


def check_probe(probe: Mapping[str, list[float]], target: Checkpoint) -> None:
    """Raise when the probed tensors of `target` hold other values."""
    names = set(target.names())
    for name, values in probe.items():
        if name not in names:
            continue
        found = next(target.chunks(name, PROBES))[: len(values)].double().tolist()
        if not same_probe(values, found):
            raise IncompatibleCheckpoints(
                f"the votes were taken on other weights than {target} (tensor {name!r} differs). "
                "Vote again on this target with `gradfix vote`."
            )


def same_probe(ours: Sequence[float], theirs: Sequence[float] | None) -> bool:
    """Whether two probes of a tensor may be of the same weights; one that was not taken says nothing."""
    pairs = zip(ours, theirs or ())
    return all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in pairs)


def common_target(fingerprints: Iterable[str | None]) -> str | None:
    """The target that all votes name, or None where none does; votes of different targets do not combine."""
    named = {fingerprint for fingerprint in fingerprints if fingerprint is not None}
    if len(named) < 2:
        return next(iter(named), None)
    if comparable(named):
        raise IncompatibleCheckpoints("the votes were taken at different weights and cannot be combined.")
    raise IncompatibleCheckpoints(
        "some of the votes are of an older gradfix, which hashed their target otherwise: whether all belong to one "
        "target cannot be told. Give them as files to `gradfix merge`, or vote again."
    )
