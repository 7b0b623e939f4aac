"""Open answers in `gradfix transport`: how they are learned, and the figures people ask for.

Losses per token are in the score; here are generated answers (exact match, token F1, three to read) and forgetting: the
loss on general text and the divergence from the new base outside the task, before and after."""

from __future__ import annotations

from typing import Any

from gradfix.checkpoints.matched import read_vocabulary
from gradfix.checkpoints.open import resolve
from gradfix.commands.configs import CompareConfig, TransportConfig, given
from gradfix.commands.setting import Prepared, Shots, read_unlabelled
from gradfix.errors import UsageError
from gradfix.methods.speaking import SHOWN, SpokenFigures, prompt_text
from gradfix.methods.trial import Trial
from gradfix.registry import unknown
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.reading import speaks
from gradfix.training.asking import Asking
from gradfix.training.free_text import LORA, TRAINS, Speech
from gradfix.training.imitating import Imitation, same_tokens

STRAYS = ("train", "answer_tokens", "prompts", "lessons", "general")


def speech_from(config: TransportConfig | CompareConfig, shown: tuple[Example, ...] = ()) -> Speech:
    if config.train not in TRAINS:
        raise UsageError(unknown("--train", config.train, list(TRAINS)))
    adapter = getattr(config, "out_lora", None)
    if adapter is not None and config.train == "full":
        adapter = None  # the trained weights are made into an adapter afterwards
    return Speech(
        asking=Asking(longest=config.answer_tokens, pool=config.prompts), imitation=Imitation(steps=config.lessons),
        train=config.train, adapter=adapter, shown=shown,
    )  # fmt: skip


def general_texts(config: TransportConfig | CompareConfig) -> list[str] | None:
    """Texts outside the task, from any data file: a text, a prompt, or the turns of a conversation."""
    if config.general is None:
        return None
    return [prompt_text(row) for row in read_unlabelled(config.general, config)]


def refuse_strays(config: TransportConfig | CompareConfig, bound: Bound) -> None:
    for name in STRAYS:
        if name in given(config) and not speaks(bound):
            word = name.replace("_", "-")
            raise UsageError(f"--{word} is for open answers, and this task has a closed label set: leave it out.")


def refuse_closed(config: TransportConfig, start: Prepared) -> None:
    if config.offload is not None and start.dataset.labels:
        raise UsageError(
            "--offload is for open answers, and this data has a closed label set: leave it out, or give several devices "
            "with --processes N --sharded."
        )


def one_tokenizer(config: TransportConfig) -> bool:
    """Whether a token of the old base's is one of the target's: only then are losses per token of the two alike."""
    theirs, own = (read_vocabulary(resolve(side)) for side in (config.base, config.target))
    return theirs is not None and own is not None and same_tokens(theirs, own)


class Telling:
    """The figures of one transport, taken before and after the move; nothing where answers are not open."""

    def __init__(self, config: TransportConfig, bound: Bound, shots: Shots) -> None:
        refuse_strays(config, bound)
        self.config, self.bound, self.general = config, bound, general_texts(config)
        self.examples = (shots.test or []) if speaks(bound) else []
        self.speech = speech_from(config, tuple(self.examples[:SHOWN]))
        self.by_lora = speaks(bound) and self.speech.trains(bound) == LORA
        self.taken: SpokenFigures | None = None
        self.figures: dict[str, Any] | None = None

    def before(self, trial: Trial) -> None:
        if speaks(self.bound):
            self.taken = SpokenFigures(trial, self.examples, self.general)
            self.figures = {"one_tokenizer": one_tokenizer(self.config), "before": self.taken.take()}

    def after(self, parts: dict[str, Any]) -> None:
        if self.taken is None or self.figures is None:
            return
        self.figures["after"] = self.taken.take()
        said = [self.figures[when].pop("samples", []) for when in ("before", "after")]
        old = parts.pop("shown", None) or [None] * len(self.taken.shown)
        self.figures["samples"] = [
            {"prompt": prompt_text(example), "reference": self.taken.bound.answer_text(example), "old_fine_tune": theirs,
             "new_base": first, "moved": last}
            for example, theirs, first, last in zip(self.taken.shown, old, *said, strict=True)
        ]  # fmt: skip
