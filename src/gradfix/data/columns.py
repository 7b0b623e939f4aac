"""From raw columns to rows: which column is the input, which is the label, and is every value usable.

Labels are strings until a task maps them. A value that cannot be used stops the load with its file and line,
before any model is touched."""

from __future__ import annotations

import difflib
import math
import shlex
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from gradfix.data.rows import INPUTS, Row
from gradfix.errors import DataError, UsageError

UNLABELLED = -100
KINDS = ("text", "image", "messages", "prompt")  # looked for in this order
PAIR = ("query", "positive")  # a search and what it should find; `negatives` beside them are what it should not
GRADE = "grade"  # how alike the two texts of a pair are, by a person


class ColumnNames(TypedDict, total=False):
    """The fields of `Columns`, as keywords."""

    label_column: str | None
    text_column: str | Sequence[str] | None
    image_column: str | None
    text_template: str | None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the input and the label stand; `None` means the usual name."""

    label_column: str | None = None
    text_column: str | Sequence[str] | None = None
    image_column: str | None = None
    text_template: str | None = None

    def or_else(self, other: Columns) -> Columns:
        """Fill the gaps from `other`."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **given)


@dataclass(frozen=True)
class ColumnPlan:
    """The columns of one table, resolved."""

    kind: str
    inputs: tuple[str, ...]
    label: str | None
    template: str | None = None
    may_pair: bool = False  # nobody named a text column: a `text_pair` beside `text` belongs to it
    answered: bool = True  # a row without a label must hold its answer itself


def plan_columns(
    columns: Sequence[str], asked: Columns, where: str, labelled: bool = True, bare: bool = False
) -> ColumnPlan:
    """Decide which columns are used; every missing one is an error that lists what is there.

    `bare` texts, without a label, are for tasks that need none."""
    kind, inputs = _inputs(columns, asked, where)
    pair = inputs == ("text",) and asked.text_column is None
    if not labelled:
        return ColumnPlan(kind, inputs, None, asked.text_template, pair, answered=False)
    label = asked.label_column or "label"
    if label not in columns:
        # Instruction data and pairs carry their answer with them; only an asked-for label is missed.
        if asked.label_column is None and (kind in ("messages", "prompt", "pair") or bare or GRADE in columns):
            return ColumnPlan(kind, inputs, None, asked.text_template, pair)
        raise DataError(_missing(label, columns, where, "label"))
    return ColumnPlan(kind, inputs, label, asked.text_template, pair)


def _inputs(columns: Sequence[str], asked: Columns, where: str) -> tuple[str, tuple[str, ...]]:
    if asked.text_template is not None:
        return "text", ()
    if asked.text_column is not None:
        names = (asked.text_column,) if isinstance(asked.text_column, str) else tuple(asked.text_column)
        if not 1 <= len(names) <= 2:
            raise UsageError("a text column is one name or a pair; use a text template to join more.")
        return "text", tuple(_present(name, columns, where, "text") for name in names)
    if asked.image_column is not None:
        return "image", (_present(asked.image_column, columns, where, "image"),)
    for kind in KINDS:
        if kind in columns:
            return kind, (kind,)
    if PAIR[0] in columns:
        return "pair", tuple(name for name in PAIR if name in columns)
    raise DataError(_missing("text", columns, where, "text"))


def _present(name: str, columns: Sequence[str], where: str, role: str) -> str:
    if name not in columns:
        raise DataError(_missing(name, columns, where, role))
    return name


