"""The tokenizer of a merged model and the rows of its token tables: every token's row by its string, in every input.

A token that an input lacks takes the base's row there, or the row of the only model that has it, or the mean of those
that have it. Nothing of a tokenizer is run but the tokenizers library itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.adapter import base_config
from gradfix.checkpoints.matched import TOKENIZER_FILES, MatchedRows, folder_of
from gradfix.checkpoints.weights import Checkpoint
from gradfix.errors import CorruptInput, UsageError
from gradfix.merging.grammar import Document, ModelRef, TokenizerRequest, TokenSource

ABSENT = -1


class FilledRows(MatchedRows):
    """A checkpoint whose token tables have other rows, some of them given here."""

    def __init__(
        self, whole: Checkpoint, rows: Mapping[str, Tensor], filled: Mapping[str, Mapping[int, Tensor]]
    ) -> None:
        super().__init__(whole, rows)
        self.filled = filled

    def span(self, name: str, first: int, count: int) -> Tensor:
        found = super().span(name, first, count)
        if name not in self.filled or not self.filled[name]:
            return found
        info = self.info(name)
        width = info.numel // max(info.shape[0], 1)
        for row in range(first // width, -(-(first + count) // width)):
            if row in self.filled[name]:
                start, stop = max(row * width, first), min((row + 1) * width, first + count)
                part = self.filled[name][row].reshape(-1)[start - row * width : stop - row * width]
                found[start - first : stop - first] = part.to(found.dtype)
        return found

    def identity(self) -> Any:
        whole = super().identity()
        return None if whole is None else [whole, {n: sorted(rows) for n, rows in self.filled.items()}]


@dataclass(frozen=True)
class Tokens:
    """The output's tokenizer: token -> row, every input's own rows, and the height of the tables."""

    vocabulary: Mapping[str, int]
    places: Mapping[ModelRef, Tensor]  # row of the output -> row of the input, or -1
    own: Mapping[ModelRef, Mapping[str, int]]
    request: TokenizerRequest
    base: ModelRef
    tokenizer: Any = field(repr=False)
    height: int = 0

    def save(self, staging: Path) -> None:
        for file in staging.iterdir():
            if file.name in TOKENIZER_FILES or file.name in (
                "special_tokens_map.json",
                "added_tokens.json",
                "merges.txt",
            ):
                file.unlink()
        self.tokenizer.save_pretrained(staging)

    def shown(self, tables: Mapping[ModelRef, Checkpoint], name: str) -> dict[ModelRef, FilledRows]:
        """The inputs of one token table, each with the output's rows."""
        rows = {model: self.places[model].clone() for model in tables}
        filled: dict[ModelRef, dict[int, Tensor]] = {model: {} for model in tables}
        for token, row in self.vocabulary.items():
            asked = self.request.tokens.get(token)
            forced = asked is not None and asked.force
            lacking = [model for model in tables if forced or int(rows[model][row]) == ABSENT]
            if lacking:
                default = self._default(tables, name, token, row, asked)
                for model in lacking:
                    rows[model][row] = ABSENT
                    filled[model][row] = default
        views = {
            model: FilledRows(table, {name: rows[model]}, {name: filled[model]}) for model, table in tables.items()
        }
        if self.height > len(self.vocabulary):
            for model, view in views.items():
                mean = view.read(name)[: len(self.vocabulary)].float().mean(0)
                filled[model] |= dict.fromkeys(range(len(self.vocabulary), self.height), mean)
        return views

    def _default(
        self, tables: Mapping[ModelRef, Checkpoint], name: str, token: str, row: int, asked: TokenSource | None
    ) -> Tensor:
        """The row of a token where an input has none of its own."""
        having = [model for model in tables if int(self.places[model][row]) != ABSENT]
        width = next(iter(tables.values())).info(name).shape[1:]
        if asked is not None and (asked.zero or asked.model is not None):
            if asked.zero or asked.model is None:
                return torch.zeros(width)
            if asked.model not in tables:
                raise UsageError(f"token {token!r} is to come from {asked.model}, which is no input of {name!r}.")
            return _row(tables[asked.model], name, self._place(asked, token, row))
        if not having:
            return torch.zeros(width)
        if self.base in having:
            having = [self.base]
        rows = [_row(tables[model], name, int(self.places[model][row])) for model in having]
        return torch.stack([one.float() for one in rows]).mean(0) if len(rows) > 1 else rows[0]

    def _place(self, asked: TokenSource, token: str, row: int) -> int:
        assert asked.model is not None
        if asked.token is None:
            place = int(self.places[asked.model][row])
        elif isinstance(asked.token, int):
            place = asked.token
        else:
            place = self.own[asked.model].get(asked.token, ABSENT)
        if place == ABSENT:
            raise UsageError(f"{asked.model} has no token {asked.token or token!r} to take the row of {token!r} from.")
        return place


