"""Base and fine-tune as the target would have them: its names, its token rows.

`BertModel` writes `embeddings...`, `BertForSequenceClassification` writes `bert.embeddings...`: one model, saved
with and without a head, is shown under the target's prefix. And two releases may give the same token different
rows: an extended table, a reordered one, padding. Then a task vector must not be added row by row. Where both sides
come with a tokenizer, base and fine-tune are presented in the target's row order; rows of tokens that they do not
share hold zeros in both, so nothing is moved there, and they are counted.

Where the target has other layers, widths or tokens altogether, nothing is matched; `another_shape` says so. A tensor
that is merely missing is no other shape but a fault, and is left to the account of the trio."""

from __future__ import annotations

import filecmp
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from gradfix.checkpoints.weights import CHUNK, Checkpoint, Renamed
from gradfix.errors import CorruptInput, IncompatibleCheckpoints

TOKEN_TABLE = re.compile(
    r"(^|\.)(embed_tokens|embed_in|embed_out|wte|word_embeddings|tok_embeddings|tokens_embed|token_embedding|shared"
    r"|lm_head|predictions\.decoder)\.(weight|bias)$|(^|\.)predictions\.bias$"
)
OUTPUT_TABLES = ("lm_head", "embed_out", "predictions.decoder")
TOKENIZER_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tokenizer_config.json",
)  # fmt: skip
LEAST_SHARED = 0.5
LAYER = re.compile(r"^(?P<before>.*?(layers?|blocks?|h|resblocks|transformer\.layer))\.(?P<i>\d+)\.(?P<inside>.+)$")


def is_output_table(name: str) -> bool:
    """Whether a token table turns states into scores, at the model's end, and not tokens into states."""
    return any(part in name for part in OUTPUT_TABLES)


