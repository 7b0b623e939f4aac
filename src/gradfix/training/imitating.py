"""Learn to speak like another model: from its answers, token by token.

With one tokenizer the student learns the teacher's probabilities of the next token at every place of its answers. With two,
places where both have come equally far in the text still name the same next word: there the teacher's tokens are
read as the student would begin to write them; elsewhere the text itself is the lesson."""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.errors import DataError
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Example
from gradfix.tasks.reading import AnswerBound, Posed
from gradfix.training.asking import SAVE_EVERY_SECONDS, Reply, Transcript, ends
from gradfix.training.steps import SCHEDULES, Training, draws, warmed

NEVER = -1e4  # the log of no probability
SURE = 1e-6


@dataclass(frozen=True)
class Verse:
    """A question and an answer as the student reads them, and what it should find likely at every place of it.

    `top` are token ids and `logs` their log-probabilities, (places, k); what is missing to 1 may be anything. With
    `chunks` the places are read in pieces of text: the number of each place's piece, and the log-probability of each."""

    question: list[int]
    answer: list[int]
    top: Tensor
    logs: Tensor
    chunks: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """How the student learns. `rate` is in units of the fine-tune's typical change per weight, `lora_rate` for the
    factors of a LoRA on a model a thousand units wide. Each step sees `batch` answers of the teacher, `labelled` given
    ones and `kept` texts of the student's own, which hold it to what it knew. `prior`: how many labelled answers the
    teacher's word is worth."""

    steps: int = 240
    rate: float = 0.1
    lora_rate: float = 5e-4
    rank: int = 16
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: str = "cosine"
    batch: int = 32
    labelled: int = 8
    kept: int = 8
    keeping: float = 0.5
    prior: float = 16.0
    probes: int = 32
    keepsakes: int = 64
    keepsake_tokens: int = 64
    mapped: int = 128
    map_batch: int = 32
    micro: int = 64
    recompute: bool = False  # keep no activations inside layers, compute them twice
    way: str = "projected"
    own: int = 0  # answers of the student's own that the teacher corrects half-way


def same_tokens(theirs: Mapping[str, int], own: Mapping[str, int]) -> bool:
    """Whether every token of the teacher's is one of the student's under the same number."""
    return all(own.get(token) == number for token, number in theirs.items())


def lines_of(student: AnswerBound, said: Transcript, way: str = "projected") -> list[Verse]:
    """The teacher's answers as the student reads them."""
    own = student.tokenizer.get_vocab()
    rows = student.model.get_input_embeddings().weight.shape[0]
    if same_tokens(said.vocabulary, own):
        return [_same(student, reply, said.stop, rows) for reply in said.replies if reply.says]
    begins = _Beginnings(student, said) if way == "projected" else None
    lines = [_other(student, reply, said, begins) for reply in said.replies if reply.says]
    if way != "chunks":
        return lines
    return [_in_chunks(student, said, *both) for both in zip(lines, (r for r in said.replies if r.says), strict=True)]


def _same(student: AnswerBound, reply: Reply, stop: int, rows: int) -> Verse:
    posed = student.posed(reply.prompt)
    own_stop = student.stops(posed.closing)[0]
    answer = [*reply.tokens, *([own_stop] if reply.ended else [])]
    top = reply.top.long()
    logs = torch.where(top < rows, reply.logs, NEVER)
    top = torch.where(top == stop, own_stop, top).clamp(max=rows - 1)
    return Verse(student.room(posed.question, len(answer) + 1)[0], answer, top, logs)


