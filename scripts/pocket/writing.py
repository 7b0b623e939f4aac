"""Write the files that `gradfix.pocket.shipped` reads: bases in halves, everything else as coded differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradfix.pocket.shipped import Coded


def quantise(base: Mapping[str, NDArray[Any]], tuned: Mapping[str, NDArray[Any]], levels: float) -> Coded:
    """Code `tuned - base` with `levels` steps to the root mean square of each tensor."""
    symbols, steps = [], []
    for name in sorted(base):
        delta = tuned[name].astype(np.float64) - base[name].astype(np.float64)
        step = np.float32(max(np.sqrt(np.mean(delta**2)) / levels, np.abs(delta).max() / 127))
        coded = np.rint(delta / np.float64(step)) if step > 0 else np.zeros_like(delta)
        symbols.append(np.clip(coded, -127, 127).astype(np.int8).ravel())
        steps.append(step)
    return np.concatenate(symbols), np.array(steps, np.float32)


def write_base(folder: Path, name: str, state: Mapping[str, NDArray[Any]]) -> None:
    from safetensors.numpy import save_file

    halves = {key: np.ascontiguousarray(value.astype(np.float16)) for key, value in state.items()}
    save_file(halves, folder / f"{name}.safetensors", metadata={"format": "pt"})


def write_deltas(folder: Path, coded: Mapping[str, Coded]) -> None:
    arrays: dict[str, Any] = {}
    for name, (symbols, steps) in coded.items():
        arrays |= {name: symbols, f"{name}.steps": steps}
    np.savez_compressed(folder / "deltas.npz", **arrays)
