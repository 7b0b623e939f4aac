"""What examples give to a model (texts, images, tokens), and the tasks that answer in words."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from gradfix.data.rows import where
from gradfix.errors import CorruptInput, DataError, UsageError
from gradfix.registry import unknown
from gradfix.system.modules import device_room, offloaded
from gradfix.tasks.base import Batch, Bound, Example, Prompts, Task
from gradfix.tasks.loading import freeze_all_but, load_pretrained, load_tokenizer, locate, quiet_transformers

LONGEST = 512  # tokens, where neither the user nor the model says otherwise
UNLIMITED = 10**6  # tokenizers write an absurd number where they know no limit
LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
LOSSES = ("mean", "sum")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
SCORED = 28  # bytes for a token that may be the next: its score, copies, and sums in float64
Tokens = Sequence[int]


def column(examples: Sequence[Example], name: str) -> list[Any]:
    """One column of all examples; a missing value is an error."""
    for index, example in enumerate(examples):
        if example.get(name) is None:
            raise DataError(
                f"{where(example, index)}: this task needs the column {name!r}. If the data has one, name it "
                "(--text-column, --image-column)."
            )
    return [example[name] for example in examples]


class TokenLimit:
    """How many tokens a text may have, and which of the texts seen so far had more."""

    def __init__(self, length: int, what: str = "texts") -> None:
        self.length, self.what = length, what
        self._seen: set[int] = set()
        self._cut: set[int] = set()

    def saw(self, text: object, cut: bool) -> None:
        key = hash(text)
        self._seen.add(key)
        if cut:
            self._cut.add(key)

    def count(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, width: int) -> None:
        """Look at texts that became `width` tokens wide; only those that fill the limit are measured again."""
        lengths = [0] * len(texts)
        if width >= self.length:
            with quiet_transformers():  # it would warn of what is counted here
                lengths = [len(row) for row in tokenizer(texts, pairs)["input_ids"]]
        for place, length in enumerate(lengths):
            self.saw((texts[place], pairs[place] if pairs else None), length > self.length)

    def notes(self) -> tuple[str, ...]:
        if not self._cut:
            return ()
        return (f"{len(self._cut)} of {len(self._seen)} {self.what} were cut at {self.length} tokens",)


def tokenise(tokenizer: Any, examples: Sequence[Example], limit: TokenLimit, model: Any) -> Batch:
    """Texts, or pairs of texts, padded to the longest of the batch on the right; the mask hides the padding."""
    texts = column(examples, "text")
    pairs = column(examples, "text_pair") if any(e.get("text_pair") for e in examples) else None
    read = tokenizer(texts, pairs, padding=True, truncation=True, max_length=limit.length)
    tokens = {name: torch.tensor(rows) for name, rows in read.items()}  # transformers takes three times as long to
    limit.count(tokenizer, texts, pairs, tokens["input_ids"].shape[1])
    refuse_foreign_tokens(tokens["input_ids"], tokenizer, model)
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in tokens.items()}


def same_tokenizer_files(first: Any, second: Any) -> bool:
    """Whether two tokenizers were read from files with the same bytes; False where they cannot be found."""
    folders = [Path(str(tokenizer.name_or_path)) for tokenizer in (first, second)]
    if not all((folder / "tokenizer.json").is_file() for folder in folders):
        return False
    ours, theirs = (
        [path.read_bytes() if (path := folder / name).is_file() else None for name in TOKENIZER_FILES]
        for folder in folders
    )
    return ours == theirs


def processed(processor: Any, examples: Sequence[Example], model: Any) -> Batch:
    """Pictures through transformers' own image processor, as the model's weights are."""
    with quiet_transformers():
        pixels = processor(images=column(examples, "image"), return_tensors="pt")["pixel_values"]
    reference = next(model.parameters())
    return {"pixel_values": pixels.to(device=reference.device, dtype=reference.dtype)}


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean vector of each text over the tokens that the mask shows."""
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def refuse_foreign_tokens(ids: Tensor, tokenizer: Any, model: Any) -> None:
    """A token without an embedding ends a process on some devices; here it is an error that names the folder."""
    rows = model.get_input_embeddings().weight.shape[0]
    if ids.numel() and int(ids.max()) >= rows:
        raise CorruptInput(
            f"the tokenizer of {tokenizer.name_or_path} knows token {int(ids.max())}, but the model has {rows} rows "
            "of embeddings: it belongs to another model. Put the model's own tokenizer files there."
        )


def longest(asked: int | None, tokenizer: Any, model: Any) -> int:
    """How many tokens a text may have: the asked-for number, or what the model itself can hold, whichever is less."""
    limits = [limit for limit in (tokenizer.model_max_length, *_positions(model)) if 0 < limit < UNLIMITED]
    if asked is not None:
        limits.append(asked)
    return int(min(limits, default=LONGEST))


