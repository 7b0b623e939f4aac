"""Learn to speak like another model: from its answers, token by token.

With one tokenizer the student learns the teacher's probabilities of the next token at every place of its answers. With two
it learns how likely each piece of text is that both come to an end of at one place: this very piece, or any other."""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.errors import DataError
from gradfix.system.modules import at_work, offloaded
from gradfix.system.processes import current
from gradfix.tasks.base import Example
from gradfix.tasks.reading import AnswerBound, Posed, seeds_of, writing_bytes
from gradfix.training.asking import SAVE_EVERY_SECONDS, Reply, Transcript, ends
from gradfix.training.steps import SCHEDULES, Training, draws, warmed

T = TypeVar("T")
NEVER = -1e4  # the log of no probability
SURE = 1e-6
WRITTEN = 8192  # tokens of the student's own that are written at once, or more where LITTLE holds them
LITTLE = 2**30  # bytes
READ = 12  # bytes for a token that may stand at a place of a text, while it is read


@dataclass(frozen=True)
class Verse:
    """A question and an answer as the student reads them, and what it should find likely at every place of it.

    `top` are token ids and `logs` their log-probabilities, (places, k); what is missing to 1 may be anything. With
    `pieces` the text is read in larger ones: the number of each place's piece, and the log-probability of each."""

    question: list[int]
    answer: list[int]
    top: Tensor
    logs: Tensor
    pieces: tuple[Tensor, Tensor] | None = None


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
    keeping: float = 4.0
    prior: float = 16.0
    probes: int = 32
    keepsakes: int = 192
    keepsake_tokens: int = 192
    mapped: int = 128
    map_batch: int = 32
    micro: int = 64
    recompute: bool = False  # keep no activations inside layers, compute them twice


def same_tokens(theirs: Mapping[str, int], own: Mapping[str, int]) -> bool:
    """Whether every token of the teacher's is one of the student's under the same number."""
    return all(own.get(token) == number for token, number in theirs.items())


def lines_of(student: AnswerBound, said: Transcript) -> list[Verse]:
    """The teacher's answers as the student reads them."""
    replies = [reply for reply in said.replies if reply.says]
    if same_tokens(said.vocabulary, student.tokenizer.get_vocab()):
        rows = student.model.get_input_embeddings().weight.shape[0]
        return [_same(student, reply, said.stop, rows) for reply in replies]
    return [_other(student, reply, said) for reply in replies]


def _same(student: AnswerBound, reply: Reply, stop: int, rows: int) -> Verse:
    posed = student.posed(reply.prompt)
    own_stop = student.stops(posed.closing)[0]
    answer = [*reply.tokens, *([own_stop] if reply.ended else [])]
    answer = answer[: student.most]  # its context may be shorter than the teacher's
    top, logs = reply.top.long()[: len(answer)], reply.logs[: len(answer)]
    logs = torch.where(top < rows, logs, NEVER)
    top = torch.where(top == stop, own_stop, top).clamp(max=rows - 1)
    return Verse(student.beside(posed.question, answer), answer, top, logs)


def _other(student: AnswerBound, reply: Reply, said: Transcript) -> Verse:
    """The text as the student would write it, in pieces that both tokenizers end at one place."""
    posed = student.posed(reply.prompt)
    content = student.answer_ids(reply.text)
    own, theirs = ends(student.tokenizer, content, reply.text), said.ends(reply.tokens, reply.text)
    ended = reply.ended or not content
    if len(content) >= student.most:  # it is read up to the last place that both come to an end of
        last = max((n for n in range(1, student.most) if own[n - 1] in set(theirs)), default=0)
        content, own, ended = content[:last], own[:last], not last
    answer = [*content, *([student.stops(posed.closing)[0]] if ended else [])]
    shared = sorted(set(own) & set(theirs))
    places = [bisect_left(shared, end) for end in own] + [len(shared)] * ended
    sums = torch.zeros(len(shared) + 1)
    written = torch.tensor([bisect_left(shared, end) for end in theirs] + [len(shared)] * reply.ended)
    sums.index_add_(0, written, _likely(reply, said.stop))
    pieces = (torch.tensor(places), sums[: max(places, default=-1) + 1])
    return replace(_certain(student.beside(posed.question, answer), answer), pieces=pieces)