def _row(table: Checkpoint, name: str, place: int) -> Tensor:
    info = table.info(name)
    width = info.numel // max(info.shape[0], 1)
    if not 0 <= place < info.shape[0]:
        raise UsageError(f"{table} has {info.shape[0]} rows in {name!r}, and row {place} is asked for.")
    return table.span(name, place * width, width).view(info.shape[1:])


def settle_tokens(document: Document, models: Mapping[ModelRef, Checkpoint]) -> Tokens | None:
    """The tokenizer that the document asks for, and where every input has its tokens."""
    request = document.tokenizer
    if request is None:
        return None
    base = document.base or document.models()[0]
    loaded = {model: _load(models[model], model) for model in models}
    if loaded[base] is None:
        raise UsageError(f"{document.where}: {base} has no tokenizer to start from.")
    sizes = {model: base_config(models[model]).get("vocab_size") for model in models}
    first = _stripped(loaded[base], sizes[base], base)
    tokenizers = {model: first if model == base else (tokenizer or first) for model, tokenizer in loaded.items()}
    if request.source == "base":
        chosen = first
    elif request.source == "union":
        chosen = _union(first, tokenizers, sizes)
    else:
        chosen = loaded.get(request.source) or _load_from(str(request.source))  # type: ignore[arg-type]
    known = chosen.get_vocab()
    chosen.add_tokens([token for token in request.tokens if token not in known])
    vocabulary = dict(chosen.get_vocab())
    height, step = len(vocabulary), request.pad_to_multiple_of or 1
    height = -(-height // step) * step
    own = {model: dict(tokenizer.get_vocab()) for model, tokenizer in tokenizers.items()}
    places = {model: _places(vocabulary, own[model], sizes[model], height) for model in models}
    return Tokens(vocabulary, places, own, request, base, chosen, height)


def _places(vocabulary: Mapping[str, int], own: Mapping[str, int], size: int | None, height: int) -> Tensor:
    places = torch.full((height,), ABSENT)
    for token, row in vocabulary.items():
        place = own.get(token, ABSENT)
        places[row] = place if size is None or place < size else ABSENT
    return places


def _load(checkpoint: Checkpoint, model: ModelRef) -> Any:
    if checkpoint.path is None:
        return None
    folder = folder_of(checkpoint.path)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    return _load_from(folder)


def _load_from(folder: str | Path) -> Any:
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise CorruptInput(f"the tokenizer in {folder} cannot be read ({type(error).__name__}). Repair it.") from None


def _stripped(tokenizer: Any, size: int | None, model: ModelRef) -> Any:
    """Without tokens that the model's table has no row for."""
    beyond = {token for token, row in tokenizer.get_vocab().items() if size is not None and row >= size}
    if not beyond:
        return tokenizer
    inner = getattr(tokenizer, "_tokenizer", None)
    content = json.loads(inner.to_str()) if inner is not None else {}
    if content.get("model", {}).get("type") != "BPE":
        raise UsageError(
            f"{model} has {len(beyond)} tokens without a row, and its tokenizer cannot be cut; give another."
        )
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] not in beyond]
    body = content["model"]
    body["vocab"] = {token: row for token, row in body["vocab"].items() if token not in beyond}
    body["merges"] = [
        pair for pair in body["merges"] if not beyond & set(pair.split(" ") if isinstance(pair, str) else pair)
    ]
    from tokenizers import Tokenizer

    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def _union(first: Any, tokenizers: Mapping[ModelRef, Any], sizes: Mapping[ModelRef, int | None]) -> Any:
    """The base's tokens, then what the others have and it lacks: ordinary tokens first, added ones behind them."""
    known = set(first.get_vocab())
    plain: dict[str, None] = {}
    added: dict[str, Any] = {}
    for model, tokenizer in tokenizers.items():
        size = sizes[model]
        extra = {info.content: (row, info) for row, info in tokenizer.added_tokens_decoder.items()}
        for token, row in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
            if (size is not None and row >= size) or token in known:
                continue
            if token in extra:
                added.setdefault(token, extra[token][1])
            else:
                plain.setdefault(token)
    first.add_tokens(list(plain))
    first.add_tokens(list(added.values()))
    return first