def _positions(model: Any) -> list[int]:
    """How many tokens the config and the embeddings of positions allow for."""
    config = model.config
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    told = [getattr(one, name, None) for one in configs for name in LIMITS]
    found = [limit for limit in told if isinstance(limit, int)]
    for name, module in model.named_modules():
        # RoBERTa and its kin number positions from behind the padding token's.
        shifted = name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        if shifted:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return found


def pad(sequences: Sequence[Sequence[int]], value: int, left: bool = False) -> Tensor:
    width = max(map(len, sequences))
    rows = [[value] * (width - len(s)) + list(s) if left else list(s) + [value] * (width - len(s)) for s in sequences]
    return torch.tensor(rows, dtype=torch.long)


@dataclass(frozen=True)
class Posed:
    """A question as tokens, and the tokens that close an answer to it."""

    question: list[int]
    closing: list[int]


class AnswerBound(Bound):
    """A generating model, its tokenizer and the texts of its labels."""

    model: Any

    def __init__(
        self, model: Any, tokenizer: Any, labels: Mapping[str, str], loss: str, scoring: str, max_length: int
    ) -> None:
        self.model, self.tokenizer, self.max_length = model, tokenizer, max_length
        self.labels, self.texts = list(labels), list(labels.values())
        self.reduction, self.scoring = loss, scoring
        self._index = {label: index for index, label in enumerate(self.labels)}
        self.limit = TokenLimit(max_length)
        self._unnamed: int | None = None  # a token that ends answers, and that `generate` knows nothing of
        freeze_all_but(model, self.trainable())

    def cuts(self) -> tuple[str, ...]:
        if self._unnamed is None:
            return self.limit.notes()
        word = self.tokenizer.convert_ids_to_tokens(self._unnamed)
        return (
            *self.limit.notes(),
            f"answers end with {word!r} ({self._unnamed}), where the model's generation_config.json does not stop: add it to "
            "eos_token_id there, or give it to generate",
        )

    @property
    def open_answers(self) -> bool:
        """Whether any text may be the answer: there is no label set."""
        return not self.labels

    def posed(self, example: Example, index: int = 0) -> Posed:
        """The question of an example as tokens; its answer is not read."""
        raise NotImplementedError

    def answer_text(self, example: Example, index: int = 0) -> str:
        """The reference answer of an example."""
        if "messages" in example:
            return str(example["messages"][-1]["content"])
        if not isinstance(example.get("completion"), str):
            raise DataError(f"{where(example, index)}: there is a prompt, but no completion and no label set.")
        return str(example["completion"])

    def answer_ids(self, text: str) -> list[int]:
        """An answer as tokens, without what closes it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def spoken_logits(self, model: Any, questions: Sequence[Tokens], answers: Sequence[Tokens]) -> Tensor:
        """Scores of the next token at every token of the answers, one answer after the other: (tokens, vocabulary)."""
        raise NotImplementedError

    def room(self, question: Tokens, wanted: int) -> tuple[list[int], int]:
        """The question as far as it fits beside an answer of `wanted` tokens, and the tokens left for the answer."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """How many tokens an answer may have, what closes it included."""
        return UNLIMITED

    def beside(self, question: Tokens, answer: Tokens) -> list[int]:
        """The question as far as it fits beside this very answer."""
        return self.room(question, 1)[0]

    def stops(self, closing: Tokens) -> list[int]:
        """Tokens that end an answer: the first special one of the template's closing, and those the model names.

        A tokenizer may hold a special token that it has no name for, as Llama 3 does with the one that ends a turn."""
        special = {*self.tokenizer.all_special_ids}
        special |= {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        first = [token for token in closing if token in special][:1]
        if first and first[0] not in (named := self._named_stops()) and named:
            self._unnamed = first[0]
        found = [*first, self.tokenizer.eos_token_id, *self._named_stops()]
        return list(dict.fromkeys(int(token) for token in found if token is not None))

    def _named_stops(self) -> list[int]:
        """The tokens that the model's own `generate` stops at."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return [token for token in (named if isinstance(named, list) else [named]) if token is not None]

    def say(
        self, model: Any, posed: Sequence[Posed], longest: int, seeds: Sequence[int] | None = None
    ) -> list[tuple[list[int], bool]]:
        """What the model answers, as tokens, and whether it came to an end within `longest` tokens.

        Greedy without seeds; with one for each answer, drawn from the model's own probabilities. What stands beside an
        answer changes it by rounding only."""
        asked = [self.room(one.question, longest) for one in posed]
        longest = min(room for _, room in asked)
        stops = self.stops(posed[0].closing)
        questions = [question for question, _ in asked]
        device = next(model.parameters()).device
        padding = self.tokenizer.pad_token_id
        ids = pad(questions, padding, left=True).to(device)
        mask = pad([[1] * len(question) for question in questions], 0, left=True).to(device)
        drawing = [] if seeds is None else [_Lots(seeds, longest, device)]
        with quiet_transformers(), torch.no_grad():
            found = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=longest, num_beams=1, pad_token_id=padding,
                eos_token_id=stops, do_sample=False, temperature=None, top_p=None, top_k=None, logits_processor=drawing,
            )  # fmt: skip
        rows = self._new_tokens(found, ids.shape[1]).tolist()
        ends = [next((place for place, token in enumerate(row) if token in stops), None) for row in rows]
        return [(row[:end], end is not None) for row, end in zip(rows, ends, strict=True)]

    def at_once(self, asked: int, said: int, usual: int) -> int:
        """How many texts are written side by side. From disk every token reads all weights anew: there it is as many as
        half of the free memory holds."""
        if not offloaded(self.model):
            return usual
        first = next(self.model.parameters())
        each = writing_bytes(self.model.config, first.dtype, asked, said)
        return max(1, device_room(first.device) // 2 // each)

    def _new_tokens(self, found: Tensor, asked: int) -> Tensor:
        raise NotImplementedError

    def spell(self, tokens: Tokens) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class _Lots:
    """Draws the next token of every text by numbers of the text's own."""

    def __init__(self, seeds: Sequence[int], steps: int, device: torch.device) -> None:
        own = [torch.rand(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
        self.numbers = iter(torch.stack(own, 1)[..., None].to(device))

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        sums = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        drawn = torch.searchsorted(sums, next(self.numbers) * sums[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.clamp_(max=scores.shape[1] - 1), 0.0)


def seeds_of(what: str, seed: int, places: Iterable[int]) -> list[int]:
    """A seed for every text of a kind, known by its place."""
    return [zlib.crc32(f"{what} {seed} {place}".encode()) for place in places]


def writing_bytes(config: Any, dtype: torch.dtype, asked: int, said: int) -> int:
    """What one text takes while it is written: keys and values of its tokens in every layer (one more, while they are
    joined), what its question is read with, and the scores of the next token."""
    own = config.get_text_config()
    layers = getattr(own, "num_hidden_layers", None) or own.num_layers
    hidden = getattr(own, "hidden_size", None) or own.d_model
    inner = getattr(own, "intermediate_size", None) or getattr(own, "d_ff", None) or 4 * hidden
    heads = getattr(own, "num_attention_heads", None) or getattr(own, "num_heads", None) or 1
    width = getattr(own, "head_dim", None) or getattr(own, "d_kv", None) or hidden // heads
    cached = 2 * (layers + 1) * (asked + said) * width * (getattr(own, "num_key_value_heads", None) or heads)
    reading = asked * (3 * inner + 8 * hidden + asked)
    return int((cached + reading) * dtype.itemsize + own.vocab_size * SCORED)


def speaks(bound: Bound | None) -> TypeGuard[AnswerBound]:
    """Whether a model answers in words of its own choice."""
    return isinstance(bound, AnswerBound) and bound.open_answers


class AnswerTask(Task):
    """A generating model and the texts of its labels; subclasses name the loader and what it is bound to."""

    loader: ClassVar[str]
    bound: ClassVar[type[AnswerBound]]
    scorings: ClassVar[tuple[str, ...]]

    def __init__(
        self, labels: Mapping[str, Prompts], loss: str, scoring: str, max_length: int | None, trust_remote_code: bool
    ) -> None:
        if loss not in LOSSES:
            raise UsageError(unknown("loss", loss, list(LOSSES)))
        if scoring not in self.scorings:
            raise UsageError(unknown("scoring", scoring, list(self.scorings)))
        self.labels = dict(labels)
        self.texts = spelled_labels(labels)
        self.loss, self.scoring = loss, scoring
        self.max_length, self.trust_remote_code = max_length, trust_remote_code

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Load a model. Its answers are its own words; `head_from` is only another name for `base`."""
        import transformers

        under = head_from if base is None else base
        home = locate(source, under, dtype=dtype, device=device, trust_remote_code=self.trust_remote_code)
        tokenizer = load_tokenizer(home)
        loaded = load_pretrained(getattr(transformers, self.loader), home)
        length = longest(self.max_length, tokenizer, loaded.model)
        bound = type(self).bound(loaded.model, tokenizer, self.texts, self.loss, self.scoring, length)
        bound.source, bound.notes = home.source, loaded.notes
        return bound


def spelled_labels(labels: Mapping[str, Prompts]) -> dict[str, str]:
    """One text per label, all different."""
    texts: dict[str, str] = {}
    for label, text in labels.items():
        if not isinstance(text, str):
            raise UsageError(f"the label {label!r} has several texts; an answer needs exactly one.")
        if text in texts.values():
            raise UsageError(f"two labels share the text {text!r}; the answers could not be told apart.")
        texts[label] = text
    return texts
