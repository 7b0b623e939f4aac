"""Ask the old fine-tune: what it answers, and how likely it finds every token of its answers.

It answers the few-shot prompts, unlabelled prompts, and prompts made from those: their beginnings, which the new base
goes on with (a fine-tune may have forgotten how people ask), and their words in another order. Answers are drawn from its own probabilities and kept as tokens with the
likeliest tokens at every place, so that the fine-tune need not be in memory while another model learns from it."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.checkpoints.slices import whole
from gradfix.data.rows import question
from gradfix.errors import DataError
from gradfix.system.modules import ON_DISK, at_work, offloaded
from gradfix.system.processes import current
from gradfix.tasks.base import Example
from gradfix.tasks.reading import AnswerBound, Posed, seeds_of

REFERENCE, LABELLED, UNLABELLED, MADE = "reference", "labelled", "unlabelled", "made"
COLUMNS = ("messages", "prompt", "text")
SAVE_EVERY_SECONDS = 20.0
FORMAT = "gradfix.answers"


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How much is asked. `pool` prompts in all, made-up ones only as far as real ones are missing; `copies` answers to
    each labelled prompt; `top` tokens kept at every place; `longest` tokens of an answer (a quarter more than the longest
    labelled one has, and `spare`, where nothing is given)."""

    pool: int = 512
    copies: int = 4
    top: int = 64
    longest: int | None = None
    spare: int = 16
    unknown: int = 128  # tokens where there is no labelled answer to go by
    batch: int = 16


@dataclass(frozen=True)
class Reply:
    """One answer: its tokens without what closes it, whether it came to an end, and the likeliest tokens at each place.

    `top` has the ids and `logs` their log-probabilities, one row per token and one more for the end where there is
    one. `parent` is the labelled example that the prompt comes from, or -1."""

    prompt: Example
    source: str
    parent: int
    tokens: list[int]
    ended: bool
    text: str
    top: Tensor
    logs: Tensor

    @property
    def says(self) -> bool:
        """Whether there is anything to learn from: words, or that there are none."""
        return bool(self.text and self.tokens) or self.ended


@dataclass(frozen=True)
class Transcript:
    """Everything the old fine-tune said; `stop` is the token it ends with, `vocabulary` its tokens by name."""

    replies: list[Reply]
    stop: int
    vocabulary: Mapping[str, int]
    longest: int
    ends: Callable[[list[int], str], list[int]] = field(repr=False)  # characters written after each token of a text
    notes: tuple[str, ...] = ()
    asked: int = 0
    shown: tuple[str, ...] = ()  # answers for people to read

    def __len__(self) -> int:
        return len(self.replies)

    def of_labelled(self, kept: set[int]) -> Transcript:
        """Without what came from other labelled examples than these."""
        replies = [reply for reply in self.replies if reply.parent == -1 or reply.parent in kept]
        return replace(self, replies=replies)


@dataclass(frozen=True)
class Prompt:
    """A question, where it comes from, and the reference answer where that is the one to be read."""

    example: Example
    source: str
    parent: int
    said: str | None = None


def bare(example: Example) -> dict[str, Any]:
    """The question of an example alone."""
    if "messages" in example:
        return {"messages": question(example["messages"])}
    return {name: example[name] for name in COLUMNS if example.get(name) is not None}


def ask(
    teacher: AnswerBound,
    prompts: Sequence[Prompt],
    *,
    asking: Asking | None = None,
    seed: int = 0,
    partial: Path | None = None,
) -> Transcript:
    """The teacher's answers. With `partial` they are saved there now and then, and the same call goes on from it."""
    asking = asking or Asking()
    if not prompts:
        raise DataError("there is no prompt to ask the old fine-tune about; give --shots or --unlabelled.")
    longest = asking.longest or _longest(teacher, prompts, asking)
    prompts = [one for one in prompts if one.said is None or len(teacher.answer_ids(one.said)) < teacher.most]
    posed = [teacher.posed(prompt.example, index) for index, prompt in enumerate(prompts)]
    replies = _Book(teacher, prompts, posed, longest, asking, seed).filled(partial)
    drawn = [reply for reply in replies if reply.source != REFERENCE]
    if drawn and not any(reply.tokens for reply in drawn):
        raise DataError(
            f"the old fine-tune gives an empty answer to each of {len(drawn)} prompts. Are the prompts written as it was "
            "trained on (chat template, ending)? Check with `gradfix evaluate`."
        )
    return Transcript(
        replies, teacher.stops(posed[0].closing)[0], dict(teacher.tokenizer.get_vocab()), longest,
        lambda tokens, text: ends(teacher.tokenizer, tokens, text), _notes(drawn, longest), len(replies),
    )  # fmt: skip


