"""Load labelled examples from wherever people keep them.

`load_data` takes a table (.jsonl, .csv, .tsv, .parquet), a folder of such tables, an image folder, a hub
dataset name or Python rows, and returns checked rows per split. Every refusal happens here, before a model
is loaded."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from gradfix.data.columns import ColumnNames, Columns, by_number, make_row, plan_columns
from gradfix.data.files import (
    ALIASES,
    READERS,
    SPLITS,
    USUAL,
    RawTable,
    Spelling,
    image_tables,
    is_table,
    read_table,
    split_called,
)
from gradfix.data.rows import Row, exact_hash
from gradfix.errors import DataError, GradfixError
from gradfix.registry import unknown

Prompts = str | Sequence[str]

TASK_FILE = "task.json"
TASK_KEYS = ("labels", "templates", *ColumnNames.__annotations__)


@dataclass(frozen=True)
class Dataset:
    """Checked rows per split and the label set they share."""

    splits: dict[str, list[Row]]
    labels: dict[str, Prompts]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What the rows show: "text", "image", "messages" or "prompt"."""
        first = next(rows[0] for rows in self.splits.values() if rows)
        return next(kind for kind in ("image", "messages", "prompt", "text") if kind in first)

    def pick(self, *names: str) -> list[Row]:
        """The first of these splits that exists; a source with a single split answers with it."""
        for name in names:
            if name in self.splits:
                return self.splits[name]
        if len(self.splits) == 1:
            return next(iter(self.splits.values()))
        raise DataError(f"{self.source} has no split {names[0]!r}; there are: {', '.join(self.splits)}.")

    def hashes(self) -> dict[str, str]:
        """sha256 per split over inputs, answers and labels, in order: equal hashes mean equal examples."""
        out = {}
        for name, rows in self.splits.items():
            digest = hashlib.sha256()
            for row in rows:
                digest.update(f"{exact_hash(row)}\n".encode())
            out[name] = digest.hexdigest()
        return out


@dataclass(frozen=True)
class _Raw:
    """Tables per split, before columns and labels are settled."""

    tables: dict[str, RawTable]
    home: Path | None = None
    task: Mapping[str, Any] | None = None


def load_data(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    labels: Mapping[str, Prompts] | None = None,
    splits: Sequence[str] | None = None,
    drop_unlabelled: bool = False,
    check_images: bool = True,
    label_names: Sequence[str] | None = None,
    spelling: Spelling = USUAL,
    bare: bool = False,
    **columns: Unpack[ColumnNames],
) -> Dataset:
    """Read, check and name everything; see the module docstring for the sources.

    `label_column`, `text_column` and `image_column` name columns that are not called "label", "text" or "image";
    `text_template` builds the text from several ("{premise} therefore {hypothesis}"). `labels` fixes the label set
    (name -> prompt or prompts); otherwise task.json does, then the file's own class names, then the values found.
    `label_names` are the names behind labels that are numbers, in their order. `splits` loads only these. `spelling` says
    how text files are written that are not UTF-8 with commas. `check_images=False` skips decoding every image once.
    `bare` takes texts without labels where there is no label column."""
    raw = _read(source, splits, spelling)
    declared = {name: value for name, value in (raw.task or {}).items() if name in ColumnNames.__annotations__}
    asked = Columns(**columns).or_else(Columns(**declared))
    where = _name(source)
    rows, notes = _rows(raw, asked, where, drop_unlabelled, list(label_names) if label_names else None, bare)
    settled = _labels(raw, rows, labels, asked, where)
    if check_images:
        for row in (row for part in rows.values() for row in part if "image" in row):
            row.content  # noqa: B018  decodes, so a damaged file is found now
    return Dataset(rows, settled, where, tuple(notes))


def load_unlabelled(
    source: Any,
    *,
    text_column: str | Sequence[str] | None = None,
    image_column: str | None = None,
    text_template: str | None = None,
    spelling: Spelling = USUAL,
) -> list[Row]:
    """Inputs alone: a label column may be there or not, nobody reads it. A split called "test" is left out."""
    raw = _read(source, None, spelling)
    asked = Columns(text_column=text_column, image_column=image_column, text_template=text_template)
    where = _name(source)
    out: list[Row] = []
    for split, table in raw.tables.items():
        if table.rows and split != "test":
            chosen = plan_columns(list(table.rows[0][0]), asked, where, labelled=False)
            out += [make_row(columns, at, chosen, None, raw.home) for columns, at in table.rows]
    if not out:
        raise DataError(f"{where} holds no inputs outside a test split.")
    return out


def _name(source: Any) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the examples"


