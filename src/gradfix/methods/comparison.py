"""Compare methods side by side under one label budget, and say which one to ship.

Work is done in units of one method on one few-shot set. With a work folder each finished unit is a small
file, written whole or not at all: a killed run loses at most the unit it was in, and a repeated run
gives the same JSON, timings included."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradfix.checkpoints.folder import versions
from gradfix.checkpoints.open import Source
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.methods.changed import changed_examples
from gradfix.methods.leads import packed
from gradfix.methods.method import CEILING, FLOOR, NotHere, Outcome, Traits
from gradfix.methods.methods import METHODS
from gradfix.methods.opening import Opened, Request, open_old
from gradfix.methods.results import HAD, Results
from gradfix.methods.search import Search
from gradfix.methods.speaking import SpokenFigures
from gradfix.methods.support import NO_LABELS, Support
from gradfix.methods.trial import Passes, Trial
from gradfix.methods.yardsticks import had, tokens_seen, trained_weights
from gradfix.registry import unknown
from gradfix.tasks.base import Bound, Task
from gradfix.tasks.reading import speaks
from gradfix.training.free_text import Speech
from gradfix.training.lowrank import moved_by
from gradfix.vectors.diagnostics import sign_agreement
from gradfix.vectors.signvotes import SignVotes

Progress = Callable[[str, int, int], None]
Unit = dict[str, Any]
ANSWERS = "answers"  # the regime of a budget of no labels
ROW = (
    *("method", "accuracy", "alpha", "margin", "seconds", "validation_accuracy", "validation_score", "test_loss"),
    *("slope", "kept", "flops", "notes", "held_right"),
)


def compare(
    *,
    base: Source,
    tuned: Source,
    target: Source | Bound,
    data: Any,
    task: str | Task | None = None,
    target_tuned: Source | None = None,
    shots: Sequence[int] = (5,),
    seeds: Sequence[int] = (0,),
    methods: Iterable[str] | None = None,
    validation: Any = "auto",
    unlabelled: Any = None,
    head: str = "error",
    strict: bool = False,
    align: str = "none",
    work: str | os.PathLike[str] | None = None,
    search: Search | None = None,
    finetune: Mapping[str, Any] | bool = True,
    task_options: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    engine: str = "auto",
    allow_fewer: bool = False,
    speech: Speech | None = None,
    general: Sequence[str] | None = None,
    pair: str | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> Results:
    """Every method on every few-shot set; see `METHODS` for the names.

    `target` is a checkpoint or an opened one. `data` needs the splits train (the few-shot sets are drawn from
    it) and test. `validation` is "auto" (the data's own split when there is one), "none" (everything is chosen
    on held-out folds of the few-shot set) or other data. `unlabelled` inputs are for the method `best`, and for a budget
    of 0: methods that need no labels, judged by the old fine-tune's answers. `head`,
    `strict` and `align` are those of `transport`. The references `oracle` and `fine_tuned` take `target_tuned`; without it the
    target is fine-tuned on the train split (`finetune` holds the recipe's options, False leaves them out).
    `speech` says how open answers are learned, `general` are texts to measure forgetting on. `progress(what, done, total)` is called before each unit and once at the end."""
    names, explicit = _names(methods, target_tuned)
    shots, seeds = tuple(dict.fromkeys(shots)), tuple(dict.fromkeys(seeds))
    if not shots or not seeds:
        raise UsageError("give at least one budget (shots) and one seed.")
    if 0 in shots and unlabelled is None:
        raise UsageError(NO_LABELS)
    request = Request(
        base=base, tuned=tuned, target=target, target_tuned=target_tuned, data=data, task=task,
        validation=validation, unlabelled=unlabelled, head=head, strict=strict, align=align,
        finetune=finetune if any(METHODS[name].traits.reference for name in names) else False,
        task_options=task_options or {}, search=search or Search(), dtype=dtype, device=device,
        passes=Passes(batch_size=batch_size, engine=engine, allow_fewer=allow_fewer),
        work=Path(work) if work is not None else None, speech=speech or Speech(), general=general,
    )  # fmt: skip
    run = _Run(Opened(request), shots, seeds, names, explicit=explicit, progress=progress)
    return run.results(pair, command)


def _names(methods: Iterable[str] | None, target_tuned: Source | None) -> tuple[list[str], bool]:
    if methods is None:
        return list(METHODS), False
    wanted = {FLOOR, *methods} | ({CEILING} if target_tuned is not None else set())
    for name in wanted:
        if name not in METHODS:
            raise UsageError(unknown("method", name, list(METHODS)))
    return [name for name in METHODS if name in wanted], True


class _Run:
    """The units of one comparison, done or read back."""

    def __init__(
        self,
        opened: Opened,
        shots: Sequence[int],
        seeds: Sequence[int],
        names: Sequence[str],
        *,
        explicit: bool,
        progress: Progress | None,
    ) -> None:
        self.opened, self.trial = opened, opened.trial
        if not explicit and not speaks(self.trial.bound):
            names = [name for name in names if not METHODS[name].traits.open_only]
        self.shots, self.seeds, self.names, self.explicit = shots, seeds, list(names), explicit
        self.progress, self.trial.planned = progress, self.names
        self.parameters, self.tokens = trained_weights(opened.bound), tokens_seen(opened.trial)
        self.left_out: dict[str, str] = {}
        self.slopes = any(METHODS[name].traits.gradient for name in names)
        self._fixed: dict[str, Unit] = {}
        self._spoken: SpokenFigures | None = None

    def results(self, pair: str | None, command: str | None) -> Results:
        units = self.all()
        rows = [self.row(unit, k, seed, pair) for k in self.shots for seed in self.seeds for unit in units[k, seed]]
        kept = [
            name for name in self.names if any(unit["method"] == name for group in units.values() for unit in group)
        ]
        provenance = {
            "pair": pair, "command": command, **self.opened.provenance(),
            "shots": list(self.shots), "seeds": list(self.seeds),
        }  # fmt: skip
        details = {
            **self.details(units, pair),
            "titles": {name: METHODS[name].title for name in kept},
            "traits": {name: METHODS[name].traits.as_json() for name in kept},
            "versions": versions(),
            "had": self.had(pair),
            "notes": self.notes,
        }
        judged = Results.build(rows, **details)
        changed = self.changed(judged.verdict, units, pair)
        return Results.build(rows, **details, changed=changed, provenance=[provenance])

    def had(self, pair: str | None) -> list[dict[str, Any]]:
        """The old fine-tune on its own base, on test."""
        folder, key = self.opened.folder, {"method": HAD}
        found = folder.read_unit(key) if folder is not None else None
        if found is None:
            opened = self.opened
            found = {"score": had(self.trial, lambda: open_old(opened.trio, self.trial, opened.task))}
            if folder is not None:
                folder.write_unit(key, found)
        score = found["score"]
        return [] if score is None else [{"pair": pair, "measure": self.trial.bound.measure, **_numbers(score)}]

    @property
    def notes(self) -> list[str]:
        missing = [f"{name} was left out: {why}" for name, why in self.left_out.items()]
        mute = [name for name in self.names if not self.fits(name, 0) and name not in self.left_out]
        if 0 in self.shots and mute:
            missing.append(f"without labels {', '.join(mute)} cannot run and were left out of that budget")
        return list(dict.fromkeys([*self.opened.notes, *self.trial.notes, *self.trial.bound.cuts(), *missing]))

    def all(self) -> dict[tuple[int, int], list[Unit]]:
        done, total = 0, len(self.shots) * len(self.seeds) * len(self.names)
        units: dict[tuple[int, int], list[Unit]] = {}
        for shots in self.shots:
            for seed in self.seeds:
                units[shots, seed] = []
                for name in self.names:
                    if self.progress is not None:
                        self.progress(f"{METHODS[name].title}, {shots} per class, seed {seed}", done, total)
                    unit = self._unit(name, shots, seed)
                    done += 1
                    if unit is not None:
                        units[shots, seed].append(unit)
        if self.progress is not None:
            self.progress("done", total, total)
        return units

    @staticmethod
    def fits(name: str, shots: int) -> bool:
        """Whether a method can do with so many labels per class; references know what no user does."""
        traits = METHODS[name].traits
        return shots > 0 or not traits.labels or traits.reference

    def _unit(self, name: str, shots: int, seed: int) -> Unit | None:
        if name in self.left_out or not self.fits(name, shots):
            return None
        fixed = METHODS[name].traits.fixed and self.trial.regime == "validation"
        if fixed and name in self._fixed:
            return self._fixed[name]
        key = {"method": name, "sets": self._sets() if fixed else [[shots, seed]], "slopes": self.slopes}
        folder = self.opened.folder
        unit = folder.read_unit(key) if folder is not None else None
        if unit is not None:
            self.trial.notes += unit.get("said", ())
        else:
            before = len(self.trial.notes)
            try:
                unit = self._work(name, shots, seed, fixed)
            except (NotHere, IncompatibleCheckpoints) as error:
                if self.explicit and not isinstance(error, NotHere):
                    raise
                self.left_out[name] = str(error)
                return None
            unit["said"] = self.trial.notes[before:]  # the run that reads this unit back says it too
            if folder is not None:
                folder.write_unit(key, unit)
        if fixed:
            self._fixed[name] = unit
        return unit

    def _sets(self) -> list[list[int]]:
        return [[shots, seed] for shots in self.shots for seed in self.seeds]

    def _work(self, name: str, shots: int, seed: int, fixed: bool) -> Unit:
        support = self.trial.support(shots, seed)
        start = time.perf_counter()
        self.trial.open_bill()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            outcome = METHODS[name].run(self.trial, support)
        work = self.trial.bill.total(time.perf_counter() - start)
        unit = self._measure(outcome, METHODS[name].traits, support, fixed)
        given = METHODS[name].traits.reference and self.opened.request.target_tuned is not None
        return {
            **unit,
            "method": name,
            "seconds": round(work.seconds, 4),
            "flops": None if given else work.flops(self.parameters, self.tokens),
        }

    def _measure(self, outcome: Outcome, traits: Traits, support: Support, fixed: bool) -> Unit:
        """Score what the method would ship; nothing here flows back into a choice."""
        trial, update = self.trial, outcome.update
        sets = self._sets() if fixed else [[support.shots, support.seed]]
        before = {f"{k}-{s}": self._loss_before(k, s) for k, s in sets}
        if self._spoken is None and speaks(trial.bound):
            self._spoken = SpokenFigures(trial, trial.splits.test, self.opened.request.general)
        with moved_by(trial.model, update if update is not None else {}, outcome.alpha):
            score, answers = trial.predictions("test") if trial.splits.test else (None, [])
            spoken = self._spoken.take() if self._spoken is not None else None
            after = {f"{k}-{s}": self._loss(k, s) for k, s in sets}
        parts = dict(outcome.parts)
        if outcome.votes is not None and traits.drawn is not None:
            parts.update(vote_details(trial, outcome.votes))
        slope = None
        if self.slopes and update is not None and not fixed and support.examples:
            gradient = support.gradient(support.whole)
            shared = [name for name in update if name in gradient]
            slope = outcome.alpha * update.subset(shared).dot(gradient.subset(shared))
        return {
            "accuracy": score.accuracy if score else None,
            "test_loss": _finite(score.loss) if score else None,
            "measures": score.measures() if score else {},
            "alpha": outcome.alpha,
            "margin": outcome.margin,
            "validation_accuracy": outcome.score.accuracy if outcome.score else None,
            "validation_score": outcome.score.value if outcome.score else None,
            "held_right": packed(outcome.score.marks) if outcome.score else None,
            "held_losses": [_finite(loss) for loss in outcome.score.losses] if outcome.score else [],
            "loss_before": before,
            "loss_after": after,
            "slope": _finite(slope),
            "kept": parts.pop("kept_share", None),
            "notes": list(outcome.notes),
            "parts": parts,
            "answers": answers,
            **({"spoken": spoken} if spoken is not None else {}),
        }

    def _loss_before(self, shots: int, seed: int) -> float | None:
        name = self.trial.few_shot_set(shots, seed)
        return _finite(self.trial.untouched(name).loss) if shots else None

    def _loss(self, shots: int, seed: int) -> float | None:
        return _finite(self.trial.score(self.trial.few_shot_set(shots, seed)).loss) if shots else None

    def row(self, unit: Unit, shots: int, seed: int, pair: str | None) -> dict[str, Any]:
        """The public row of a unit."""
        here = f"{shots}-{seed}"
        fixed = METHODS[unit["method"]].traits.fixed and self.trial.regime == "validation"
        parts = {
            name: unit["parts"][name] for name in ("rate", "steps", "start_alpha", "tie_rate") if name in unit["parts"]
        }
        if unit.get("measures"):
            parts["measures"] = unit["measures"]
        found = len(self.trial.examples[self.trial.few_shot_set(shots, seed)])
        return {
            **{"pair": pair, "task": Path(self.opened.dataset.source).name, "shots": shots, "seed": seed},
            **{name: unit[name] for name in ROW},
            "held_losses": unit.get("held_losses", []),  # work of an older version has none
            **{name: unit[name][here] for name in ("loss_before", "loss_after")},
            **{"recovered": None, "regime": self._regime(shots), "test_samples": len(self.opened.splits.test)},
            "measure": self.trial.bound.measure,
            "samples": 0 if fixed else found,
            **parts,
            **spoken_columns(unit),
        }

    def _regime(self, shots: int) -> str:
        return self.trial.regime if shots or self.trial.regime == "validation" else ANSWERS

    def details(self, units: Mapping[tuple[int, int], Sequence[Unit]], pair: str | None) -> dict[str, Any]:
        """Curves, agreement and kept shares for the report."""
        found: dict[str, list[dict[str, Any]]] = {"curves": [], "agreement": [], "kept": [], "samples": []}
        for (shots, seed), group in units.items():
            for unit in group:
                where = {"pair": pair, "shots": shots, "seed": seed, "method": unit["method"]}
                parts = unit["parts"]
                if self._spoken is not None and seed == self.seeds[0]:
                    found["samples"].append({**where, **self._spoken.told(unit["spoken"], parts)})
                if "curve" in parts:
                    drawn = {"rule": parts.get("rule"), "points": parts["curve"], "best": unit["alpha"]}
                    if self.trial.bound.measure != "accuracy":
                        drawn["measure"] = self.trial.bound.measure
                    found["curves"].append({**where, **drawn})
                if "agreement" in parts:
                    seen = {"rule": parts["rule"], "with": parts["agreement_with"], "blocks": parts["agreement"]}
                    found["agreement"].append({**where, **seen})
                if "kept" in parts and METHODS[unit["method"]].traits.keeps:
                    found["kept"].append({**where, "blocks": parts["kept"]})
        return found

    def changed(
        self, verdict: Mapping[str, Any], units: Mapping[tuple[int, int], Sequence[Unit]], pair: str | None
    ) -> list[dict[str, Any]]:
        """Test examples on which the shipped method answers differently from the target as it is."""
        if not self.opened.splits.test:
            return []
        shots, seed = verdict["shots"], self.seeds[0]
        group = {unit["method"]: unit for unit in units[shots, seed]}
        name = verdict.get("refused") or verdict["method"]
        if name == FLOOR:
            moved = [unit for unit in group.values() if not METHODS[unit["method"]].traits.reference]
            name = max(moved, key=lambda unit: (unit["validation_score"], unit["alpha"]))["method"]
        before, after = group[FLOOR]["answers"], group[name]["answers"]
        found = changed_examples(self.opened.splits.test, self.trial.bound.labels, before, after)
        return [{"pair": pair, "method": name, "shots": shots, "seed": seed, **found}]


def spoken_columns(unit: Unit) -> dict[str, Any]:
    """Of open answers: the share of the gain is one in the loss, and what was generated and forgotten stands beside it."""
    figures = unit.get("spoken")
    if figures is None:
        return {}
    return {"gain": "loss", **{name: value for name, value in figures.items() if name != "samples"}}


def vote_details(trial: Trial, votes: SignVotes) -> dict[str, Any]:
    """What the votes look like, for the report: not part of any method's cost."""
    known = trial.tuned_target()
    return {
        "rule": votes.rule,
        "agreement": sign_agreement(votes, known if known is not None else trial.tau),
        "agreement_with": "the target's own fine-tune" if known is not None else "the task vector",
        "tie_rate": votes.tie_rate(),
    }


def _numbers(score: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in score.items()}


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a loss that overflowed is reported as unknown."""
    return value if value is not None and math.isfinite(value) else None
