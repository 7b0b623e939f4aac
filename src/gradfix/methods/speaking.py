"""Methods for open answers: the recipe with the teacher's answers shared, and what people do instead of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gradfix.checkpoints.lora import LoraCheckpoint
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Source, resolve
from gradfix.checkpoints.trio import Trio
from gradfix.errors import DataError, UsageError
from gradfix.methods.method import NotHere, Outcome
from gradfix.methods.search import Score, View
from gradfix.methods.support import Support
from gradfix.methods.trial import Trial
from gradfix.methods.yardsticks import had
from gradfix.system.modules import offloaded
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.loading import ADAPTER_CONFIG
from gradfix.tasks.reading import AnswerBound, speaks
from gradfix.tasks.scoring import phrase_figures, spoken
from gradfix.training import best as recipes
from gradfix.training.asking import Transcript, bare
from gradfix.training.best import Best
from gradfix.training.costs import Work
from gradfix.training.free_text import LARGE, Speech, apart, asked_of, learn
from gradfix.training.imitating import Course, given_lines, imitate
from gradfix.training.lowrank import LowRank, adapted, moved_by
from gradfix.training.retained import Outside

MEASURED, SHOWN = 64, 3  # test answers that are generated, and those that are printed
ONLY_OPEN = "it is for answers in free text, and this task has a closed label set."
LORA_RATES = (3e-4, 1e-3, 3e-3)
LORA_STEPS = (10, 20, 40, 80)


def speech_of(trial: Trial) -> Speech:
    """How this trial learns free text: interrupted work is kept where the trial keeps its votes."""
    shown = trial.speech.shown or tuple(trial.splits.test[:SHOWN])
    asking = replace(trial.speech.asking, batch=trial.passes.batch_size)
    imitation = replace(trial.speech.imitation, micro=trial.passes.batch_size)
    kept = trial.store.partial("lessons")
    return replace(trial.speech, asking=asking, imitation=imitation, kept=kept, shown=shown)


def recipe_of(trial: Trial, support: Support, examples: Sequence[Example]) -> Best:
    """Lessons for some examples of the set; the teacher is asked once for all of it.

    What came from examples that are left out is left out as well."""
    bound = _speaker(trial)
    speech, teacher = speech_of(trial), trial.teacher()

    def score() -> None:
        if teacher is not None and apart(teacher, bound):  # while it has changed places with the target
            had(trial, lambda: teacher)

    def ask() -> Transcript | None:
        return asked_of(
            teacher, bound, support.examples, trial.unlabelled, speech=speech, seed=support.seed, meanwhile=score
        )

    try:
        said: Transcript | None = trial.shared(f"said-{support.name}", ask)
        kept = {place for place, example in enumerate(support.examples) if any(example is one for one in examples)}
        if len(kept) < len(support.examples):
            speech = replace(speech, kept=None)  # a fold's lessons are soon taken again
        said = said.of_labelled(kept) if said is not None else None
        found = learn(
            bound, trial.own_tau, examples, said, teacher=teacher, old=trial.old(), speech=speech, seed=support.seed
        )
    except (DataError, UsageError) as error:
        raise NotHere(str(error)) from error
    trial.notes += [note for note in (said.notes if said is not None else ()) if note not in trial.notes]
    return recipes.spoken(found)


def factors_of(trio: Trio, bound: Bound) -> LowRank | None:
    """The task vector of an adapter as its factors, by the module's names; None where they are not all of it."""
    tuned = trio.sources["tuned"]
    factors = tuned.factors() if isinstance(tuned, LoraCheckpoint) and trio.apart is None else None
    if factors is None:
        return None
    own = {disk: name for name, disk in name_map(bound.model, trio.target.names()).renamed.items()}
    held = {f"{path}.weight" for path, module in bound.model.named_modules() if isinstance(module, nn.Linear)}
    if not all(own.get(name) in held for name in factors):
        return None
    return LowRank({own[name]: pair for name, pair in factors.items()})


def heavy(bound: Bound) -> bool:
    """Whether two models of this size are not held on one device."""
    return offloaded(bound.model) or sum(p.numel() * p.element_size() for p in bound.model.parameters()) > LARGE


def is_adapter(tuned: Source) -> bool:
    return isinstance(tuned, str | os.PathLike) and (resolve(tuned) / ADAPTER_CONFIG).is_file()


