"""Forgetting: what a model still knows outside the task, beside what it knew before.

Two figures: the loss per token on general text, and the divergence from the untouched model on prompts outside
the task. Without texts of the user's own the untouched model writes some itself, from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradfix.system.modules import left_as_it_was
from gradfix.tasks.reading import AnswerBound
from gradfix.training.imitating import NEVER, Verse, followed, own_lines

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


@torch.no_grad()
def _read(bound: AnswerBound, texts: Sequence[str]) -> list[Verse]:
    first = bound.tokenizer.bos_token_id
    first = int(bound.tokenizer.eos_token_id if first is None else first)
    found = []
    with left_as_it_was(bound.model):
        for text in texts:
            tokens = bound.answer_ids(text)[: min(2 * TOKENS, bound.max_length - 1)]
            if not tokens:
                continue
            logs, top = bound.spoken_logits(bound.model, [[first]], [tokens]).log_softmax(-1).topk(TOP)
            found.append(Verse([first], tokens, top.cpu(), logs.cpu().clamp(min=NEVER)))
    return found
