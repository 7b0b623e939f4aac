"""A trial: one target, one task vector, one label budget, and everything the methods share.

Votes, gradients, alignments and collated batches are made once and shared; each method is billed for
what it used. Everything a method decides is decided by `Trial.choose`, on the validation split or on held-out
folds of the few-shot set, never on both and never on test."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.trio import ACROSS
from gradfix.data import few_shot, in_turns
from gradfix.errors import DataError, UnsafeResult, UsageError
from gradfix.methods.choosing import choose
from gradfix.methods.method import NotHere
from gradfix.methods.search import Choice, Score, Search, Setting, of_the_choice, total
from gradfix.methods.support import LEAST, Support
from gradfix.system.modules import at_work
from gradfix.tasks.base import Batch, Bound, Example, by_length
from gradfix.tasks.reading import speaks
from gradfix.training.costs import Work
from gradfix.training.free_text import Speech
from gradfix.training.lowrank import LowRank
from gradfix.training.starts import Old
from gradfix.vectors.taskvector import TaskVector

Regime = Literal["validation", "few_shot"]
CACHE_BYTES = 2**30
VALIDATION = "validation"
SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the validation examples, by which a race's losers are told from all others


@dataclass
class Bill:
    """What one unit of work used: its own passes, and shared products by name."""

    own: Work = field(default_factory=Work)
    shared: dict[str, Work] = field(default_factory=dict)
    away: float = 0.0  # seconds spent making shared products inside the unit

    def alone(self, wall: float) -> Work:
        return Work(self.own.forward, self.own.backward, self.own.steps, self.own.vectors, wall - self.away)

    def total(self, wall: float) -> Work:
        return sum(self.shared.values(), self.alone(wall))


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
    tuned old model, and what is known of the old side to turn its vector to the target's units. `adapter`: the
    fine-tune is one, which can be put onto the target as it is."""

    aligned: Callable[[str], TaskVector] | None = None
    tuned_target: Callable[[], TaskVector] | None = None
    teacher: Callable[[], Bound | None] | None = None
    old: Callable[[Bound], Old | None] | None = None
    adapter: bool = False


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
        self.speech = Speech()  # how open answers are learned
        self.planned: Collection[str] = ()  # methods that will run here: what they share is made in one go
        self.bill = Bill()
        self._teacher: Bound | None = None
        self._old: Old | None = None
        self.examples: dict[str, Sequence[Example]] = {"test": splits.test, VALIDATION: splits.validation or ()}
        self._batches: dict[str, list[Batch]] = {}
        self._shared: dict[str, tuple[Any, dict[str, Work]]] = {}
        self._support: Support | None = None
        self._parts: tuple[str, ...] | None = None

    @property
    def tau(self) -> TaskVector:
        """The task vector, weight by weight; there is none where the target has another shape."""
        if self.own_tau is None:
            raise NotHere(f"it needs weights that match one to one, and the target has another shape. {ACROSS}")
        return self.own_tau

    def by_module(self, tau: TaskVector) -> TaskVector:
        """The vector under the module's names, without tensors this model does not have or the task does not ask."""
        if isinstance(tau, LowRank):  # its factors were named when they were read
            return tau
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
                delta = mapped[name] if parameter.is_meta else mapped[name].to(parameter.device)
                own.setdefault(first[id(parameter)], delta)
        return TaskVector(own)

    @property
    def unlabelled(self) -> Sequence[Example]:
        """Inputs that may be asked about; nobody reads their labels."""
        return self.splits.unlabelled or self.splits.validation or ()

    # -- shared products -------------------------------------------------------------------------------

    def shared(self, key: str, make: Callable[[], Any], *, file: bool = False) -> Any:
        """Make `key` once; whoever asks is billed once, for it and for what it was made from."""
        if key not in self._shared:
            start, before = time.perf_counter(), self.bill
            self.bill = Bill()
            try:
                value, work = self.store.load(key) if file else (None, None)
                if value is None:
                    value = make()
                    work = self.bill.alone(time.perf_counter() - start)
                    if file:
                        self.store.save(key, value, work)
                assert work is not None
                self._shared[key] = (value, {**self.bill.shared, key: work})
            finally:
                self.bill = before
            before.away += time.perf_counter() - start
        value, works = self._shared[key]
        self.bill.shared.update(works)
        return value

    def open_bill(self) -> None:
        """A new unit of work starts; what it uses is written on its own bill."""
        self.bill = Bill()

    def aligned(self, method: str) -> TaskVector:
        """tau after permuting base A onto the target."""
        make = self.lenders.aligned
        if make is None:
            raise UsageError(f"{method} needs the base checkpoint to align; give base=.")
        found: TaskVector = self.shared(f"align-{method}", lambda: self._permuted(self.by_module(make(method))))
        return found

    def _permuted(self, tau: TaskVector) -> TaskVector:
        """The vector, or the trial's own where nothing was permuted: what is known of that is known of this."""
        own = self.own_tau
        same = own is not None and set(own) == set(tau) and all(torch.equal(own[name], tau[name]) for name in tau)
        return own if same and own is not None else tau

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
            made_here = ("votes-", "gradient-", "turned-", "said-", "untouched-fold-")
            for key in [key for key in self._shared if key.startswith(made_here)]:
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
            self.define(name, self.bound.linked([self.splits.train[index] for index in picked]))
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
        parts = self.parts(name)
        return self.predictions(name)[0] if len(parts) == 1 else total(self.score(part) for part in parts)

    def untouched(self, name: str) -> Score:
        """The target itself on one named set; the model must not be moved when this is first asked."""
        return total(self.shared(f"untouched-{part}", partial(self.score, part)) for part in self.parts(name))

    def parts(self, name: str) -> tuple[str, ...]:
        """The sets a named one is cut into, each twice the one before; labels have their shares in all of them.

        Only the validation examples of a race are cut: choices on the first parts cost a fraction."""
        together = type(self.bound).linked is not Bound.linked  # examples that are asked about as one set
        if name != VALIDATION or self.search.full or together:
            return (name,)
        if self._parts is None:
            order = in_turns(self.examples[name])
            cuts = [0, *(cut for cut in (round(share * len(order)) for share in SHARES) if cut >= LEAST), len(order)]
            self._parts = tuple(f"{name}-{number}" for number in range(len(cuts) - 1))
            for part, first, last in zip(self._parts, cuts, cuts[1:], strict=False):
                self.define(part, [self.examples[name][place] for place in order[first:last]])
        return self._parts

    def predictions(self, name: str) -> tuple[Score, list[int]]:
        with at_work(self.model), torch.no_grad():
            marks = self.bound.mark(self.model, self.batches(name))
        if not marks.count:
            raise DataError(f"no examples to score in {name}; check the data and its splits.")
        self.bill.own += Work(forward=len(marks.answers))
        places, by_loss = by_length(self.examples[name]), speaks(self.bound)
        in_order = sorted(zip(places, marks.answers, marks.hits, strict=True))
        hits = "".join("1" if hit else "0" for _, _, hit in in_order)
        losses = tuple(loss for _, loss in sorted(zip(places, marks.losses, strict=True))) if by_loss else ()
        score = Score(marks.right, marks.loss, marks.count, hits, further=marks.further, by_loss=by_loss, losses=losses)
        return score, [answer for _, answer, _ in in_order]

    # -- choosing --------------------------------------------------------------------------------------

    def choose(self, support: Support, settings: Sequence[Setting], alphas: Sequence[float] | None = None) -> Choice:
        """The best setting and alpha by the score of this trial's regime.

        With `alphas` only those (and 0) are tried, without widening."""
        return choose(self, support, settings, alphas)

    def worth(self, scores: Sequence[Score]) -> Score:
        """What choosing among these was worth; folds that chose do not judge their own choice."""
        return of_the_choice(scores) if self.regime == "few_shot" else max(scores, key=lambda score: score.value)


def left_alone(tau: Mapping[str, Tensor], still: Collection[str]) -> list[str]:
    """A note on what the fine-tune changed and the task leaves as the target has it; raises when that is all."""
    changed = sorted(name for name in tau if name in still and bool(tau[name].any()))
    if not changed:
        return []
    what = f"{len(changed)} tensors that the fine-tune changed are no part of the task (first {changed[0]!r})"
    if not any(bool(tensor.any()) for name, tensor in tau.items() if name not in still):
        raise UnsafeResult(f"{what}, and it changed no others: for this task there is nothing to transport.")
    return [f"{what}: the frozen head was made with them, and they stay as the target has them"]


class Store:
    """Where shared products outlive the process; this one forgets. See `methods.workfolder.Folder`."""

    def partial(self, key: str) -> Path | None:
        """Where an interrupted vote is kept while it is taken; None keeps nothing."""
        return None

    def load(self, key: str) -> tuple[Any, Work | None]:
        return None, None

    def save(self, key: str, value: Any, work: Work) -> None:
        return None
