"""The methods, each declared once: how it runs, what it costs, how it is judged, shipped and drawn.

A method is a function of a trial and a few-shot set. It returns the update it would ship and the alpha it would
ship it with. It may look at the few-shot set and at what `Trial.choose` measures; it never sees the test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradfix.errors import UsageError
from gradfix.methods import speaking, trained
from gradfix.methods.masked import Masked, masked_by
from gradfix.methods.method import (
    ADDED,
    ALIGNED,
    CEILING,
    FLOOR,
    FREE,
    METHODS as METHODS,  # noqa: PLC0414  filled by this module
    STEPPED,
    TRAINED,
    TRAINED_IN_FULL,
    TURNED,
    VOTED,
    NotHere,
    Outcome,
    Traits,
    method,
)
from gradfix.methods.support import Support
from gradfix.methods.trial import Trial
from gradfix.registry import unknown
from gradfix.training.costs import Work
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import transport

TURNED_WAY = (
    ": the difference of the first two was turned to the units of the third, by comparing what both bases make of the "
    "same inputs, and added."
)


@method(
    FLOOR, "Target as it is", cost=FREE, transports=False, fixed=True, baseline=True, ships=False, across=True,
    labels=False,
)  # fmt: skip
def zero_shot(trial: Trial, support: Support) -> Outcome:
    return Outcome(None, 0.0, score=support.untouched())


method("naive", "Plain addition", cost=ADDED, fixed=True, baseline=True, drawn=("third", "No mask"))(Masked("none"))
STEPS: dict[str, Any] = {"transports": False, "baseline": True, "across": True, "scaled": False}
method("one_step", "One AdamW step", cost=STEPPED, **STEPS)(trained.one_step)
method("few_shot", "Few-shot fine-tuning", cost=TRAINED, **STEPS)(trained.polish)
method("few_shot_lora", "Few-shot LoRA", open_only=True, **STEPS)(speaking.few_shot_lora)
method("copy_adapter", "Copied adapter", cost=ADDED, baseline=True, fixed=True, open_only=True)(speaking.copy_adapter)
method("gradfix", "GradFix", cost=VOTED, keeps=True, drawn=("main", "Majority vote"))(Masked())
method("gradfix_mean", "GradFix, mean vote", cost=VOTED, gradient=True, keeps=True, drawn=("second", "Mean vote"))(
    Masked(vote="mean")
)
method("force", "Forced signs", cost=VOTED)(Masked("force"))
method("magnitude", "Soft agreement", cost=VOTED, gradient=True, keeps=True)(Masked("magnitude"))
method("random", "Random mask", cost=ADDED, control=True)(Masked("random"))
method("random_tau", "Random vector", control=True)(Masked(noise=True))
method("veto", "GradFix, veto", cost=VOTED, keeps=True)(Masked("veto"))


@method(
    "veto_polish",
    "Veto, then few-shot",
    scaled=False,
    way=": the difference of the first two was masked by the signs of gradients of a few labelled examples and added "
    "to the third, which was then fine-tuned on the same examples.",
)
def veto_polish(trial: Trial, support: Support) -> Outcome:
    """Transport with the veto, then fine-tune on the same few-shot set."""
    choice = Masked("veto").choice(trial, support)
    outcome = trained.polish(trial, support, lambda view: choice.setting.make(view) * choice.alpha)
    return replace(
        outcome,
        margin=choice.setting.knobs["margin"],
        notes=(*choice.notes, *outcome.notes),
        parts={**outcome.parts, "start_alpha": choice.alpha},
    )


method("transfusion", "TransFusion", fixed=True)(Masked("none", align="transfusion"))
method("rebasin", "Re-Basin", fixed=True)(Masked("none", align="rebasin"))
method("align_mask", "Align, then mask", cost=ALIGNED, keeps=True)(Masked(align="transfusion"))

for how, title in (("theseus", "Theseus"), ("bico", "BiCo")):
    method(how, title, cost=TURNED, unlabelled=True, across=True, labels=False, way=TURNED_WAY)(
        Masked("none", align=how)
    )
method("bico_mask", "BiCo, then mask", unlabelled=True, across=True, keeps=True, way=TURNED_WAY)(Masked(align="bico"))
method("bico_veto", "BiCo, then veto", unlabelled=True, across=True, keeps=True, way=TURNED_WAY)(
    Masked("veto", align="bico")
)


method(
    "best",
    "Best recipe",
    favoured=True,
    scaled=False,
    unlabelled=True,
    across=True,
    labels=False,
    way=" by the best recipe: it was moved along the difference of the first two (as it is or in the new base's "
    "coordinates) as far as the fine-tune's answers agreed, then trained for a few dozen steps to answer as the fine-tune does.",
)(trained.by_recipe)


@method("oracle", "Oracle mask", reference=True, fixed=True, keeps=True, ships=False)
def oracle(trial: Trial, support: Support) -> Outcome:
    """The mask by the signs of the target's own task vector: an upper reference."""
    known = _known(trial)
    return masked_by(trial, support, lambda view: transport(trial.tau, known))


@method(
    CEILING, "Full fine-tuning", cost=TRAINED_IN_FULL, reference=True, transports=False, fixed=True, ships=False,
    across=True, scaled=False,
)  # fmt: skip
def fine_tuned(trial: Trial, support: Support) -> Outcome:
    known = _known(trial)
    return Outcome(known, 1.0, score=trained.scored(trial, support, lambda view: known))


def _known(trial: Trial) -> TaskVector:
    known = trial.tuned_target()
    if known is None:
        raise NotHere(
            "no fine-tuned target was given (--target-tuned), and fine-tuning it was not asked for (--finetune-target)."
        )
    return known


def traits_of(name: str, kept: Mapping[str, Any] | None = None) -> Traits:
    """The traits that a results file kept for the method, or those of the method as it is known here."""
    if kept:
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
        return Traits(**known)
    return METHODS[name].traits if name in METHODS else Traits()


def flops(
    name: str, parameters: int, samples: int, *, tokens: float = 1.0, steps: int = 1, scored: int = 0, settings: int = 1
) -> float:
    """Operations of one run of a method on `samples` labelled samples (per step, where it takes `steps`).

    `scored` validation samples times `settings` tried (alphas, margins) is the price of choosing, which
    the usual tables leave out; it is added when given."""
    cost = METHODS[name].cost if name in METHODS else None
    if cost is None:
        raise UsageError(unknown("costed method", name, [n for n, m in METHODS.items() if m.cost is not None]))
    return (cost.work(samples, steps) + Work(forward=scored * settings)).flops(parameters, tokens)
