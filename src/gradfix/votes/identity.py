"""Votes belong to one set of weights: a few probed values per tensor tell whose they are.

A probe survives a change of dtype (votes are often taken in bf16 on a checkpoint stored in fp32) and
costs nothing, so it is checked before anything is written. The full hashes are checked as well, once the
target has streamed by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from gradfix.checkpoints.folder import comparable
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import IncompatibleCheckpoints

PROBES = 8
RELATIVE, ABSOLUTE = 0.02, 1e-5  # bf16 rounds by 0.004; two releases differ by far more

Probe = dict[str, list[float]]


def probe_module(model: nn.Module) -> Probe:
    """Probed values under on-disk names; tensors that are split on disk are left out."""
    renamed = name_map(model).renamed
    parameters = dict(model.named_parameters())
    return {disk: _probe(parameters[name]) for name, disk in renamed.items() if parameters[name].numel()}


def _probe(tensor: Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)[:PROBES].double().cpu()
    return [round(value, 8) for value in flat.tolist()]


def check_probe(probe: Mapping[str, list[float]], target: Checkpoint) -> None:
    """Raise when the probed tensors of `target` hold other values."""
    names = set(target.names())
    for name, values in probe.items():
        if name not in names:
            continue
        found = next(target.chunks(name, PROBES))[: len(values)].double().tolist()
        same = [math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(values, found)]
        if not all(same):
            raise IncompatibleCheckpoints(
                f"the votes were taken on other weights than {target} (tensor {name!r} differs). "
                "Vote again on this target with `gradfix vote`."
            )


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
