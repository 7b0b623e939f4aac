"""Stand-ins for hub models and datasets: tiny checkpoints and parquet folders in the formats of the real ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gradfix.experiments.paper import Declared
from tiny import IMAGE_SIZE


def write_dataset(folder: Path, declared: Declared, per_class: int = 8) -> Path:
    """A folder with one parquet file per split, as the hub serves them: class numbers, image structs, extra splits."""
    for number, split in enumerate(filter(None, (declared.train, declared.validation, declared.test))):
        _write(folder, split, declared, per_class, seed=10 * number)
    _write(folder, "unused", declared, 1, seed=99)
    return folder


def _write(folder: Path, split: str, declared: Declared, per_class: int, seed: int) -> None:
    import datasets

    names = _names(declared)
    rows: dict[str, list[Any]] = {}
    for index in range(per_class * len(names)):
        label = index % len(names)
        for column, value in _columns(declared, label, seed + index).items():
            rows.setdefault(column, []).append(value)
        rows.setdefault(declared.label, []).append(label if _numbered(declared) else names[label])
    features = {column: _feature(column, declared, names) for column in rows}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


def _numbered(declared: Declared) -> bool:
    return isinstance(declared.classes, tuple)


def _names(declared: Declared) -> list[str]:
    if declared.classes is None:
        return ["great_white_shark", "goldfish", "hen"]
    if isinstance(declared.classes, tuple):
        return [f"hub name {number}" for number in range(len(declared.classes))]
    return list(declared.classes)


def _columns(declared: Declared, label: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng([seed, label])
    if declared.image is not None:
        pixels = draw.integers(0, 120, (IMAGE_SIZE, IMAGE_SIZE, 3))
        pixels[..., label % 3] += 100
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype("uint8")).save(buffer, "png")
        return {declared.image: {"bytes": buffer.getvalue(), "path": None}}
    words = ("good", "bad", "fine")
    columns = [part.split("}")[0] for part in (declared.text or "").split("{")[1:]]
    return {name: f"{words[label]} film {draw.integers(10**6)}" for name in columns}


def _feature(column: str, declared: Declared, names: list[str]) -> Any:
    import datasets

    if column == declared.image:
        return datasets.Image()
    if column == declared.label and _numbered(declared):
        return datasets.ClassLabel(names=names)
    return datasets.Value("string")