def _other(student: AnswerBound, reply: Reply, said: Transcript, begins: _Beginnings | None) -> Verse:
    """The text as the student would write it; certain of it, but where both tokenizers stand at one place."""
    posed = student.posed(reply.prompt)
    content = student.answer_ids(reply.text)
    answer = [*content, *([student.stops(posed.closing)[0]] if reply.ended else [])]
    width = reply.top.shape[1] if begins is not None else 1
    top = torch.tensor(answer).unsqueeze(1).repeat(1, width)
    logs = torch.full((len(answer), width), NEVER)
    logs[:, 0] = 0.0
    if begins is not None and said.pieces is not None:
        theirs = {end: place for place, end in enumerate([0, *said.pieces(reply.tokens, reply.text)])}
        for place, start in enumerate([0, *ends(student.tokenizer, content, reply.text)][: len(answer)]):
            there = theirs.get(start)
            if there is not None and there < len(reply.top):
                top[place], logs[place] = begins.read(reply.top[there], reply.logs[there], answer[place])
    return Verse(student.room(posed.question, len(answer) + 1)[0], answer, top, logs)


def _in_chunks(student: AnswerBound, said: Transcript, line: Verse, reply: Reply) -> Verse:
    """Pieces of text that both tokenizers end at one place, and how likely the teacher finds each."""
    assert said.pieces is not None
    content = line.answer[: len(line.answer) - reply.ended]
    own, theirs = ends(student.tokenizer, content, reply.text), said.pieces(reply.tokens, reply.text)
    written = [*reply.tokens, *([said.stop] if reply.ended else [])]
    likely = [
        max((log for number, log in zip(top.tolist(), logs.tolist()) if number == token), default=float(logs[-1]))
        for token, top, logs in zip(written, reply.top, reply.logs)
    ]
    shared = sorted(set(own) & set(theirs))
    places = [bisect_left(shared, end) for end in own] + [len(shared)] * reply.ended
    sums = [0.0] * (len(shared) + 1)
    for end, log in zip([*theirs, math.inf], likely):
        sums[bisect_left(shared, end)] += log
    used = max(places, default=-1) + 1
    return replace(line, chunks=(torch.tensor(places), torch.tensor(sums[:used])))


class _Beginnings:
    """How the student begins to write each token of the teacher's."""

    def __init__(self, student: AnswerBound, said: Transcript) -> None:
        self.student, self.stop = student, said.stop
        self.spelled = {number: token for token, number in said.vocabulary.items()}
        self.known: dict[int, int] = {}
        self.before = student.answer_ids("\n")

    def read(self, top: Tensor, logs: Tensor, written: int) -> tuple[Tensor, Tensor]:
        """Student tokens and their log-probabilities; what the teacher's rarer tokens begin with is not known."""
        sums: dict[int, float] = {}
        for number, log in zip(top.tolist(), logs.tolist(), strict=True):
            begin = self._begin(number)
            if begin is not None:
                sums[begin] = sums.get(begin, 0.0) + math.exp(log)
        if written not in sums:  # what was said must not be ruled out
            sums[written] = max(1e-4, 1 - sum(sums.values()))
        total = max(1.0, sum(sums.values()))
        ids = [*sums, *([written] * (len(top) + 1 - len(sums)))][: len(top)]
        values = [math.log(sums[i] / total) if n < len(sums) else NEVER for n, i in enumerate(ids)]
        return torch.tensor(ids), torch.tensor(values)

    def _begin(self, number: int) -> int | None:
        if number == self.stop:
            return self.student.stops([])[0]
        if number not in self.known:
            self.known[number] = self._first(self.spelled.get(number, ""))
        return self.known[number] if self.known[number] >= 0 else None

    def _first(self, token: str) -> int:
        text = token.replace("\u2581", " ").replace("\u0120", " ").replace("\u010a", "\n")
        if not text or (text.startswith("<") and text.endswith(">")):
            return -1
        tokens = self.student.answer_ids("\n" + text)
        rest = tokens[len(self.before) :] if tokens[: len(self.before)] == self.before else []
        return rest[0] if rest else -1


def given_lines(student: AnswerBound, examples: Sequence[Example]) -> list[Verse]:
    """Labelled answers: certain of every token, and of what closes them."""
    found = []
    for index, example in enumerate(examples):
        posed = student.posed(example, index)
        answer = [*student.answer_ids(student.answer_text(example, index)), *posed.closing]
        top = torch.tensor(answer).unsqueeze(1)
        question = student.room(posed.question, len(answer) + 1)[0]
        found.append(Verse(question, answer, top, torch.zeros(len(answer), 1)))
    return found


