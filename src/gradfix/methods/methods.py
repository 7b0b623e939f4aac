"""The methods that `compare` puts side by side, each one function of an arena and a few-shot set.

A method returns the update it would ship and the alpha it would ship it with. It may look at the few-shot
set and at what `Arena.choose` measures; it never sees the test split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfix.errors import DataError, GradfixError
from gradfix.methods.search import Choice, Score, Setting, View
from gradfix.methods.support import Support
from gradfix.methods.trial import Arena
from gradfix.registry import Registry
from gradfix.system.modules import restored
from gradfix.training.costs import Work
from gradfix.training.fewshot import tune
from gradfix.vectors.diagnostics import kept_by_block, sign_agreement
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import Transported, apply, random_like, transport

ONE_STEP_RATE = 1e-5


class NotHere(GradfixError):
    """A method cannot run on this input; compare leaves it out and says why."""


@dataclass(frozen=True)
class Outcome:
    """What a method would ship: `target + alpha * update`, or the target as it is.

    `score` is what its choices were made on. `parts` are details for the report."""

    update: TaskVector | None
    alpha: float
    margin: float | None = None
    score: Score | None = None
    notes: tuple[str, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A function of (arena, support) and what the verdict must know about it.

    `reference`: not a candidate, it uses what a user does not have. `transports`: it moves the task vector.
    `fixed`: with a validation split it depends on neither shots nor seed."""

    run: Callable[[Arena, Support], Outcome]
    title: str
    reference: bool = False
    transports: bool = True
    fixed: bool = False
    control: bool = False


METHODS: Registry[Method] = Registry("method")

Run = Callable[[Arena, Support], Outcome]


def method(name: str, title: str, **traits: bool) -> Callable[[Run], Run]:
    """Register a method: `@method("veto", "GradFix, veto")` over a function of arena and support."""

    def add(run: Run) -> Run:
        METHODS.register(name)(Method(run, title, **traits))
        return run

    return add


@method("zero_shot", "Target as it is", transports=False, fixed=True)
def zero_shot(arena: Arena, support: Support) -> Outcome:
    return Outcome(None, 0.0, score=support.untouched())


@method("naive", "Plain addition", fixed=True)
def naive(arena: Arena, support: Support) -> Outcome:
    """B + alpha * tau."""
    return _shipped(arena, arena.choose(support, [Setting({}, lambda view: arena.tau, "tau")]), support)


@method("one_step", "One AdamW step", transports=False)
def one_step(arena: Arena, support: Support) -> Outcome:
    """The paper's few-shot baseline: one step at 1e-5 on the whole few-shot set, nothing chosen."""
    update = _tuned(arena, support, support.whole, ONE_STEP_RATE, 1, batch=len(support.examples))
    score = _pooled(
        arena, support, lambda view: _tuned(arena, support, view, ONE_STEP_RATE, 1, batch=len(view.fit))
    )
    return Outcome(update, 1.0, score=score)


@method("few_shot", "Few-shot fine-tuning", transports=False)
def few_shot(arena: Arena, support: Support) -> Outcome:
    """AdamW with rate and steps chosen like every other knob; no step at all is a candidate."""
    return _polish(arena, support, None)


@method("gradfix", "GradFix")
def gradfix(arena: Arena, support: Support) -> Outcome:
    return _masked(arena, support, lambda view: transport(arena.tau, support.votes(view)), votes="majority")


@method("gradfix_mean", "GradFix, mean vote")
def gradfix_mean(arena: Arena, support: Support) -> Outcome:
    return _masked(
        arena, support, lambda view: transport(arena.tau, support.votes(view, "mean")), votes="mean"
    )


@method("force", "Forced signs")
def force(arena: Arena, support: Support) -> Outcome:
    return _masked(arena, support, lambda view: transport(arena.tau, support.votes(view), "force"))


@method("magnitude", "Soft agreement")
def magnitude(arena: Arena, support: Support) -> Outcome:
    return _masked(arena, support, lambda view: transport(arena.tau, -support.gradient(view), "magnitude"))


@method("random", "Random mask", control=True)
def random_mask(arena: Arena, support: Support) -> Outcome:
    return _masked(arena, support, lambda view: transport(arena.tau, mask="random", generator=support.seed))


@method("random_tau", "Random vector", control=True)
def random_tau(arena: Arena, support: Support) -> Outcome:
    """The control for the task vector: noise of tau's mean and spread under the same mask."""
    noise = random_like(arena.tau, support.seed)
    noise = noise.map(
        lambda name, tensor: tensor if bool(arena.tau[name].any()) else torch.zeros_like(tensor)
    )
    return _masked(arena, support, lambda view: transport(noise, support.votes(view)))