def _missing(name: str, columns: Sequence[str], where: str, role: str) -> str:
    near = difflib.get_close_matches(name, list(columns), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(map(repr, columns)) or "none"
    return f"{where} has no column {name!r}; the columns are: {listed}.{hint} Name the {role} column (--{role}-column)."


def make_row(
    raw: Mapping[str, Any], where: str, plan: ColumnPlan, names: Sequence[str] | None, home: Path | None
) -> Row:
    """Check one row and give its columns the names the tasks use.

    A column that only happens to be called like an input is left out: no task and no content hash sees it."""
    row = {key: value for key, value in raw.items() if key != plan.label and key not in INPUTS}
    if plan.template is not None:
        row["text"] = _filled(plan.template, raw, where)
    elif plan.kind in ("text", "pair"):
        row |= _texts(raw, plan, where)
        if plan.label is None and "text_pair" in row:
            row |= _beside(raw, where)
    elif plan.kind == "image":
        row["image"] = _image(raw.get(plan.inputs[0]), where, home)
    elif plan.kind == "messages":
        row["messages"] = _messages(raw.get("messages"), where, answered=plan.label is None and plan.answered)
    else:
        row["prompt"] = _text(raw.get("prompt"), "prompt", where)
        if plan.label is None and plan.answered:
            if "completion" not in raw:
                there = ", ".join(map(repr, raw))
                raise DataError(
                    f"{where}: there is no answer: the columns are {there}. Call the answer's column completion, or name it "
                    "by --label-column where answers come from a closed set."
                )
            row["completion"] = _text(raw["completion"], "completion", where)
    if plan.label is not None:
        row["label"] = label_text(raw.get(plan.label), names, where)
    return Row(row, where)


def _texts(raw: Mapping[str, Any], plan: ColumnPlan, where: str) -> dict[str, str]:
    """The text and, of two columns, its pair; a pair that nobody named may be missing."""
    found = {key: _text(raw.get(name), name, where) for key, name in zip(("text", "text_pair"), plan.inputs)}
    pair = raw.get("text_pair")
    if plan.may_pair and not _is_blank(pair):
        if not isinstance(pair, str):
            raise DataError(
                f"{where}: column 'text_pair' holds {type(pair).__name__}, not text. "
                "Name the text column (--text-column text) to leave it out."
            )
        found["text_pair"] = _unicode(pair, "text_pair", where)
    return found


def _beside(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What else a pair may bring: texts that should not be found, and a grade."""
    found: dict[str, Any] = {}
    negatives = raw.get("negatives")
    if not _is_blank(negatives):
        listed = [negatives] if isinstance(negatives, str) else negatives
        if not isinstance(listed, (list, tuple)):
            raise DataError(f"{where}: 'negatives' must be a text or a list of texts.")
        found["negatives"] = [_text(one, "negatives", where) for one in listed]
    if not _is_blank(raw.get(GRADE)):
        try:
            found[GRADE] = float(raw[GRADE])
        except (TypeError, ValueError):
            raise DataError(f"{where}: the grade {raw[GRADE]!r} is no number.") from None
        if not math.isfinite(found[GRADE]):
            raise DataError(f"{where}: the grade is not finite.")
    return found


def label_text(value: Any, names: Sequence[str] | None, where: str) -> str | None:
    """The label as a string; None where there is none: empty, null, -100, or -1 among named classes."""
    if _is_missing(value) or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if str(value) == str(UNLABELLED):
        return None
    if isinstance(value, str) and value.strip().isdigit() and names is not None and value not in names:
        value = int(value)
    if isinstance(value, int) and names is not None:
        if value == -1:
            return None
        if not 0 <= value < len(names):
            raise DataError(f"{where}: label {value} is outside the {len(names)} named classes; the first is 0.")
        return names[value]
    if not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: the label is {type(value).__name__}; a label is a string or a number.")
    return _unicode(str(value), "label", where)


def by_number(names: Iterable[str], limit: int = 4) -> str:
    """The way out where labels are numbers and classes have names."""
    shown = list(names)
    listed = " ".join(shlex.quote(str(name)) for name in shown[:limit]) + (" ..." if len(shown) > limit else "")
    return f"Say which class each number is, 0 first, by --label-names (in the order you mean: {listed})."


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_blank(value: Any) -> bool:
    return _is_missing(value) or (isinstance(value, str) and not value.strip())


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text.")
    if not value.strip():
        raise DataError(f"{where}: column {column!r} is empty. Fill it in or remove the row.")
    return _unicode(value, column, where)


def _unicode(value: str, column: str, where: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: column {column!r} is not valid Unicode (half a surrogate pair).") from None
    return value


def _filled(template: str, raw: Mapping[str, Any], where: str) -> str:
    """Column names in braces and nothing else: a template may come with the data, and formats such as
    `{text:>999999999}` or `{text.__class__}` are not for strangers."""
    try:
        for _, name, form, conversion in string.Formatter().parse(template):
            if form or conversion or any(sign in (name or "") for sign in ".["):
                raise ValueError(f"use plain column names, not {name!r} with a format")
            if name and _is_missing(raw[name]):
                raise DataError(f"{where}: column {name!r} is empty (null). Fill it in or remove the row.")
        return _text(template.format_map(raw), "text", where)
    except KeyError as error:
        raise DataError(_missing(str(error.args[0]), list(raw), where, "text")) from None
    except DataError:  # a ValueError, too, but of the row, not of the template
        raise
    except (ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"the text template {template!r} cannot be filled ({error}).") from None


def _image(value: Any, where: str, home: Path | None) -> Any:
    if value is None or value == "":
        raise DataError(f"{where}: there is no image.")
    if isinstance(value, str) and home is not None:
        path = home / value
        if not path.is_file():
            raise DataError(f"{where}: the image {value} does not exist (looked in {home}).")
        return path
    return value


def _messages(value: Any, where: str, *, answered: bool) -> list[dict[str, str]]:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{where}: 'messages' must be a list of turns with a role and a content.")
    turns = []
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise DataError(f"{where}: every turn of 'messages' needs a role and a content.")
        turns.append({"role": turn["role"], "content": _text(turn.get("content"), "content", where)})
    if answered and turns[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last turn is {turns[-1]['role']!r}; the answer must be the assistant's.")
    return turns
