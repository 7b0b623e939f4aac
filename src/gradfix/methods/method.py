"""What a method is: how it runs, what it costs, and everything the verdict, the page and the card must know of it.

A method is declared once, with `@method`; nothing else in the package knows a method by its name. A plug-in
package adds one with one file (see docs/guides/plugins.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gradfix.errors import GradfixError
from gradfix.registry import Registry
from gradfix.stream.lora_out import LoraResult
from gradfix.training.costs import Work
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector

if TYPE_CHECKING:
    from gradfix.methods.search import Curve, Score
    from gradfix.methods.support import Support
    from gradfix.methods.trial import Trial

FLOOR, CEILING = "zero_shot", "fine_tuned"  # between them lies the gain that a recovered share is a share of


class NotHere(GradfixError):
    """A method cannot run on this input; compare leaves it out and says why."""


@dataclass(frozen=True)
class Outcome:
    """What a method would ship: `target + alpha * update`, or the target as it is.

    `score` is what its choices were made on and `chosen_by` says where: "validation", "few_shot" (folds), "given"
    or "recipe". `votes` are what a mask was shown, where it was shown any. `parts` are details for the report. `adapter`
    is the trained one where it is all of the update."""

    update: TaskVector | None
    alpha: float
    margin: float | None = None
    score: Score | None = None
    notes: tuple[str, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    curve: Curve | None = None
    votes: SignVotes | None = None
    chosen_by: str | None = None
    adapter: LoraResult | None = None


Run = Callable[["Trial", "Support"], Outcome]


@dataclass(frozen=True)
class Cost:
    """A method's cost as a formula for people and as work for the machine: (samples, steps) -> passes."""

    formula: str
    work: Callable[[int, int], Work]


FREE = Cost("0", lambda samples, steps: Work())
ADDED = Cost("2P", lambda samples, steps: Work(vectors=1))
VOTED = Cost("6PN + 2P", lambda samples, steps: Work(forward=samples, backward=samples, vectors=1))
TURNED = Cost(
    "12PN + 2P, and the maps", lambda samples, steps: Work(forward=2 * samples, backward=2 * samples, vectors=1)
)
ALIGNED = Cost("6PN + 2P, and the alignment", VOTED.work)
STEPPED = Cost("6PN + 10P", lambda samples, steps: Work(samples, samples, 1))
TRAINED = Cost("(6PN + 10P) steps", lambda samples, steps: Work(samples * steps, samples * steps, steps))
TRAINED_IN_FULL = Cost("(6P batch + 10P) steps", TRAINED.work)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What others must know about a method; kept in results, so that a page needs no method at hand.

    `transports`: something of the old fine-tune is in the result. `reference`: uses what a user does not have, so
    it is no candidate. `control`: shows what chance is worth. `baseline`: simpler than any mask. `ships`: `transport`
    can write it. `fixed`: with a validation split it depends on neither shots nor seed. `gradient`: looks at the mean
    gradient. `favoured`: among methods that the examples cannot tell apart it is taken, for what was measured elsewhere (docs/method.md). `unlabelled`: learns from inputs without labels. `labels`: cannot do without labelled ones. `across`: needs no weights that match one to one, so the
    target may have another shape. `scaled`: goes along the vector by alpha. `keeps`: drops part of the vector, so that the share it keeps means something. `open_only`: for open answers. `drawn`: its line in
    the chart of alphas, by style ("main", "second", "third", ...) and legend. `way`: how it carries the fine-tune
    over, as the half-sentence that follows "was carried over to the new base" on the model card."""

    transports: bool = True
    reference: bool = False
    control: bool = False
    baseline: bool = False
    ships: bool = True
    fixed: bool = False
    gradient: bool = False
    favoured: bool = False
    unlabelled: bool = False
    across: bool = False
    labels: bool = True
    scaled: bool = True
    keeps: bool = False
    open_only: bool = False
    drawn: tuple[str, str] | None = None
    way: str | None = None

    @property
    def kind(self) -> str:
        return "reference" if self.reference else "control" if self.control else "method"

    @property
    def stays(self) -> bool:
        """Nothing of the old fine-tune is moved, and the result is one a user could ship."""
        return not self.transports and not self.reference

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Method:
    """A function of (trial, support), its name for people, its traits and its cost."""

    run: Run
    title: str
    traits: Traits = Traits()
    cost: Cost | None = None


METHODS: Registry[Method] = Registry("method")


def method(name: str, title: str, *, cost: Cost | None = None, **traits: Any) -> Callable[[Run], Run]:
    """Register a method: `@method("veto", "GradFix, veto")` over a function of trial and support."""

    def add(run: Run) -> Run:
        METHODS.register(name)(Method(run, title, Traits(**traits), cost))
        return run

    return add