@method("veto", "GradFix, veto")
def veto(arena: Arena, support: Support) -> Outcome:
    """Drop only what the vote opposes with confidence; the margin is chosen with alpha."""
    choice = _veto_choice(arena, support)
    margin = choice.setting.knobs["margin"]
    moved = transport(arena.tau, support.votes(support.whole), "veto", margin=margin)
    return _shipped(arena, choice, support, moved=moved, margin=margin)


@method("veto_polish", "Veto, then few-shot")
def veto_polish(arena: Arena, support: Support) -> Outcome:
    """Transport with the veto, then fine-tune on the same few-shot set."""
    choice = _veto_choice(arena, support)
    margin = choice.setting.knobs["margin"]
    outcome = _polish(arena, support, lambda view: choice.setting.make(view) * choice.alpha)
    return Outcome(
        outcome.update, outcome.alpha, margin, outcome.score, (*choice.notes, *outcome.notes),
        {**outcome.parts, "start_alpha": choice.alpha},
    )  # fmt: skip


@method("transfusion", "TransFusion", fixed=True)
def transfusion(arena: Arena, support: Support) -> Outcome:
    return _aligned(arena, support, "transfusion")


@method("rebasin", "Re-Basin", fixed=True)
def rebasin(arena: Arena, support: Support) -> Outcome:
    return _aligned(arena, support, "rebasin")


@method("align_mask", "Align, then mask")
def align_mask(arena: Arena, support: Support) -> Outcome:
    moved = arena.aligned("transfusion")
    return _masked(arena, support, lambda view: transport(moved, support.votes(view)))


@method("oracle", "Oracle mask", reference=True, fixed=True)
def oracle(arena: Arena, support: Support) -> Outcome:
    """The mask by the signs of the target's own task vector: an upper reference."""
    known = _known(arena)
    return _masked(arena, support, lambda view: transport(arena.tau, known))


@method("fine_tuned", "Full fine-tuning", reference=True, transports=False, fixed=True)
def fine_tuned(arena: Arena, support: Support) -> Outcome:
    known = _known(arena)
    return Outcome(known, 1.0, score=_pooled(arena, support, lambda view: known))


@method("best", "Best recipe")
def best(arena: Arena, support: Support) -> Outcome:
    """A scaled transport, then lessons from the tuned old model; see `gradfix.training.best`."""
    from gradfix.training.best import best_outcome

    return best_outcome(arena, support)


def _known(arena: Arena) -> TaskVector:
    known = arena.tuned_target()
    if known is None:
        raise NotHere("no fine-tuned target was given, and fine-tuning it was not allowed or not possible.")
    return known


def _aligned(arena: Arena, support: Support, how: str) -> Outcome:
    moved = arena.aligned(how)
    return _shipped(arena, arena.choose(support, [Setting({}, lambda view: moved)]), support)


def _masked(
    arena: Arena, support: Support, make: Callable[[View], Transported], votes: str | None = None
) -> Outcome:
    choice = arena.choose(support, [Setting({}, lambda view: make(view).update)])
    outcome = _shipped(arena, choice, support, moved=make(support.whole))
    if votes is not None:
        outcome.parts["votes"] = votes
    return outcome


def _shipped(
    arena: Arena,
    choice: Choice,
    support: Support,
    *,
    moved: Transported | None = None,
    margin: float | None = None,
) -> Outcome:
    update = moved.update if moved is not None else choice.setting.make(support.whole)
    parts: dict[str, Any] = {"curve": choice.curve.accuracies()}
    if moved is not None:
        sizes = {name: int(arena.tau[name].count_nonzero()) for name in update}
        changed = {name: share for name, share in moved.kept.items() if sizes[name]}
        parts["kept"] = kept_by_block(changed, sizes)
        parts["kept_share"] = sum(share * sizes[name] for name, share in changed.items()) / sum(
            sizes.values()
        )
    return Outcome(update, choice.alpha, margin, choice.curve.score, choice.notes, parts)


def vote_details(arena: Arena, support: Support, rule: str) -> dict[str, Any]:
    """What the votes look like, for the report: not part of any method's cost."""
    votes = support.votes(support.whole, rule)
    known = arena.tuned_target()
    return {
        "agreement": sign_agreement(votes, known if known is not None else arena.tau),
        "agreement_with": "the target's own fine-tune" if known is not None else "the task vector",
        "tie_rate": votes.tie_rate(),
    }