class SpokenFigures:
    """What people who use language models ask: of the model as it stands, on test answers and outside the task.

    Make it before the model is moved. `general` are texts outside the task; without any the model writes some."""

    def __init__(self, trial: Trial, examples: Sequence[Example], general: Sequence[str] | None = None) -> None:
        self.trial, self.bound = trial, _speaker(trial)
        self.examples = list(examples)[:MEASURED]
        self.shown = self.examples[:SHOWN]
        self.outside = Outside.of(self.bound, general)

    def take(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.outside.measure(self.bound) or {})
        if self.examples:
            batch = self.trial.passes.batch_size
            said = spoken(self.bound, self.trial.model, self.examples, self._longest, batch)
            meant = [self.bound.answer_text(example) for example in self.examples]
            found |= {**phrase_figures(said, meant), "samples": said[:SHOWN]}
        return found

    def told(self, figures: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
        """The answers for people to read: what was asked, what was meant, what is said."""
        said = figures.get("samples", [])
        rows = [
            {"prompt": prompt_text(example), "reference": self.bound.answer_text(example), "said": answer}
            for example, answer in zip(self.shown, said, strict=True)
        ]
        return {"rows": rows, "old_fine_tune": list(parts.get("shown", []))}

    @property
    def _longest(self) -> int:
        return 8 + max(len(self.bound.answer_ids(self.bound.answer_text(example))) for example in self.examples)


def copy_adapter(trial: Trial, support: Support) -> Outcome:
    """The adapter put onto the new base as it is: alpha 1, nothing chosen."""
    _speaker(trial)
    if not trial.lenders.adapter:
        raise NotHere("the fine-tune is no adapter that could be copied; naive adds its whole change.")
    with moved_by(trial.model, trial.tau, 1.0):
        scores = [trial.score(view.held) for view in support.views()] if trial.judged else []
    score = sum(scores[1:], scores[0]) if scores else None
    return Outcome(trial.tau, 1.0, score=score, chosen_by="given")


def few_shot_lora(trial: Trial, support: Support) -> Outcome:
    """A LoRA trained on the labelled answers alone; rate and steps are chosen as for few-shot fine-tuning.

    No step at all is a candidate."""
    bound = _speaker(trial)
    scores: dict[tuple[float, int], Score] = {(0.0, 0): support.untouched()}
    for rate in LORA_RATES:
        for view in support.views():
            found: dict[int, Score] = {}
            _lora(trial, bound, view, rate, max(LORA_STEPS), support.seed, found)
            for steps, score in found.items():
                known = scores.get((rate, steps))
                scores[rate, steps] = score if known is None else known + score
    rate, steps = max(scores, key=lambda knobs: scores[knobs].value)
    outcome = Outcome(
        None, 0.0, score=scores[rate, steps], parts={"rate": rate, "steps": steps}, chosen_by=trial.regime
    )
    if not steps:
        return replace(outcome, notes=("no step scored best: fine-tuning on these examples does not help",))
    return replace(outcome, update=_lora(trial, bound, support.whole, rate, steps, support.seed), alpha=1.0)


def _lora(
    trial: Trial,
    bound: AnswerBound,
    view: View,
    rate: float,
    steps: int,
    seed: int,
    scores: dict[int, Score] | None = None,
) -> LowRank:
    """The update of so many steps at a constant rate; `scores` are taken on the way."""
    recipe = replace(speech_of(trial).imitation, steps=steps, labelled=len(view.fit), schedule="constant")
    course = Course([], given_lines(bound, view.fit), [])

    def look(done: int) -> None:
        if scores is not None and done in LORA_STEPS:
            scores[done] = trial.score(view.held)

    with adapted(bound.model, recipe.rank) as lora:
        passes = imitate(bound, course, lora.parameters, rate, recipe, seed, at=look)
        trial.bill.own += Work(forward=passes, backward=passes, steps=steps)
        return LowRank(lora.factors())


def prompt_text(example: Example) -> str:
    """A prompt for people: a conversation without its answer, or the text."""
    shown = bare(example)
    if "messages" in shown:
        return "\n".join(str(turn["content"]) for turn in shown["messages"])
    return str(next(iter(shown.values())))


def _speaker(trial: Trial) -> AnswerBound:
    if not speaks(trial.bound):
        raise NotHere(ONLY_OPEN)
    return trial.bound
