"""Score weights on labelled examples, the model left as it was; and answers in words: how much of them is what was meant."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gradfix.errors import DataError
from gradfix.system.modules import at_work
from gradfix.tasks.base import Batch, Bound, Example
from gradfix.tasks.reading import AnswerBound
from gradfix.votes.engines.passes import Loss


def evaluate(model: nn.Module, task: Bound, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy in percent, mean loss and the number of samples; further measures of the task by their names."""
    with at_work(model), torch.no_grad():
        marks = task.mark(model, batches)
    if marks.count == 0:
        raise DataError("no examples to score; check the data and its split.")
    further = {name: 100 * value / marks.count for name, value in marks.further.items()}
    return {
        "accuracy": 100 * marks.right / marks.count,
        "loss": marks.loss / marks.count,
        "samples": marks.count,
        **further,
    }


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    with at_work(model), torch.no_grad():
        losses = torch.cat([loss(model, batch).double().cpu() for batch in batches])
    return float(losses.mean())


def token_f1(said: str, meant: str) -> float:
    """The harmonic mean of precision and recall over words; case and punctuation do not count."""
    ours, theirs = (Counter(_words(text)) for text in (said, meant))
    both = sum((ours & theirs).values())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * both / (sum(ours.values()) + sum(theirs.values()))


def _words(text: str) -> list[str]:
    table = str.maketrans(string.punctuation, " " * len(string.punctuation))
    return text.casefold().translate(table).split()


def spoken(
    bound: AnswerBound, model: nn.Module, examples: Sequence[Example], longest: int, batch: int = 16
) -> list[str]:
    """What the model answers by greedy decoding. A question that leaves less room for its answer is asked apart, so that
    it cuts no other's."""
    posed = [bound.posed(example, index) for index, example in enumerate(examples)]
    rooms: dict[int, list[int]] = {}
    for place, one in enumerate(posed):
        rooms.setdefault(bound.room(one.question, longest)[1], []).append(place)
    found = [""] * len(posed)
    with at_work(model):
        for places in (mine[first : first + batch] for mine in rooms.values() for first in range(0, len(mine), batch)):
            said = bound.say(model, [posed[place] for place in places], longest)
            for place, (tokens, _) in zip(places, said, strict=True):
                found[place] = bound.spell(tokens)
    return found


def phrase_figures(said: Sequence[str], meant: Sequence[str]) -> dict[str, float]:
    """The share of answers that are right to the letter, in percent, and the mean token F1."""
    right = sum(one.strip() == other.strip() for one, other in zip(said, meant, strict=True))
    shares = [token_f1(one, other) for one, other in zip(said, meant, strict=True)]
    return {"generated_match": 100 * right / len(meant), "token_f1": sum(shares) / len(shares), "generated": len(meant)}
