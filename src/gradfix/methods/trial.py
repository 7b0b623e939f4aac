"""A trial: one target, one task vector, one label budget, and everything the methods share.

Votes, gradients, alignments and collated batches are made once and shared; each method is billed for
what it used. Everything a method decides is decided by `Trial.choose`, on the validation split or on held-out
folds of the few-shot set, never on both and never on test."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.trio import ACROSS
from gradfix.data import few_shot
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.methods.method import NotHere
from gradfix.methods.search import Choice, Curve, Score, Search, Setting, View
from gradfix.methods.support import Support
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Batch, Bound, Example, by_length
from gradfix.training.costs import Work
from gradfix.training.starts import Old
from gradfix.vectors.scale import Dial, dialled
from gradfix.vectors.taskvector import TaskVector

Regime = Literal["validation", "few_shot"]
CACHE_BYTES = 2**30


@dataclass
class Bill:
    """What one unit of work used: its own passes, and shared products by name."""

    own: Work = field(default_factory=Work)
    shared: dict[str, Work] = field(default_factory=dict)
    away: float = 0.0  # seconds spent making shared products inside the unit

    def total(self, wall: float) -> Work:
        own = Work(self.own.forward, self.own.backward, self.own.steps, self.own.vectors, wall - self.away)
        return sum(self.shared.values(), own)


@dataclass(frozen=True)
class Splits:
    """The examples of a trial. Few-shot sets are drawn from `train`; nobody chooses anything on `test`."""

    train: Sequence[Example]
    validation: Sequence[Example] | None = None
    test: Sequence[Example] = ()
    unlabelled: Sequence[Example] | None = None


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How examples go through the model."""

    batch_size: int = 32
    engine: str = "auto"
    allow_fewer: bool = False


@dataclass(frozen=True, kw_only=True)
class Lenders:
    """What a trial may ask for, made only when it is: tau permuted to the target, the target's own vector, the
    tuned old model, and what is known of the old side to turn its vector to the target's units."""

    aligned: Callable[[str], TaskVector] | None = None
    tuned_target: Callable[[], TaskVector] | None = None
    teacher: Callable[[], Bound | None] | None = None
    old: Callable[[Bound], Old | None] | None = None