def _likely(reply: Reply, stop: int) -> Tensor:
    """The log-probability of every token that was said; of one that is not listed, that of the last listed one."""
    tokens = torch.tensor([*reply.tokens, *([stop] if reply.ended else [])])
    hit = reply.top == tokens[:, None]
    return torch.where(hit.any(1), torch.where(hit, reply.logs, -math.inf).amax(1), reply.logs[:, -1])


def _certain(question: list[int], answer: list[int]) -> Verse:
    return Verse(question, answer, torch.tensor(answer)[:, None], torch.zeros(len(answer), 1))


def given_lines(student: AnswerBound, examples: Sequence[Example]) -> list[Verse]:
    """Labelled answers: certain of every token, and of what closes them."""
    found = []
    for index, example in enumerate(examples):
        posed = student.posed(example, index)
        answer = [*student.answer_ids(student.answer_text(example, index)), *posed.closing]
        found.append(_certain(student.beside(posed.question, answer), answer))
    return found


@torch.no_grad()
def own_lines(student: AnswerBound, count: int, length: int, seed: int, top: int = 64) -> list[Verse]:
    """Texts the student writes of itself from nothing, with its own probabilities: what it knew before."""
    first = student.tokenizer.bos_token_id
    first = student.tokenizer.eos_token_id if first is None else first
    if first is None or not hasattr(student, "begun"):
        return []
    config, weight = student.model.config, next(student.model.parameters())
    side_by_side = student.at_once(1, length, texts_at_once(config, weight.dtype, length))
    seeds, begun = seeds_of("own", seed, range(count)), Posed([int(first)], [])
    written: list[list[int]] = []
    with at_work(student.model):
        for some in batched(seeds, side_by_side):
            written += [tokens for tokens, _ in student.say(student.model, [begun] * len(some), length, some) if tokens]
        parts = batched(written, 2 * LITTLE // (READ * length * config.get_text_config().vocab_size))
        return [line for part in parts for line in _as_said(student, int(first), part, top)]


def texts_at_once(config: Any, dtype: torch.dtype, length: int) -> int:
    """How many texts of so many tokens a model in memory writes side by side."""
    return max(1, WRITTEN // length, LITTLE // writing_bytes(config, dtype, 1, length))


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[first : first + max(1, size)] for first in range(0, len(items), max(1, size)))


def _as_said(student: AnswerBound, first: int, written: list[list[int]], top: int) -> list[Verse]:
    questions = [[first]] * len(written)
    logits = student.spoken_logits(student.model, questions, written)
    logs, ids = logits.log_softmax(-1).topk(min(top, logits.shape[-1]))
    sizes = [len(tokens) for tokens in written]
    both = zip(ids.cpu().split(sizes), logs.cpu().split(sizes), strict=True)
    return [Verse([first], tokens, *pair) for tokens, pair in zip(written, both, strict=True)]


def divergences(listed: Tensor, logs: Tensor) -> Tensor:
    """KL(wanted || found) at every place from the log-probabilities of listed tokens; all others have one share."""
    wanted = logs.exp()
    known = logs > NEVER / 2
    part = torch.where(known, wanted * (logs - listed), 0.0).sum(1)
    rest = (1 - wanted.sum(1)).clamp(min=0.0)
    left = (1 - torch.where(known, listed.exp(), 0.0).sum(1)).clamp(min=SURE)
    return part + torch.where(rest > SURE, rest * (rest.clamp(min=SURE).log() - left.log()), 0.0)


def per_line(bound: AnswerBound, model: Any, lines: Sequence[Verse]) -> list[Tensor]:
    """The divergences of every line, place by place or piece by piece, in one pass."""
    logits = bound.spoken_logits(model, [line.question for line in lines], [line.answer for line in lines])
    width = max(line.top.shape[1] for line in lines)
    top = torch.cat([_wide(line.top, width, 0) for line in lines]).to(logits.device)
    logs = torch.cat([_wide(line.logs, width, NEVER) for line in lines]).to(logits)
    listed = logits.log_softmax(-1).gather(1, top)
    sizes = [len(line.answer) for line in lines]
    values = list(divergences(listed, logs).split(sizes))
    own = listed[:, 0].split(sizes)
    in_pieces = [number for number, line in enumerate(lines) if line.pieces is not None]
    for number, found in zip(in_pieces, _by_pieces([(own[n], lines[n]) for n in in_pieces]), strict=True):
        values[number] = found
    return values


def _by_pieces(lines: Sequence[tuple[Tensor, Verse]]) -> Sequence[Tensor]:
    """For every piece the divergence between two answers: this very text, or any other. `lines` have the student's
    log-probability of each token."""
    if not lines:
        return []
    found = torch.cat([own for own, _ in lines])
    pieces = [line.pieces for _, line in lines if line.pieces is not None]
    sizes = [len(logs) for _, logs in pieces]
    firsts = [0, *accumulate(sizes)]
    places = torch.cat([numbers + first for (numbers, _), first in zip(pieces, firsts)]).to(found.device)
    wanted = torch.cat([logs for _, logs in pieces]).to(found).clamp(min=-30.0, max=-SURE)
    sums = torch.zeros_like(wanted).index_add(0, places, found).clamp(max=-SURE)
    other, rest = torch.log(-torch.expm1(sums)), torch.log(-torch.expm1(wanted))
    return (wanted.exp() * (wanted - sums) + rest.exp() * (rest - other)).split(sizes)


def _wide(tensor: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)


@torch.no_grad()
def followed(bound: AnswerBound, lines: Sequence[Verse], batch: int = 32) -> float:
    """The mean divergence per token: how far the model is from the teacher's words."""
    total, count = 0.0, 0
    with at_work(bound.model):
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
) -> int:
    """Train the parameters in place; returns how many samples went forward and backward. `at` is told of every step."""

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
        steps=recipe.steps,
    )
    parts = (course.told, course.given, course.kept)
    sizes = [min(size, len(part)) for size, part in zip((recipe.batch, recipe.labelled, recipe.kept), parts)]
    drawn = [draws(len(part), size, seed + n) if size else None for n, (part, size) in enumerate(zip(parts, sizes))]
    weights = course.weights(recipe)
    state = _Kept(partial, repr((recipe, seed, rate, _digest(course))))
    first = state.resume(training)
    with at_work(bound.model), torch.enable_grad(), recomputing(bound.model, recipe.recompute):
        for step in range(recipe.steps):
            told, given, kept = (
                [] if rows is None else [(part[row], weight / size) for row in next(rows)]
                for part, rows, size, weight in zip(parts, drawn, sizes, weights, strict=True)
            )
            if step < first:
                continue
            training.step(step, _losses(bound, [*told, *given], kept, recipe.micro))
            state.save(training, step + 1)
            at(step + 1)
    return recipe.steps * sum(sizes)


Weighted = Sequence[tuple[Verse, float]]


def _losses(bound: AnswerBound, answers: Weighted, texts: Weighted, micro: int) -> Iterator[Tensor]:
    """The weighted mean over answers of the mean over their places, a few at a time; texts without a question would
    be filled up to the length of one, and have passes of their own."""
    for some in (part[first : first + micro] for part in (answers, texts) for first in range(0, len(part), micro)):
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
    if wanted and offloaded(model):
        from gradfix.votes.distributed.offload import recomputed

        with recomputed(model):
            yield
        return
    if not wanted or not getattr(model, "supports_gradient_checkpointing", False):
        yield
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    modes = [layer.training for layer in layers]
    named = (
        "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    )  # as transformers calls it
    getattr(model, f"{named}_checkpointing_enable")({"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        getattr(model, f"{named}_checkpointing_disable")()
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
        if self.path is None or not current().agree(time.monotonic() - self.saved >= SAVE_EVERY_SECONDS):
            return
        state = training.state()
        if current().leads:
            save_state(self.path, state, {"key": self.about, "steps": str(done)})
        self.saved = time.monotonic()