@torch.no_grad()
def own_lines(student: AnswerBound, count: int, length: int, seed: int, top: int = 64) -> list[Verse]:
    """Texts the student writes of itself from nothing, with its own probabilities: what it knew before."""
    first = student.tokenizer.bos_token_id
    first = student.tokenizer.eos_token_id if first is None else first
    if first is None or not hasattr(student, "begun"):
        return []
    posed = [Posed([int(first)], [])] * count
    with left_as_it_was(student.model):
        written = [tokens for tokens, _ in student.say(student.model, posed, length, seed) if tokens]
        if not written:
            return []
        questions = [[int(first)]] * len(written)
        logs, ids = student.spoken_logits(student.model, questions, written).log_softmax(-1).topk(top)
    sizes = [len(tokens) for tokens in written]
    both = zip(ids.cpu().split(sizes), logs.cpu().split(sizes), strict=True)
    return [Verse([int(first)], tokens, *pair) for tokens, pair in zip(written, both, strict=True)]


def divergences(logits: Tensor, top: Tensor, logs: Tensor) -> Tensor:
    """KL(wanted || found) at every place, with one share for all tokens that are not listed."""
    found = logits.log_softmax(-1)
    listed = found.gather(1, top)
    wanted = logs.exp()
    known = logs > NEVER / 2
    part = torch.where(known, wanted * (logs - listed), 0.0).sum(1)
    rest = (1 - wanted.sum(1)).clamp(min=0.0)
    left = (1 - torch.where(known, listed.exp(), 0.0).sum(1)).clamp(min=SURE)
    return part + torch.where(rest > SURE, rest * (rest.clamp(min=SURE).log() - left.log()), 0.0)


def per_line(bound: AnswerBound, model: Any, lines: Sequence[Verse]) -> list[Tensor]:
    """The divergences of every line, place by place, in one pass."""
    logits = bound.spoken_logits(model, [line.question for line in lines], [line.answer for line in lines])
    if any(line.chunks is not None for line in lines):
        parts = logits.log_softmax(-1).split([len(line.answer) for line in lines])
        return [_by_chunks(found, line) for found, line in zip(parts, lines, strict=True)]
    width = max(line.top.shape[1] for line in lines)
    top = torch.cat([_wide(line.top, width, 0) for line in lines]).to(logits.device)
    logs = torch.cat([_wide(line.logs, width, NEVER) for line in lines]).to(logits)
    return list(divergences(logits, top, logs).split([len(line.answer) for line in lines]))


def _by_chunks(found: Tensor, line: Verse) -> Tensor:
    """For every piece the divergence between two answers: this very text, or any other."""
    if line.chunks is None:
        return divergences(found, line.top.to(found.device), line.logs.to(found))
    places, wanted = line.chunks[0].to(found.device), line.chunks[1].to(found)
    own = found.gather(1, torch.tensor(line.answer, device=found.device)[:, None])[:, 0]
    sums = torch.zeros_like(wanted).index_add(0, places, own).clamp(max=-SURE)
    wanted = wanted.clamp(min=-30.0, max=-SURE)
    other, rest = torch.log(-torch.expm1(sums)), torch.log(-torch.expm1(wanted))
    return wanted.exp() * (wanted - sums) + rest.exp() * (rest - other)


def _wide(tensor: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)


@torch.no_grad()
def followed(bound: AnswerBound, lines: Sequence[Verse], batch: int = 32) -> float:
    """The mean divergence per token: how far the model is from the teacher's words."""
    total, count = 0.0, 0
    with left_as_it_was(bound.model):
        for first in range(0, len(lines), batch):
            for values in per_line(bound, bound.model, lines[first : first + batch]):
                total, count = total + float(values.double().sum()), count + len(values)
    return total / max(count, 1)