def _notes(drawn: Sequence[Reply], longest: int) -> tuple[str, ...]:
    cut = sum(not reply.ended for reply in drawn)
    made = sum(reply.source == MADE for reply in drawn)
    said = [f"the old fine-tune answered {len(drawn)} prompts, {made} of them made from the others"] if drawn else []
    if cut:
        said.append(
            f"{cut} of its {len(drawn)} answers did not end within {longest} tokens and were cut there; --answer-tokens "
            "gives it more room"
        )
    return tuple(said)


def _longest(teacher: AnswerBound, prompts: Sequence[Prompt], asking: Asking) -> int:
    lengths = [len(teacher.answer_ids(prompt.said)) for prompt in prompts if prompt.said is not None]
    return max(lengths) * 5 // 4 + asking.spare if lengths else asking.unknown


def prompts_of(
    writer: AnswerBound,
    labelled: Sequence[Example],
    unlabelled: Sequence[Example] = (),
    *,
    asking: Asking | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """What is asked: labelled prompts (with their answers, and without), unlabelled ones, and as far as those do not fill the
    pool, prompts that `writer` makes up from them."""
    asking, draw = asking or Asking(), random.Random(seed)
    known = [bare(example) for example in labelled]
    real = [bare(example) for example in draw.sample(list(unlabelled), min(len(unlabelled), asking.pool))]
    found = [
        Prompt(example, REFERENCE, index, writer.answer_text(labelled[index], index))
        for index, example in enumerate(known)
    ]
    found += [Prompt(example, LABELLED, index) for index, example in enumerate(known) for _ in range(asking.copies)]
    found += [Prompt(example, UNLABELLED, -1) for example in real]
    missing = asking.pool - len(real) - asking.copies * len(known)
    if missing > 0 and (known or real):
        parents = [*range(len(known)), *(-1 for _ in real)]
        made = made_up(writer, [*known, *real], missing, seed, asking.batch)
        found += [Prompt(example, MADE, parents[place]) for example, place in made]
    return found


def made_up(
    writer: AnswerBound, known: Sequence[Example], count: int, seed: int, batch: int = 16
) -> list[tuple[Example, int]]:
    """New prompts, each with the place of the known one it comes from.

    What all prompts have in common at their beginning and end stays; in between every second one is continued by the
    model from a few of its words, the others take words of several prompts."""
    draw = random.Random(seed + 1)
    texts = [_varied(example) for example in known]
    head, bodies, tail = framed(texts)
    words = [body.split(" ") for body in bodies]
    places = [draw.randrange(len(known)) for _ in range(count)]
    goes_on = hasattr(writer, "begun")
    begun = [place for turn, place in enumerate(places) if goes_on and turn % 2 == 0]
    mixed = [place for turn, place in enumerate(places) if not (goes_on and turn % 2 == 0)]
    made = [(place, _mixed(words, place, draw)) for place in mixed]
    starts = [words[place][: 1 + draw.randrange(max(1, len(words[place]) // 2))] for place in begun]
    lengths = [len(words[place]) for place in begun]
    shown = [_with(known[place], head + " ".join(start)) for place, start in zip(begun, starts)]
    missing = [max(2, 2 * (length - len(start))) for length, start in zip(lengths, starts)]
    told = _continued(writer, shown, missing, seed, batch)
    for place, start, text, length in zip(begun, starts, told, lengths, strict=True):
        more = (text.split(tail.strip())[0] if tail.strip() else text).strip()
        more = more if any("\n" in body for body in bodies) else more.split("\n")[0]
        made.append((place, " ".join(" ".join([*start, more]).split(" ")[:length])))
    return [(_with(known[place], head + body + tail), place) for place, body in made]


def _continued(
    writer: AnswerBound, shown: Sequence[Example], lengths: Sequence[int], seed: int, batch: int
) -> list[str]:
    """What the model writes behind the beginnings of prompts, up to so many tokens each."""
    posed = [Posed(writer.begun(one), writer.posed(one).closing) for one in shown]  # type: ignore[attr-defined]
    size = writer.at_once(max((len(one.question) for one in posed), default=0), max(lengths, default=0), batch)
    seeds, found = seeds_of("prompts", seed, range(len(posed))), list[list[int]]()
    with at_work(writer.model):
        for first in range(0, len(posed), size):
            part = slice(first, first + size)
            said = writer.say(writer.model, posed[part], max(lengths[part]), seeds[part])
            found += [tokens[:length] for (tokens, _), length in zip(said, lengths[part], strict=True)]
    return [writer.spell(tokens) for tokens in found]


def _mixed(words: Sequence[Sequence[str]], place: int, draw: random.Random) -> str:
    """Word by word from several prompts where all have as many words, else a piece of one and a piece of another."""
    own = words[place]
    if len(set(map(len, words))) == 1:
        return " ".join(draw.choice(words)[slot] for slot in range(len(own)))
    other = draw.choice(words)
    cut, joint = draw.randrange(1, len(own) + 1), draw.randrange(len(other))
    return " ".join([*own[:cut], *other[joint:]][: max(len(own), 1)])


def framed(texts: Sequence[str]) -> tuple[str, list[str], str]:
    """What all texts begin with, what differs, and what all end with; cut between words."""
    if len(set(texts)) < 2:
        return "", list(texts), ""
    head = _shared(texts)
    head = head[: head.rfind(" ") + 1] if " " in head or "\n" not in head else head[: head.rfind("\n") + 1]
    rest = [text[len(head) :] for text in texts]
    tail = _shared([text[::-1] for text in rest])[::-1]
    cuts = [place for place in (tail.find(" "), tail.find("\n")) if place >= 0]
    tail = tail[min(cuts) :] if cuts else ""
    bodies = [text[: len(text) - len(tail)] for text in rest]
    if not all(body.strip() for body in bodies):
        return "", list(texts), ""
    return head, bodies, tail


def _shared(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    count = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:count]


def _varied(example: Example) -> str:
    """The text of a prompt that new ones differ in: the last turn of a conversation, or all of it."""
    if "messages" in example:
        return str(example["messages"][-1]["content"])
    return str(next(example[name] for name in COLUMNS if name in example))


def _with(example: Example, text: str) -> dict[str, Any]:
    if "messages" in example:
        *before, last = example["messages"]
        return {"messages": [*before, {**last, "content": text}]}
    name = next(name for name in COLUMNS if name in example)
    return {**example, name: text}


class _Book:
    """The answers as they come in, batch by batch, and the file they can go on from."""

    def __init__(
        self,
        teacher: AnswerBound,
        prompts: Sequence[Prompt],
        posed: Sequence[Posed],
        longest: int,
        asking: Asking,
        seed: int,
    ) -> None:
        self.teacher, self.prompts, self.posed = teacher, prompts, posed
        self.longest, self.asking, self.seed = longest, asking, seed
        self.found: dict[int, Reply] = {}

    def filled(self, partial: Path | None) -> list[Reply]:
        order = sorted(
            range(len(self.prompts)), key=lambda i: (self.prompts[i].said is None, len(self.posed[i].question))
        )
        key = self._key()
        if partial is not None:
            self._resume(partial, key)
        saved = time.monotonic()
        with at_work(self.teacher.model), torch.no_grad():
            for rows in self._batches([row for row in order if row not in self.found]):
                self._answer(rows)
                if partial is not None and time.monotonic() - saved >= SAVE_EVERY_SECONDS:
                    self._save(partial, key)
                    saved = time.monotonic()
        if partial is not None:
            self._save(partial, key)
        return [self.found[index] for index in range(len(self.prompts))]

    def _batches(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Given answers apart from drawn ones, and those apart that have less room: a batch does one thing."""

        def room(row: int) -> int:
            given = self.prompts[row].said is not None
            return 0 if given else self.teacher.room(self.posed[row].question, self.longest)[1]

        for left, rows in groupby(order, room):
            mine = list(rows)
            asked = max(len(self.posed[row].question) for row in mine)
            size = self.teacher.at_once(asked, left, self.asking.batch) if left else self.asking.batch
            for first in range(0, len(mine), size):
                yield mine[first : first + size]

    def _answer(self, rows: Sequence[int]) -> None:
        """Answers are drawn side by side, and read again a few at a time."""
        teacher, posed = self.teacher, [self.posed[row] for row in rows]
        said: list[tuple[list[int], bool]]
        if self.prompts[rows[0]].said is not None:
            said = [(teacher.answer_ids(str(self.prompts[row].said)), True) for row in rows]
        else:
            said = teacher.say(teacher.model, posed, self.longest, seeds_of("answers", self.seed, rows))
        for first in range(0, len(rows), self.asking.batch):
            part = slice(first, first + self.asking.batch)
            self._read(rows[part], said[part])

    def _read(self, rows: Sequence[int], said: Sequence[tuple[list[int], bool]]) -> None:
        teacher, posed = self.teacher, [self.posed[row] for row in rows]
        tokens = [[*one, *([teacher.stops(p.closing)[0]] if end else [])] for (one, end), p in zip(said, posed)]
        questions = [teacher.beside(p.question, answer) for p, answer in zip(posed, tokens, strict=True)]
        speaking = [index for index, answer in enumerate(tokens) if answer]
        logits = teacher.spoken_logits(
            teacher.model, [questions[index] for index in speaking], [tokens[index] for index in speaking]
        )
        logs, top = logits.log_softmax(-1).topk(min(self.asking.top, logits.shape[-1]))
        parts = dict(zip(speaking, zip(*(t.cpu().split([len(tokens[i]) for i in speaking]) for t in (top, logs)))))
        nothing = (top[:0].cpu(), logs[:0].cpu())
        for index, row in enumerate(rows):
            prompt, (own, end) = self.prompts[row], said[index]
            ids, values = parts.get(index, nothing)
            text = prompt.said if prompt.said is not None else teacher.spell(own)
            self.found[row] = Reply(
                prompt.example, prompt.source, prompt.parent, own, end, text, ids.int(), values.float()
            )

    def _key(self) -> str:
        """Prompts, what is asked, and the teacher: by its settings and a few of its weights, or the files they are in."""
        digest = hashlib.sha256(repr((self.asking, self.longest, self.seed, self.teacher.asked())).encode())
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.example, prompt.source, prompt.said], default=str).encode())
        if offloaded(self.teacher.model):
            digest.update(ON_DISK[self.teacher.model].identity.encode())
            return digest.hexdigest()
        for weight in self.teacher.model.parameters():
            digest.update(whole(weight.detach()).flatten()[:64].double().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _save(self, path: Path, key: str) -> None:
        if not current().leads:
            return
        rows = sorted(self.found)
        replies = [self.found[row] for row in rows]
        facts = [{"row": row, "tokens": r.tokens, "ended": r.ended, "text": r.text} for row, r in zip(rows, replies)]
        tensors = {"top": torch.cat([r.top for r in replies]), "logs": torch.cat([r.logs for r in replies])}
        save_state(path, tensors, {"format": FORMAT, "key": key, "replies": json.dumps(facts)})

    def _resume(self, path: Path, key: str) -> None:
        if not path.is_file():
            return
        saved = State(path)
        if saved.about.get("format") != FORMAT or saved.about.get("key") != key:
            return  # of another question: it is asked anew
        tensors = dict(saved.items())
        place = 0
        for fact in json.loads(saved.about["replies"]):
            prompt = self.prompts[fact["row"]]
            count = len(fact["tokens"]) + fact["ended"]
            rows = slice(place, place + count)
            self.found[fact["row"]] = Reply(
                prompt.example, prompt.source, prompt.parent, fact["tokens"], fact["ended"], fact["text"],
                tensors["top"][rows], tensors["logs"][rows],
            )  # fmt: skip
            place += count


def ends(tokenizer: Any, tokens: list[int], text: str) -> list[int]:
    """How many characters of the text have been written after each token."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(found["input_ids"]) == list(tokens):
        return [int(end) for _, end in found["offset_mapping"]]
    return [len(tokenizer.decode(tokens[: count + 1], skip_special_tokens=True)) for count in range(len(tokens))]