def match_prefix(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or a view of it under the target's prefix where that makes most names agree."""
    goal = set(target.names())
    names = checkpoint.names()
    if len(goal & set(names)) * 2 > len(names):
        return checkpoint
    for prefix in (_common(target.names()), _common(names)):
        added = {f"{prefix}.{name}": name for name in names}
        removed = {name.removeprefix(f"{prefix}."): name for name in names}
        for renamed in (added, removed):
            if prefix and len(goal & set(renamed)) * 2 > len(names):
                return Renamed(checkpoint, renamed)
    return checkpoint


def _common(names: list[str]) -> str:
    """The first name part that most tensors share, or nothing."""
    parts = Counter(name.split(".", 1)[0] for name in names if "." in name)
    return next((part for part, count in parts.most_common(1) if count * 2 > len(names)), "")


@dataclass(frozen=True)
class RowMatch:
    """For every row of the target's table, the base's and the fine-tune's row of the same token, or -1."""

    base: Tensor
    tuned: Tensor

    @property
    def matched(self) -> int:
        return int((self.base >= 0).sum())

    @property
    def untouched(self) -> int:
        return len(self.base) - self.matched

    @property
    def moved(self) -> int:
        """Matched rows that stand elsewhere in the base."""
        return int(((self.base >= 0) & (self.base != torch.arange(len(self.base)))).sum())


class MatchedRows(Renamed):
    """A checkpoint whose token tables are shown with other rows."""

    def __init__(
        self,
        whole: Checkpoint,
        rows: Mapping[str, Tensor],
        counts: Mapping[str, dict[str, int]] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(whole, {name: name for name in whole.names()})
        self.rows, self.counts, self.notes = dict(rows), dict(counts or {}), (*whole.notes, *notes)

    def info(self, name: str) -> TensorInfo:
        info = self.whole.info(name)
        return TensorInfo((len(self.rows[name]), *info.shape[1:]), info.dtype) if name in self.rows else info

    def read(self, name: str) -> Tensor:
        return Checkpoint.read(self, name) if name in self.rows else self.whole.read(name)

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        if name in self.rows:
            return Checkpoint.chunks(self, name, elements)
        return self.whole.chunks(name, elements)

    def span(self, name: str, first: int, count: int) -> Tensor:
        """Consecutive entries, gathered from runs of neighbouring rows; memory stays at one piece."""
        if name not in self.rows:
            return self.whole.span(name, first, count)
        info = self.info(name)
        width = info.numel // max(info.shape[0], 1)
        top, bottom = first // width, -(-(first + count) // width)
        out = torch.zeros((bottom - top) * width, dtype=info.dtype)
        for place, row, length in _runs(self.rows[name][top:bottom].tolist()):
            piece = self.whole.span(name, row * width, length * width)
            out[place * width : (place + length) * width] = piece
        return out[first - top * width :][:count]

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        return None if name in self.rows else self.whole.stored(name)

    def identity(self) -> Any:
        whole = self.whole.identity()
        return None if whole is None else [whole, {name: rows.tolist() for name, rows in self.rows.items()}]


def _runs(rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place, first row, length) of each stretch of consecutive rows; -1 is no row."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place < len(rows) and rows[start] >= 0 and rows[place] == rows[place - 1] + 1:
            continue
        if rows[start] >= 0:
            yield start, rows[start], place - start
        start = place


def match_rows(
    base: Mapping[str, int], tuned: Mapping[str, int], target: Mapping[str, int], rows: tuple[int, int, int]
) -> RowMatch:
    """Match by token string; `rows` are the heights of the three tables, which may be padded beyond the tokens."""
    before, after = torch.full((rows[2],), -1), torch.full((rows[2],), -1)
    for token, place in target.items():
        left, right = base.get(token, -1), tuned.get(token, -1)
        if 0 <= place < rows[2] and 0 <= left < rows[0] and 0 <= right < rows[1]:
            before[place], after[place] = left, right
    return RowMatch(before, after)


def match_vocabulary(
    base: Checkpoint, tuned: Checkpoint, target: Checkpoint
) -> tuple[Checkpoint, Checkpoint, dict[str, Any]]:
    """Base and fine-tune with the target's token rows, and counts for the manifest; as given when nothing differs.

    Without tokenizers on both sides nothing is changed: tables of different heights are then an error of the
    preflight. Calling it twice changes nothing."""
    if isinstance(base, MatchedRows):
        return base, tuned, {"vocabulary": base.counts}
    tables = _tables(base, tuned, target)
    if not tables:
        return base, tuned, {}
    same_rows = all(_rows(c, name) == _rows(target, name) for c in (base, tuned) for name in tables)
    if same_rows and same_tokenizer(base, target) and not _has_other_tokenizer(tuned, target):
        return base, tuned, {}
    before, goal = read_vocabulary(base.path), read_vocabulary(target.path)
    if before is None or goal is None:
        return base, tuned, {}
    after = read_vocabulary(tuned.path) or before
    if same_rows and before == goal == after:
        return base, tuned, {}
    _refuse_strangers(base, target, before, goal)
    matches = {
        name: match_rows(before, after, goal, (_rows(base, name), _rows(tuned, name), _rows(target, name)))
        for name in tables
    }
    widest = max(matches.values(), key=lambda match: len(match.base))
    note = (
        f"token rows matched by token: {widest.matched} of {len(widest.base)} found in the base ({widest.moved} at "
        f"another place), {widest.untouched} left untouched"
    )
    counts = {name: {"matched": m.matched, "moved": m.moved, "untouched": m.untouched} for name, m in matches.items()}
    shown_base = MatchedRows(base, {name: match.base for name, match in matches.items()}, counts, (note,))
    shown_tuned = MatchedRows(tuned, {name: match.tuned for name, match in matches.items()})
    return shown_base, shown_tuned, {"vocabulary": counts}


def _tables(base: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> list[str]:
    """Token tables by name and height: a layer that only sounds like one is not as high as the embedding."""
    found = [n for n in target.names() if TOKEN_TABLE.search(n) and n in base and n in tuned]
    for checkpoint in (base, target):
        height = max((_rows(checkpoint, name) for name in found), default=0)
        found = [name for name in found if _rows(checkpoint, name) == height]
    return found


def _rows(checkpoint: Checkpoint, name: str) -> int:
    shape = checkpoint.info(name).shape
    return shape[0] if shape else 0


def strangers(before: Mapping[str, int], goal: Mapping[str, int]) -> bool:
    """Whether two vocabularies share so little that one is not the other, extended or reordered."""
    return len(before.keys() & goal.keys()) < LEAST_SHARED * min(len(before), len(goal))


def _refuse_strangers(base: Checkpoint, target: Checkpoint, before: Mapping[str, int], goal: Mapping[str, int]) -> None:
    if strangers(before, goal):
        shared = len(before.keys() & goal.keys())
        raise IncompatibleCheckpoints(
            f"the tokenizers of {base} and {target} share {shared} of {len(before)} and {len(goal)} tokens: these are "
            "different vocabularies, not an extended or reordered one. Choose a target with the base's tokenizer."
        )


def same_tokenizer(base: Checkpoint, target: Checkpoint) -> bool:
    """Quick: the very same tokenizer file on both sides."""
    if base.path is None or target.path is None:
        return False
    ours, theirs = folder_of(base.path) / "tokenizer.json", folder_of(target.path) / "tokenizer.json"
    return ours.is_file() and theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)


def _has_other_tokenizer(tuned: Checkpoint, target: Checkpoint) -> bool:
    """A fine-tune often comes without one, or with a copy."""
    if tuned.path is None or not (folder_of(tuned.path) / "tokenizer.json").is_file():
        return False
    return not same_tokenizer(tuned, target)


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def read_vocabulary(path: Path | None) -> dict[str, int] | None:
    """Token -> row from the tokenizer beside the weights, or None when there is none."""
    if path is None:
        return None
    folder = folder_of(path)
    present = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
    if not present:
        return None
    if present[0] == "tokenizer.json":
        return _fast_vocabulary(folder / "tokenizer.json")
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import AutoTokenizer

    try:
        return dict(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab())
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise CorruptInput(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}). Repair it, or remove the tokenizer "
            "files if the token tables need no matching."
        ) from None