def _read(source: Any, wanted: Sequence[str] | None, spelling: Spelling = USUAL) -> _Raw:
    if not isinstance(source, (str, os.PathLike)):
        raw = _Raw(_python_tables(source))
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            raw = _read_folder(path, spelling)
        elif path.is_file():
            raw = _read_file(path, spelling)
        else:
            raw = _read_hub(os.fspath(source))
    if wanted is None:
        return raw
    for name in wanted:
        if name not in raw.tables:
            raise DataError(f"{_name(source)}: " + unknown("split", name, list(raw.tables)))
    return _Raw({name: raw.tables[name] for name in wanted}, raw.home, raw.task)


def _read_file(path: Path, spelling: Spelling) -> _Raw:
    if not is_table(path):
        raise DataError(f"{path}: unknown kind of data file; expected one of {', '.join(READERS)}.")
    name = split_name(path.name)
    return _Raw({name or "train": read_table(path, spelling)}, path.parent, _read_task(path.parent))


def split_name(file: str) -> str | None:
    """ "train" for train.csv, val.jsonl's "validation", and the hub's train-00000-of-00002.parquet."""
    return split_called(re.sub(r"(-\d+-of-\d+)?\.[^.]+$", "", file))


def _read_folder(folder: Path, spelling: Spelling) -> _Raw:
    home = folder / "data" if not any(is_table(p) for p in folder.iterdir()) and (folder / "data").is_dir() else folder
    files: dict[str, list[Path]] = {}
    for path in sorted(home.iterdir()):
        name = split_name(path.name) if path.suffix.lower() in READERS else None
        if name is not None and not path.is_file():
            raise DataError(f"{path} is a folder or a link that leads nowhere; a data file is expected there.")
        if name is not None:
            files.setdefault(name, []).append(path)
    if files:
        tables = {name: _joined(files[name], spelling) for name in SPLITS if name in files}
        return _Raw(tables, home, _read_task(folder))
    tables = image_tables(folder)
    if not tables:
        raise DataError(
            f"{folder} holds no data: expected train, validation or test with one of {', '.join(READERS)}, "
            "or class folders with images in them."
        )
    return _Raw(tables, None, _read_task(folder))


def _joined(paths: Sequence[Path], spelling: Spelling) -> RawTable:
    shards = [path for path in paths if re.search(r"-\d+-of-\d+\.", path.name)]
    if len(paths) > 1 and len(shards) != len(paths):
        raise DataError(f"{paths[0]} and {paths[1].name} both claim to be one split; keep one of them.")
    tables = [read_table(path, spelling) for path in paths]
    return RawTable([row for table in tables for row in table.rows], tables[0].class_names)


def _read_task(folder: Path) -> Mapping[str, Any] | None:
    path = folder / TASK_FILE
    if not path.is_file():
        return None
    try:
        task = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError, RecursionError):
        raise DataError(f"{path} is not readable JSON.") from None
    if not isinstance(task, dict):
        raise DataError(f"{path} must hold an object with {', '.join(TASK_KEYS)}.")
    for key in task:
        if key not in TASK_KEYS:
            raise DataError(f"{path}: " + unknown("key", key, list(TASK_KEYS)))
    for key in ("label_column", "image_column", "text_template"):
        if not isinstance(task.get(key, ""), str):
            raise DataError(f"{path}: {key} must be a string.")
    return {**task, "labels": _prompts(task, path)} if "labels" in task else task


def _prompts(task: Mapping[str, Any], path: Path) -> dict[str, Prompts]:
    labels, templates = task["labels"], task.get("templates", [])
    if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
        labels = {label: label for label in labels}
    ok = isinstance(labels, dict) and labels and all(_is_prompt(prompt) for prompt in labels.values())
    if not ok or not isinstance(templates, list) or not all(isinstance(t, str) and "{}" in t for t in templates):
        raise DataError(
            f'{path}: "labels" maps each label to a prompt or a list of prompts, '
            '"templates" lists strings with {} in them.'
        )
    if not templates:
        return labels
    listed = {name: [prompt] if isinstance(prompt, str) else prompt for name, prompt in labels.items()}
    return {name: [t.replace("{}", p) for t in templates for p in prompts] for name, prompts in listed.items()}


