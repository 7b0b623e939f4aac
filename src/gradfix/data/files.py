"""Read tables: .jsonl, .csv, .tsv and .parquet as rows of plain values, and image folders as tables.

Values of text formats stay strings ("NA" and "01" survive). A damaged line is an error that names the file
and the line; nothing is skipped and nothing is guessed. Pictures lie in class/picture.png or
split/class/picture.png: a folder is a split when it is called like one and all folders with pictures beside it
are; where only some are, nothing is guessed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfix.errors import DataError, UsageError
from gradfix.registry import Registry

LONGEST_FIELD = 1 << 30
ALIASES = {"val": "validation", "valid": "validation", "dev": "validation", "training": "train"}
SPLITS = ("train", "validation", "test")
SEPARATED = (".csv", ".tsv")
SEPARATORS = (";", "\t", "|", ",")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class RawTable:
    """Rows with their place, and the names behind integer labels where the format knows them."""

    rows: list[tuple[dict[str, Any], str]]
    class_names: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Spelling:
    """How a text file is written where it is not UTF-8 with commas (tabs in .tsv)."""

    encoding: str | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise UsageError(
                f"no encoding called {self.encoding!r}; usual ones: utf-8, utf-16, cp1252, latin-1."
            ) from None
        if self.separator is not None and len(self.separator) != 1:
            raise UsageError(f"--separator is one character such as ';' or a tab, got {self.separator!r}.")

    @property
    def codec(self) -> str:
        return self.encoding or "utf-8-sig"


MAX_ROWS = 20_000_000
USUAL = Spelling()
Reader = Callable[[Path, Spelling], RawTable]
READERS: Registry[Reader] = Registry("data format")


def read_table(path: Path, spelling: Spelling = USUAL) -> RawTable:
    kind = path.suffix.lower()
    if spelling.separator is not None and kind not in SEPARATED:
        raise UsageError(f"{path} has no separator: leave --separator out.")
    if spelling.encoding is not None and kind == ".parquet":
        raise UsageError(f"{path} is no text file: leave --encoding out.")
    try:
        return READERS[kind](path, spelling)
    except UnicodeDecodeError as error:
        if spelling.encoding is not None:
            raise DataError(
                f"{path} is not {spelling.encoding} text ({error.reason}). Give its own --encoding."
            ) from None
        raise DataError(
            f"{path}:{_line_of(path, error.start)}: not UTF-8. Save the file as UTF-8, or name its encoding "
            "(--encoding cp1252 for many files of Windows)."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from None


def is_table(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in READERS


@READERS.register(".jsonl")
def read_jsonl(path: Path, spelling: Spelling = USUAL) -> RawTable:
    rows = []
    # Split at "\n" only: str.splitlines would also cut at characters that are legal inside a JSON string.
    for number, line in enumerate(path.read_bytes().decode(spelling.codec).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line, object_pairs_hook=_each_once)
        except _Twice as error:
            raise DataError(f"{place}: the column {error} appears twice. Keep one.") from None
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise DataError(f"{place}: this line is not JSON ({reason}). One object per line is expected.") from None
        if not isinstance(row, dict):
            raise DataError(f"{place}: expected an object with named columns, found {type(row).__name__}.")
        rows.append((row, place))
    return RawTable(rows)


class _Twice(ValueError):
    """JSON's own rule for a name that stands twice is to keep the last in silence."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(repr(next(name for name in names if names.count(name) > 1)))
    return row


@READERS.register(".csv")
def read_csv(path: Path, spelling: Spelling = USUAL) -> RawTable:
    return _read_separated(path, ",", spelling)


@READERS.register(".tsv")
def read_tsv(path: Path, spelling: Spelling = USUAL) -> RawTable:
    return _read_separated(path, "\t", spelling)


def _read_separated(path: Path, usual: str, spelling: Spelling) -> RawTable:
    delimiter = spelling.separator or usual
    with path.open(encoding=spelling.codec, newline="") as file, _long_fields():
        _refuse_other_separator(path, file.readline(), delimiter)
        file.seek(0)
        lines = _csv_lines(path, csv.reader(file, delimiter=delimiter, strict=True))
        first = next(lines, None)
        if first is None:
            raise DataError(f"{path} is empty: a header line with the column names is expected.")
        header = [name.strip() for name in first[1]]
        twice = {name for name in header if header.count(name) > 1}
        if twice:
            raise DataError(f"{path}:1: the column {sorted(twice)[0]!r} appears twice in the header.")
        rows = []
        for number, values in lines:
            if len(values) != len(header):
                raise DataError(
                    f"{path}:{number}: {len(values)} fields, but the header has {len(header)} "
                    f"({', '.join(header)}). Quote fields that hold a {delimiter!r}."
                )
            rows.append((dict(zip(header, values, strict=True)), f"{path}:{number}"))
    return RawTable(rows)


@READERS.register(".parquet")
def read_parquet(path: Path, spelling: Spelling = USUAL) -> RawTable:
    import pyarrow
    from pyarrow import parquet

    try:
        claimed = parquet.read_metadata(path).num_rows
        if claimed > MAX_ROWS:  # run-length encoding makes a billion rows of a few bytes
            raise DataError(f"{path} claims {claimed:,} rows, more than {MAX_ROWS:,}. Take a sample first.")
        table = parquet.read_table(path)
        rows = table.to_pylist()
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise DataError(f"{path} is not a readable parquet file ({reason}).") from None
    return RawTable(
        [(row, f"{path}:row {number}") for number, row in enumerate(rows)], _class_names(table.schema.metadata or {})
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The label names that `datasets` keeps beside a parquet table."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _refuse_other_separator(path: Path, header: str, delimiter: str) -> None:
    """A header that another sign cuts into columns, and the expected one does not."""
    if delimiter in header:
        return
    for sign in SEPARATORS:
        if sign in header:
            shown = "$'\\t'" if sign == "\t" else f"'{sign}'"
            raise DataError(
                f"{path}:1: the header has no {delimiter!r} and a {sign!r}: give --separator {shown} if that separates "
                "the columns."
            )


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be as long as a document; the reader's own limit of 128 KiB is global and comes back."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_lines(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Records with the line they start on; blank lines are no records."""
    while True:
        start = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}:{start}: not CSV ({error}).") from None
        if values:
            yield start, values


def _line_of(path: Path, offset: int) -> int:
    """The line of a byte offset; a decoder that works in pieces makes it a lower bound for CSV."""
    data = path.read_bytes()
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start
    return data[:offset].count(b"\n") + 1


def image_tables(folder: Path) -> dict[str, RawTable]:
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
    return path.suffix.lower() in PICTURES and path.is_file()


def _pictures(folder: Path) -> Iterator[Path]:
    return filter(_is_picture, folder.rglob("*"))


def _image_table(folder: Path) -> RawTable:
    rows: list[tuple[dict[str, Any], str]] = []
    for home in _folders(folder):
        rows += [({"image": path, "label": home.name}, str(path)) for path in sorted(_pictures(home))]
    return RawTable(rows)
