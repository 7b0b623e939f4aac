"""Image folders as tables: class/picture.png, or split/class/picture.png.

A folder is a split when it is called like one and all folders with pictures beside it are; where only some are,
nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradfix.data.files import Table
from gradfix.errors import DataError

ALIASES = {"val": "validation", "valid": "validation", "dev": "validation", "training": "train"}
SPLITS = ("train", "validation", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def image_tables(folder: Path) -> dict[str, Table]:
    """The pictures per split; all of them are "train" where the folders are classes."""
    splits: dict[str, Path] = {}
    others = []
    for path in _folders(folder):
        name = split_called(path.name)
        if name is None:
            others.append(path)
        elif name in splits:
            raise DataError(
                f"{folder}: {splits[name].name!r} and {path.name!r} both claim to be one split; keep one of them."
            )
        else:
            splits[name] = path
    others = [path for path in others if next(_pictures(path), None) is not None]
    if splits and not others:
        return {name: _image_table(splits[name]) for name in SPLITS if name in splits}
    _refuse_mixture(folder, splits, others)
    table = _image_table(folder)
    return {"train": table} if table.rows else {}


def split_called(name: str) -> str | None:
    name = ALIASES.get(name.lower(), name.lower())
    return name if name in SPLITS else None


def _refuse_mixture(folder: Path, splits: Mapping[str, Path], others: list[Path]) -> None:
    """A class may be called "train" (a vehicle, say); then its pictures lie in it, not in folders of classes."""
    for split in splits.values():
        if _folders(split) and not any(map(_is_picture, split.iterdir())):
            raise DataError(
                f"{folder}: the folder {others[0].name!r} stands beside the split {split.name!r} and is no split. "
                "Move it away; or, where both are classes, put the pictures directly into them."
            )


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _pictures(folder: Path) -> Iterator[Path]:
    return filter(_is_picture, folder.rglob("*"))


def _image_table(folder: Path) -> Table:
    rows: list[tuple[dict[str, Any], str]] = []
    for home in _folders(folder):
        rows += [({"image": path, "label": home.name}, str(path)) for path in sorted(_pictures(home))]
    return Table(rows)