@dataclass(frozen=True)
class Course:
    """What is learned from: the teacher's answers, given answers, and the student's own texts."""

    told: Sequence[Verse]
    given: Sequence[Verse]
    kept: Sequence[Verse]

    def weights(self, recipe: Imitation) -> tuple[float, float, float]:
        """Of the three parts; given answers count as the closed recipe has it."""
        count = len(self.given)
        trust = count / (count + recipe.prior) if self.told else 1.0
        return (1.0 if self.told else 0.0, trust if count else 0.0, recipe.keeping if self.kept else 0.0)


def imitate(
    bound: AnswerBound,
    course: Course,
    parameters: Mapping[str, nn.Parameter],
    rate: float,
    recipe: Imitation,
    seed: int,
    partial: Path | None = None,
    at: Callable[[int], None] = lambda done: None,
    more: Callable[[], Sequence[Verse]] = list,
) -> int:
    """Train the parameters in place; returns how many samples went forward and backward. `at` is told of every step.

    Half-way the lines of `more` join those that are told."""

    def diverged(step: int, _: float) -> DataError:
        return DataError(f"the loss is not finite in step {step + 1} of the lessons; try a lower rate.")

    warm = max(1, recipe.steps // 10)
    shape = SCHEDULES[recipe.schedule]
    training = Training(
        parameters,
        lambda step: warmed(step, rate, recipe.steps, warm, shape),
        diverged,
        betas=recipe.betas,
        masters=True,
    )
    parts = (course.told, course.given, course.kept)
    sizes = [min(size, len(part)) for size, part in zip((recipe.batch, recipe.labelled, recipe.kept), parts)]
    drawn = [draws(len(part), size, seed + n) if size else None for n, (part, size) in enumerate(zip(parts, sizes))]
    weights = course.weights(recipe)
    state = _Kept(partial, repr((recipe, seed, rate, _digest(course))))
    first = state.resume(training)
    with left_as_it_was(bound.model), torch.enable_grad(), recomputing(bound.model, recipe.recompute):
        for step in range(recipe.steps):
            if step == recipe.steps // 2 and (added := list(more())):
                parts = ([*course.told, *added], *parts[1:])
                drawn[0] = draws(len(parts[0]), sizes[0], seed)
            lines = [
                (part[row], weight / size)
                for part, rows, size, weight in zip(parts, drawn, sizes, weights, strict=True)
                if rows is not None
                for row in next(rows)
            ]
            if step < first:
                continue
            training.step(step, _losses(bound, lines, recipe.micro))
            state.save(training, step + 1)
            at(step + 1)
    return recipe.steps * sum(sizes)


def _losses(bound: AnswerBound, lines: Sequence[tuple[Verse, float]], micro: int) -> Iterator[Tensor]:
    """The weighted mean over answers of the mean over their places, a few answers at a time."""
    for first in range(0, len(lines), micro):
        some = lines[first : first + micro]
        found = per_line(bound, bound.model, [line for line, _ in some])
        yield torch.stack([weight * values.mean() for values, (_, weight) in zip(found, some, strict=True)]).sum()


def _digest(course: Course) -> str:
    digest = hashlib.sha256()
    for line in (*course.told, *course.given, *course.kept):
        digest.update(repr((line.question, line.answer)).encode())
    return digest.hexdigest()


@contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """No activations are kept inside layers. Only the layers themselves are told that they train: dropout stays off."""
    if not wanted or not getattr(model, "supports_gradient_checkpointing", False):
        yield
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    modes = [layer.training for layer in layers]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


class _Kept:
    """Where lessons that were broken off go on."""

    def __init__(self, path: Path | None, about: str) -> None:
        self.path, self.about, self.saved = path, about, time.monotonic()

    def resume(self, training: Training) -> int:
        if self.path is None or not self.path.is_file():
            return 0
        state = State(self.path)
        if state.about.get("key") != self.about:
            return 0
        training.load(state.items())
        return int(state.about["steps"])

    def save(self, training: Training, done: int) -> None:
        if self.path is None or time.monotonic() - self.saved < SAVE_EVERY_SECONDS:
            return
        save_state(self.path, training.state(), {"key": self.about, "steps": str(done)})
        self.saved = time.monotonic()
