"""Forgetting: what a model still knows outside the task, beside what it knew before.

Two figures: the loss per token on general text, and the divergence from the untouched model on prompts outside
the task. Without texts of the user's own the untouched model writes some itself, from nothing. An encoder-decoder
writes nothing of itself: it is asked about the texts, or about sentences on everything, and judged by its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradfix.system.modules import at_work
from gradfix.tasks.reading import AnswerBound, seeds_of
from gradfix.training.imitating import NEVER, Verse, followed, own_lines
from gradfix.training.remix import bank

TEXTS = 32
TOKENS = 96
SEED = 77_001  # of texts that no lesson shows
TOP = 64


@dataclass(frozen=True)
class Outside:
    """Texts with the untouched model's probabilities. Make it before the model is changed."""

    lines: list[Verse]
    own: bool

    @classmethod
    def of(cls, bound: AnswerBound, texts: Sequence[str] | None = None, count: int = TEXTS) -> Outside:
        if not hasattr(bound, "begun"):
            return cls(_replied(bound, list(texts or _sentences(count))[:count]), not texts)
        if not texts:
            return cls(own_lines(bound, count, TOKENS, SEED), True)
        return cls(_read(bound, list(texts)[:count]), False)

    def measure(self, bound: AnswerBound) -> dict[str, float] | None:
        """Of the model as it stands now; None where there is no text to measure on."""
        if not self.lines:
            return None
        certain = [
            replace(line, top=torch.tensor(line.answer)[:, None], logs=torch.zeros(len(line.answer), 1))
            for line in self.lines
        ]
        return {"general_loss": followed(bound, certain), "divergence": followed(bound, self.lines)}


def _sentences(count: int) -> tuple[str, ...]:
    whole = bank()
    return whole[:: max(1, len(whole) // count)]


@torch.no_grad()
def _replied(bound: AnswerBound, texts: Sequence[str], batch: int = 16) -> list[Verse]:
    """What the model answers to texts that are no prompts of the task, with its own probabilities."""
    found, seeds = list[Verse](), seeds_of("outside", SEED, range(len(texts)))
    with at_work(bound.model):
        for first in range(0, len(texts), batch):
            posed = [bound.posed({"prompt": text}) for text in texts[first : first + batch]]
            for one, (tokens, ended) in zip(posed, bound.say(bound.model, posed, TOKENS, seeds[first : first + batch])):
                answer = [*tokens, *([bound.stops(one.closing)[0]] if ended else [])]
                asked = bound.beside(one.question, answer)
                logs, top = _likeliest(bound, asked, answer)
                found.append(Verse(asked, answer, top, logs))
    return found


def _likeliest(bound: AnswerBound, asked: list[int], answer: list[int]) -> tuple[Tensor, Tensor]:
    logs = bound.spoken_logits(bound.model, [asked], [answer]).log_softmax(-1)
    logs, top = logs.topk(min(TOP, logs.shape[-1]))
    return logs.cpu().clamp(min=NEVER), top.cpu()


@torch.no_grad()
def _read(bound: AnswerBound, texts: Sequence[str]) -> list[Verse]:
    first = bound.tokenizer.bos_token_id
    first = int(bound.tokenizer.eos_token_id if first is None else first)
    found = []
    with at_work(bound.model):
        for text in texts:
            tokens = bound.answer_ids(text)[: min(2 * TOKENS, bound.max_length - 1)]
            if not tokens:
                continue
            logs, top = _likeliest(bound, [first], tokens)
            found.append(Verse([first], tokens, top, logs))
    return found