class Trial:
    """The opened target with everything the methods share."""

    def __init__(
        self,
        bound: Bound,
        tau: TaskVector | None,
        splits: Splits,
        *,
        search: Search | None = None,
        passes: Passes | None = None,
        store: Store | None = None,
        lenders: Lenders | None = None,
        judged: bool = True,
    ) -> None:
        """`judged`: a verdict will want every method's score, also of those that choose nothing by it.

        `tau` is None where the target has another shape; then only methods that work across shapes run."""
        self.bound, self.model, self.splits, self.judged = bound, bound.model, splits, judged
        self.notes: list[str] = []
        name_map(self.model)  # loads what the first vote would, so that no method is billed for imports
        self.own_tau = self.by_module(tau) if tau is not None else None
        self.search, self.passes = search or Search(), passes or Passes()
        self.regime: Regime = "few_shot" if splits.validation is None else "validation"
        self.store, self.lenders = store or Store(), lenders or Lenders()
        self.bill = Bill()
        self._teacher: Bound | None = None
        self._old: Old | None = None
        self.examples: dict[str, Sequence[Example]] = {"test": splits.test, "validation": splits.validation or ()}
        self._batches: dict[str, list[Batch]] = {}
        self._shared: dict[str, tuple[Any, Work]] = {}
        self._support: Support | None = None

    @property
    def tau(self) -> TaskVector:
        """The task vector, weight by weight; there is none where the target has another shape."""
        if self.own_tau is None:
            raise NotHere(f"it needs weights that match one to one, and the target has another shape. {ACROSS}")
        return self.own_tau

    def by_module(self, tau: TaskVector) -> TaskVector:
        """The vector under the module's names, without tensors this model does not have or the task does not ask."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        mapped = tau if set(tau) <= set(names) else name_map(self.model, list(tau)).to_module(tau)
        odd = [name for name in mapped if name not in names and bool(mapped[name].any())]
        if odd:
            self.notes.append(f"{len(odd)} tensors of the vector are not in the target, first {odd[0]!r}.")
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own: dict[str, Tensor] = {}
        still = self.bound.unmoved()
        self.notes += [note for note in left_alone(mapped, still) if note not in self.notes]
        for name, parameter in names.items():
            if name in mapped and name not in still:  # a tied weight goes by several names, and moves once
                own.setdefault(first[id(parameter)], mapped[name].to(parameter.device))
        return TaskVector(own)

    @property
    def unlabelled(self) -> Sequence[Example]:
        """Inputs that may be asked about; nobody reads their labels."""
        return self.splits.unlabelled or self.splits.validation or ()

    # -- shared products -------------------------------------------------------------------------------

    def shared(self, key: str, make: Callable[[], Any], *, file: bool = False) -> Any:
        """Make `key` once; whoever asks is billed for it once."""
        if key not in self._shared:
            start, before = time.perf_counter(), self.bill
            self.bill = Bill()
            try:
                value, stored = self.store.load(key) if file else (None, None)
                if value is None:
                    value = make()
                    spent = time.perf_counter() - start
                    stored = self.bill.total(spent)
                    if file:
                        self.store.save(key, value, stored)
            finally:
                self.bill = before
            before.away += time.perf_counter() - start
            assert stored is not None
            self._shared[key] = (value, stored)
        value, work = self._shared[key]
        self.bill.shared[key] = work
        return value

    def open_bill(self) -> None:
        """A new unit of work starts; what it uses is written on its own bill."""
        self.bill = Bill()

    def aligned(self, method: str) -> TaskVector:
        """tau after permuting base A onto the target."""
        make = self.lenders.aligned
        if make is None:
            raise UsageError(f"{method} needs the base checkpoint to align; give base=.")
        return self.shared(f"align-{method}", lambda: self.by_module(make(method)))

    def tuned_target(self) -> TaskVector | None:
        """The target's own task vector, for the references; None where nobody can know it."""
        make = self.lenders.tuned_target
        if make is None:
            return None
        return self.shared("named-target", lambda: self.by_module(self.shared("tuned-target", make, file=True)))

    def teacher(self) -> Bound | None:
        """The tuned old model, opened once; like the target's, its opening is on nobody's bill."""
        if self._teacher is None and self.lenders.teacher is not None:
            start = time.perf_counter()
            self._teacher = self.lenders.teacher()
            self.bill.away += time.perf_counter() - start
        return self._teacher

    def old(self) -> Old | None:
        """The old side for coordinates; None where it cannot be asked."""
        teacher = self.teacher()
        if self._old is None and teacher is not None and self.lenders.old is not None:
            start = time.perf_counter()
            self._old = self.lenders.old(teacher)
            if self._old is not None and self.lenders.aligned is not None:
                self._old = replace(self._old, permuted=lambda: self.aligned("transfusion"))
            self.bill.away += time.perf_counter() - start
        return self._old

    def support(self, shots: int, seed: int) -> Support:
        if self._support is None or (self._support.shots, self._support.seed) != (shots, seed):
            for key in [key for key in self._shared if key.startswith(("votes-", "gradient-", "turned-"))]:
                del self._shared[key]
            self._batches = {name: b for name, b in self._batches.items() if not name.startswith("fold-")}
            self._support = Support(self, shots, seed)
        return self._support

    # -- scoring ---------------------------------------------------------------------------------------

    def few_shot_set(self, shots: int, seed: int) -> str:
        """Draw the set of this budget and seed and return the name of its batches."""
        name = self.set_name(shots, seed)
        if shots == 0:
            self.define(name, [])
        elif name not in self.examples:
            picked = few_shot(self.splits.train, shots, seed, self.passes.allow_fewer, self.bound.labels or None)
            self.define(name, [self.splits.train[index] for index in picked])
        return name

    @staticmethod
    def set_name(shots: int, seed: int) -> str:
        return f"few-{shots}-{seed}"

    def define(self, name: str, examples: Sequence[Example]) -> None:
        self.examples[name] = examples
        self._batches.pop(name, None)

    def batches(self, name: str) -> Iterator[Batch]:
        """Short texts first, collated once where they fit in memory: every alpha sees the same tensors."""
        if name in self._batches:
            yield from self._batches[name]
            return
        kept: list[Batch] = []
        size = 0
        for batch in self.bound.scoring_batches(self.examples[name], self.passes.batch_size):
            size += sum(t.numel() * t.element_size() for t in batch.values() if isinstance(t, Tensor))
            kept.append(batch)
            if size > CACHE_BYTES:
                kept.clear()
            yield batch
        if size <= CACHE_BYTES:
            self._batches[name] = kept

    def score(self, name: str) -> Score:
        """The model as it stands now, on one named set."""
        return self.predictions(name)[0]

    def untouched(self, name: str) -> Score:
        """The target itself on one named set; the model must not be moved when this is first asked."""
        score: Score = self.shared(f"untouched-{name}", lambda: self.score(name))
        return score

    def predictions(self, name: str) -> tuple[Score, list[int]]:
        right, loss, answers = 0, 0.0, []
        with left_as_it_was(self.model), torch.no_grad():
            for batch in self.batches(name):
                predicted, losses = self.bound.judge(self.model, batch)
                right += int((predicted == batch["labels"]).sum())
                loss += float(losses.double().sum())
                answers += predicted.tolist()
        if not answers:
            raise DataError(f"no examples to score in {name}; check the data and its splits.")
        self.bill.own += Work(forward=len(answers))
        places = by_length(self.examples[name])
        in_order = [answer for _, answer in sorted(zip(places, answers, strict=True))]
        return Score(right, loss, len(answers)), in_order

    # -- choosing --------------------------------------------------------------------------------------

    def choose(self, support: Support, settings: Sequence[Setting], alphas: Sequence[float] | None = None) -> Choice:
        """The best setting and alpha by the score of this trial's regime.

        With `alphas` only those (and 0) are tried, without widening."""
        if alphas is not None:
            if len(settings) > 1:
                raise UsageError("fixed alphas are for methods with one setting.")
            curve = self._curve(support, settings[0], alphas)
            return Choice(settings[0], curve.best, curve, curve.notes)
        chosen, known = settings[0], None
        if len(settings) > 1:
            probes = [self._curve(support, one, self.search.probes) for one in settings]
            best = max(range(len(settings)), key=lambda i: (probes[i].score.value, -i))
            chosen, known = settings[best], probes[best].points
        curve = self._curve(support, chosen, self.search.alphas, self.search.wider, known)
        return Choice(chosen, curve.best, curve, curve.notes)

    def _curve(
        self,
        support: Support,
        setting: Setting,
        grid: Sequence[float],
        wider: Sequence[float] = (),
        known: Mapping[float, Score] | None = None,
    ) -> Curve:
        """Scores on the grid, then one wider alpha after the other while the best is not left behind."""
        views = support.views()
        points = {0.0: support.untouched(), **(known or {})}
        edge = max(grid)
        rungs = [sorted(grid), *([alpha] for alpha in sorted(wider) if alpha > edge)]
        for before, rung in zip([None, *rungs], rungs, strict=False):
            if before is not None and Curve(points).best < before[-1]:
                break
            missing = [alpha for alpha in rung if alpha not in points]
            parts = [self._along(support, view, setting, missing, points) for view in views if missing]
            for alpha in missing:
                if all(alpha in part for part in parts):
                    points[alpha] = sum((part[alpha] for part in parts[1:]), parts[0][alpha])
        return Curve(points, _curve_notes(Curve(points), edge if wider else None))

    def _along(
        self, support: Support, view: View, setting: Setting, alphas: Sequence[float], known: Mapping[float, Score]
    ) -> dict[float, Score]:
        """One view's scores; with patience and a single view, a falling curve is not followed to its end."""
        out: dict[float, Score] = {}
        patience = self.search.patience if view.left_out is None else None
        falling = 0
        with ExitStack() as stack:
            dials: list[Dial] = []

            def measure(alpha: float) -> Score:
                if not dials:
                    dials.append(stack.enter_context(dialled(self.model, setting.make(view))))
                dials[0].turn(alpha)
                self.bill.own += Work(vectors=1)
                return self.score(view.held)

            for alpha in alphas:
                out[alpha] = self._known_score(support, view, setting, alpha, measure)
                top = max(score.accuracy for score in (*known.values(), *out.values()))
                falling = falling + 1 if out[alpha].accuracy < top - 2 else 0
                if patience is not None and falling >= patience:
                    break
        return out

    def _known_score(
        self, support: Support, view: View, setting: Setting, alpha: float, measure: Callable[[float], Score]
    ) -> Score:
        """Settings that several methods share are measured once, and billed to each."""
        if setting.key is None:
            return measure(alpha)
        fold = "" if view.held == "validation" else f"-{support.name}"
        score: Score = self.shared(f"score-{setting.key}{fold}-{view.held}-{alpha}", lambda: measure(alpha))
        return score


