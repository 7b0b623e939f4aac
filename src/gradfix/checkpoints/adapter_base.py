"""Is this the base the adapter was trained on?

A delta on the wrong base is a plausible-looking wrong model. Adapters written by gradfix carry the
fingerprint of their base and are held to it; for others the recorded name is compared, a local folder of
that name is probed, and what could not be checked is said in the notes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.errors import GradfixError, IncompatibleCheckpoints

PROBED = 64


def check_base(folder: Path, base: Checkpoint, recorded: str | None) -> tuple[str, ...]:
    """Raise when the base is shown to be another one; otherwise say what is not certain."""
    expected = _fingerprint_of(folder)
    if expected is not None:
        if base.fingerprint() != expected:
            raise IncompatibleCheckpoints(
                f"{folder} was written for other weights than {base}: their fingerprints differ. "
                "Give the base that its gradfix.json names."
            )
        return ()
    if not recorded:
        return (f"{folder.name} does not say which base it was trained on; only shapes were checked",)
    if _same_place(recorded, base):
        return ()
    place = Path(str(recorded))
    if place.is_dir() and base.path is not None:
        _compare(folder, base, place)
        return ()
    return (
        f"{folder.name} was trained on {str(recorded)[:200]!r}; that {base} holds the same weights was not "
        "checked beyond names and shapes",
    )


def _fingerprint_of(folder: Path) -> str | None:
    from gradfix.checkpoints.write import MANIFEST, read_manifest

    if not (folder / MANIFEST).is_file():
        return None
    found = read_manifest(folder).get("base_fingerprint")
    return str(found) if found else None


def _same_place(recorded: str, base: Checkpoint) -> bool:
    if base.path is None:
        return False
    try:
        if os.path.samefile(recorded, base.path):
            return True
    except (OSError, ValueError):
        pass
    # a hub id, against the hub cache's folder name or a folder called like the model
    parts = base.path.parts
    return "models--" + str(recorded).replace("/", "--") in parts


def _compare(folder: Path, base: Checkpoint, place: Path) -> None:
    """Probe the first values of every tensor of the folder that the adapter names."""
    try:
        named = open_checkpoint(place)
    except GradfixError:
        return
    known = set(named.names())
    for name in base.names():
        if name not in known or not base.info(name).numel:
            continue
        ours, theirs = next(base.chunks(name, PROBED)), next(named.chunks(name, PROBED))
        if base.info(name).shape != named.info(name).shape or not torch.allclose(
            ours.double(), theirs.double(), rtol=0.02, atol=1e-5
        ):
            raise IncompatibleCheckpoints(
                f"{folder} was trained on {place}, and tensor {name!r} of {base} holds other values. "
                "Give that folder as --base."
            )