def _fast_vocabulary(file: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_str(file.read_text(encoding="utf-8")).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare Exception for every malformed file
        reason = " ".join(str(error).split())[:120]
        raise CorruptInput(f"{file} is not a readable tokenizer ({reason}). Download it again.") from None


def depths(names: Iterable[str]) -> dict[str, int]:
    """Number of layers by the name before the layer's number."""
    found: dict[str, int] = {}
    for name in names:
        match = LAYER.match(name)
        if match is not None:
            found[match["before"]] = max(found.get(match["before"], 0), int(match["i"]) + 1)
    return found


def another_shape(base: Checkpoint, target: Checkpoint) -> str | None:
    """In what the target's shape is another than the base's; None where weight can be added to weight."""
    base = match_prefix(base, target)
    goal = set(target.names())
    shared = [name for name in base.names() if name in goal]
    ours, theirs = depths(base.names()), depths(target.names())
    for stack, count in ours.items():
        if stack in theirs and theirs[stack] != count:
            return f"{theirs[stack]} layers instead of {count} under {stack!r}"
    if len(shared) * 2 < len(base.names()) and ours and theirs:
        return "another architecture: most of the weights go by other names"
    for name in shared:
        before, after = base.info(name).shape, target.info(name).shape
        if LAYER.match(name) and len(before) == len(after) == 2 and before != after:
            return f"{name!r} is {list(before)} in {base} and {list(after)} in {target}"
    return _another_vocabulary(base, target)


def _another_vocabulary(base: Checkpoint, target: Checkpoint) -> str | None:
    """Two tokenizers with fewer than half of their tokens in common."""
    tables = [name for name in base.names() if TOKEN_TABLE.search(name) and name in target]
    if not tables or base.path is None or target.path is None or same_tokenizer(base, target):
        return None
    if folder_of(base.path) == folder_of(target.path):
        return None
    before, after = read_vocabulary(base.path), read_vocabulary(target.path)
    if before is None or after is None or not strangers(before, after):
        return None
    return f"another vocabulary: {len(before.keys() & after.keys())} of {len(before)} tokens in common"
