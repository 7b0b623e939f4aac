"""Natural sentences beside the few that a task has: 640 of them, on everything, written for this package.

Pieces of a handful of texts, cut and joined, leave most of the language out, and a teacher is asked about little else
than these few. A piece of a task's text next to a piece of a sentence of the bank is still near the task and brings new
words in natural company. English only: texts in another language do without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch

KNOWN = 0.4  # of the words of ten English texts 0.56 to 0.93 are in the bank, of German, French, Spanish and Dutch ones up to 0.27


@cache
def bank() -> tuple[str, ...]:
    return tuple((files("gradfix.training") / "bank.txt").read_text(encoding="utf-8").splitlines())


@cache
def _words_of_the_bank() -> frozenset[str]:
    return frozenset(word for sentence in bank() for word in _words(sentence))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def in_the_language_of_the_bank(texts: Sequence[str]) -> bool:
    words = [word for text in texts for word in _words(text)]
    return bool(words) and sum(word in _words_of_the_bank() for word in words) >= KNOWN * len(words)


def beside_sentences(texts: Sequence[str], count: int, seed: int) -> list[tuple[int, str]]:
    """A piece of a text and a piece of a sentence, in either order; and which text it was."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    def piece(words: list[str]) -> list[str]:
        length = 1 + drawn(len(words))
        start = drawn(len(words) - length + 1)
        return words[start : start + length]

    places = [place for place, text in enumerate(texts) if text.split()]
    sentences = bank()
    order = torch.randperm(len(sentences), generator=generator).tolist()
    made = []
    for turn in range(count if places else 0):
        place = places[drawn(len(places))]
        pieces = [piece(texts[place].split()), piece(sentences[order[turn % len(order)]].split())]
        if drawn(2):
            pieces.reverse()
        made.append((place, " ".join(pieces[0] + pieces[1])))
    return made