def _is_prompt(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return bool(parts) and all(isinstance(part, str) and part.strip() for part in parts)


def _python_tables(source: Any) -> dict[str, RawTable]:
    parts = source if isinstance(source, Mapping) else {"train": source}
    return {ALIASES.get(str(name), str(name)): _python_table(rows, str(name)) for name, rows in parts.items()}


def _python_table(rows: Any, split: str) -> RawTable:
    features = getattr(rows, "features", None) or {}
    names = {column: list(f.names) for column, f in features.items() if type(f).__name__ == "ClassLabel"}
    for column, feature in features.items():
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(column, type(feature)(decode=False))
    out = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{split}[{index}]: an example is a mapping of columns, not {type(row).__name__}.")
        out.append((dict(row), row.where if isinstance(row, Row) else f"{split}[{index}]"))
    return RawTable(out, names)


def _read_hub(source: str) -> _Raw:
    """`owner/name`, `owner/name:config` or either with `@revision`, through the `datasets` library."""
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?(?:@([\w./-]+))?", source)
    if match is None or Path(source).suffix.lower() in READERS:
        raise DataError(f"{source} does not exist: give a data file, a folder or a hub dataset (owner/name).")
    return _Raw(_python_tables(load_hub(*match.groups())))


def load_hub(name: str, config: str | None = None, revision: str | None = None) -> Mapping[str, Any]:
    """A hub dataset, or a local folder in the hub's layout, split by split."""
    import datasets

    try:
        return dict(datasets.load_dataset(name, config, revision=revision))
    except GradfixError:
        raise
    except Exception as error:  # the library raises a dozen unrelated types, ours is the one users see
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{name} is no local path, and the hub did not deliver it as a dataset ({reason}). "
            "Check the spelling, or download it and give the folder."
        ) from None


def _rows(
    raw: _Raw, asked: Columns, where: str, drop_unlabelled: bool, label_names: list[str] | None, bare: bool
) -> tuple[dict[str, list[Row]], list[str]]:
    out: dict[str, list[Row]] = {}
    notes = []
    for split, table in raw.tables.items():
        place = where if len(raw.tables) == 1 else f"{where} ({split})"
        if not table.rows:
            raise DataError(f"{place} is empty: there are no examples in it.")
        chosen = plan_columns(list(table.rows[0][0]), asked, place, bare=bare)
        names = label_names or table.class_names.get(chosen.label or "")
        rows = [make_row(columns, at, chosen, names, raw.home) for columns, at in table.rows]
        empty = [row for row in rows if chosen.label is not None and row["label"] is None]
        if empty and not drop_unlabelled:
            raise DataError(
                f"{empty[0].where}: no label in column {chosen.label!r} (empty, null or -100). "
                f"{len(empty)} of {len(rows)} rows have none: fill them in, or drop unlabelled rows (--drop-unlabelled)."
            )
        if empty:
            notes.append(f"{split}: {len(empty)} of {len(rows)} rows have no label and were dropped.")
            rows = [row for row in rows if row["label"] is not None]
            if not rows:
                raise DataError(f"{place} is empty: none of its {len(empty)} rows has a label.")
        out[split] = rows
    if not out:
        raise DataError(f"{where} is empty: there are no examples in it.")
    return out, notes


def _labels(
    raw: _Raw, rows: Mapping[str, list[Row]], given: Mapping[str, Prompts] | None, asked: Columns, where: str
) -> dict[str, Prompts]:
    """Settle the label set and hold every row to it."""
    found = sorted({row["label"] for part in rows.values() for row in part if "label" in row})
    named = [names for table in raw.tables.values() for names in table.class_names.values()]
    settled = dict(given or (raw.task or {}).get("labels") or {})
    if not settled and not found:
        return {}
    if not settled and named and set(found) <= set(named[0]):
        settled = {name: name for name in named[0]}
    if not settled:
        _refuse_odd_set(found, sum(map(len, rows.values())), raw, asked, where)
        return {label: label for label in found}
    for row in (row for part in rows.values() for row in part if "label" in row):
        if row["label"] not in settled:
            near = difflib.get_close_matches(row["label"], list(settled), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if row["label"].isdigit():
                hint = f" {by_number(settled)}"
            raise DataError(
                f"{row.where}: label {row['label']!r} is not in the label set ({_few(settled)}).{hint} "
                f"The columns are: {', '.join(map(repr, row))}."
            )
    return settled


def _refuse_odd_set(found: Sequence[str], count: int, raw: _Raw, asked: Columns, where: str) -> None:
    columns = ", ".join(map(repr, next(iter(raw.tables.values())).rows[0][0]))
    column = asked.label_column or "label"
    if len(found) == 1:
        raise DataError(f"{where}: every row has the label {found[0]!r}; at least two are needed. Columns: {columns}.")
    if count >= 20 and len(found) > count / 2:
        raise DataError(
            f"{where}: column {column!r} has {len(found)} different values in {count} rows: no label. "
            f"The columns are: {columns}. Name the label column (--label-column)."
        )


def _few(labels: Iterable[str], limit: int = 8) -> str:
    names = list(labels)
    return ", ".join(map(repr, names[:limit])) + (f", ... {len(names)} in all" if len(names) > limit else "")