def _veto_choice(arena: Arena, support: Support) -> Choice:
    settings: dict[int, Setting] = {}
    for margin in arena.search.margins:
        # Margins between two vote counts give the same mask; ask once.
        settings.setdefault(int(margin * len(support.examples) + 1e-9), _vetoed(arena, support, margin))
    return arena.choose(support, list(settings.values()))


def _vetoed(arena: Arena, support: Support, margin: float) -> Setting:
    def make(view: View) -> TaskVector:
        return transport(arena.tau, support.votes(view), "veto", margin=margin).update

    # At margin 1 nothing can be vetoed, but a tensor without votes is dropped all the same.
    if margin == 1 and set(arena.tau) <= set(support.votes(support.whole)):
        return Setting({"margin": margin}, lambda view: arena.tau, "tau")
    return Setting({"margin": margin}, make)


def _pooled(arena: Arena, support: Support, make: Callable[[View], TaskVector]) -> Score:
    """A fixed update's score where choices are made: nothing is chosen."""
    scores = []
    for view in support.views():
        update = make(view)
        with restored(arena.model):
            apply(arena.model, update)
            scores.append(arena.score(view.held))
    return sum(scores[1:], scores[0])


def _polish(arena: Arena, support: Support, start: Callable[[View], TaskVector] | None) -> Outcome:
    """Few-shot fine-tuning from the target, or from the target plus `start`; rate and steps are chosen."""
    search, views = arena.search, support.views()
    untouched = support.untouched() if start is None else _pooled(arena, support, start)
    scores: dict[tuple[float, int], Score] = {(0.0, 0): untouched}
    update, notes = None, []
    for rate in search.rates:
        found: dict[int, Score] = {}
        try:
            for view in views:
                for steps, score, before in _path(arena, support, view, rate, start):
                    found[steps] = found[steps] + score if steps in found else score
                    if len(views) == 1 and score.value > max(known.value for known in scores.values()):
                        update = _moved(arena, before)
                    if len(views) == 1:
                        scores[rate, steps] = score
        except DataError as error:
            notes.append(str(error))
            continue
        scores.update({(rate, steps): score for steps, score in found.items()})
    rate, steps = max(scores, key=lambda knobs: scores[knobs].value)  # of equals the first tried
    parts: dict[str, Any] = {"rate": rate, "steps": steps}
    if (rate, steps) == (max(search.rates), max(search.steps)):
        notes.append("the largest rate and step count tried were best: a wider search may do better")
    if not steps:
        notes.append("no step scored best: fine-tuning on these examples does not help")
        update = start(support.whole) if start is not None else None
        return Outcome(update, float(update is not None), score=untouched, notes=tuple(notes), parts=parts)
    if update is None:  # folds chose the knobs; the whole set now makes the update
        update = _tuned(arena, support, support.whole, rate, steps, batch=search.step_batch, start=start)
    return Outcome(update, 1.0, score=scores[rate, steps], notes=tuple(notes), parts=parts)


def _path(
    arena: Arena, support: Support, view: View, rate: float, start: Callable[[View], TaskVector] | None
) -> Iterator[tuple[int, Score, dict[str, Tensor]]]:
    """Steps done, the score there and the untouched weights; the model is the trained one meanwhile."""
    search = arena.search
    with restored(arena.model) as before:
        if start is not None:
            apply(arena.model, start(view))
        done = Work()
        for steps, work in tune(
            arena.bound, view.fit, rate=rate, stops=search.steps, batch=search.step_batch, seed=support.seed
        ):
            yield steps, arena.score(view.held), before
            done = work
        arena.bill.own += done


def _moved(arena: Arena, before: Mapping[str, Tensor]) -> TaskVector:
    return TaskVector({name: p.detach() - before[name] for name, p in arena.model.named_parameters()})


def _tuned(
    arena: Arena,
    support: Support,
    view: View,
    rate: float,
    steps: int,
    *,
    batch: int,
    start: Callable[[View], TaskVector] | None = None,
) -> TaskVector:
    """The update that `steps` steps make, from the untouched target."""
    with restored(arena.model) as before:
        if start is not None:
            apply(arena.model, start(view))
        for _, work in tune(arena.bound, view.fit, rate=rate, stops=[steps], batch=batch, seed=support.seed):
            arena.bill.own += work
        return _moved(arena, before)