def left_alone(tau: Mapping[str, Tensor], still: Collection[str]) -> list[str]:
    """A note on what the fine-tune changed and the task leaves as the target has it; raises when that is all."""
    changed = sorted(name for name in tau if name in still and bool(tau[name].any()))
    if not changed:
        return []
    what = f"{len(changed)} tensors that the fine-tune changed are no part of the task (first {changed[0]!r})"
    if not any(bool(tensor.any()) for name, tensor in tau.items() if name not in still):
        raise UnsafeResult(f"{what}, and it changed no others: for this task there is nothing to transport.")
    return [f"{what}: the frozen head was made with them, and they stay as the target has them"]


def _curve_notes(curve: Curve, edge: float | None) -> tuple[str, ...]:
    best = curve.best
    if curve.score.loss != curve.score.loss:
        raise UnsafeResult("no alpha gives a finite loss; the update or the model is not finite.")
    notes = []
    if edge is not None and best >= edge and max(curve.points) > edge:
        notes.append(f"the best alpha lay at the edge {edge:g}, so the grid was widened to {max(curve.points):g}")
    if best == max(curve.points):
        notes.append(f"the best alpha {best:g} is the largest one tried: a wider grid may do better")
    if best == 0:
        notes.append("alpha 0 scored best: do not transport")
    return tuple(notes)


class Store:
    """Where shared products outlive the process; this one forgets. See `methods.workfolder.Folder`."""

    def partial(self, key: str) -> Path | None:
        """Where an interrupted vote is kept while it is taken; None keeps nothing."""
        return None

    def load(self, key: str) -> tuple[Any, Work | None]:
        return None, None

    def save(self, key: str, value: Any, work: Work) -> None:
        return None
