"""The result of a single transport, and its page: what you had, the target before and after, and how it got there.

It says what was done and measured; what other methods would have done, nobody measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradfix.checkpoints.folder import versions
from gradfix.commands.asked import Asked
from gradfix.commands.configs import TransportConfig, command_line
from gradfix.commands.setting import Shots
from gradfix.errors import DataError
from gradfix.methods.method import FLOOR, Outcome
from gradfix.methods.methods import METHODS
from gradfix.methods.results import Results
from gradfix.stream.checkpoint import StreamReport
from gradfix.vectors.diagnostics import kept_by_block

STARTS = {
    "plain": ("main", "along the vector as it is"), "coordinates": ("second", "along the vector in the target's coordinates"),
}  # fmt: skip


@dataclass(frozen=True)
class Along:
    """How far a recipe went along the vector before its first step: by which start, and what else was tried.

    A curve holds alphas and how far the answers there are from the old fine-tune's."""

    start: str
    alpha: float
    curves: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: Outcome) -> Along | None:
        parts = outcome.parts
        if "start" not in parts or outcome.update is None:
            return None
        curves = {name: [tuple(point) for point in found["curve"]] for name, found in parts["starts"].items()}
        return cls(parts["start"], parts["start_alpha"], curves)

    def words(self) -> str:
        if self.start == "none":
            return "the target itself"
        way = STARTS.get(self.start, ("", self.start))[1]
        return f"alpha {self.alpha:g} {way}"


@dataclass(frozen=True)
class TransportResult:
    """What was written, and what it measured."""

    out: Path
    alpha: float
    margin: float | None
    regime: str  # what chose alpha: "given", "validation", "few_shot" or "recipe"
    report: StreamReport | None
    curve: list[tuple[float, float]] | None  # alpha and the score where it was chosen
    test_before: dict[str, float] | None
    test_after: dict[str, float] | None
    fewshot_loss_before: float | None
    fewshot_loss_after: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    measure: str = "accuracy"  # what the share of right answers is called
    had: dict[str, float] | None = None  # the old fine-tune on its own base, on test
    along: Along | None = None
    flops: float | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    keep_index: dict[str, Any] | None = None  # what the map into the old space keeps
    figures: dict[str, Any] | None = None  # of open answers: before, after, samples

    @property
    def of_what_you_had(self) -> float | None:
        """How much of the way from the target's loss per token to the old fine-tune's was gone.

        None for closed label sets and where two tokenizers count other tokens."""
        if self.figures is None or not self.figures["one_tokenizer"] or not (self.had and self.test_before):
            return None
        way = self.test_before["loss"] - self.had["loss"]
        return (self.test_before["loss"] - self.test_after["loss"]) / way if self.test_after and way > 0 else None

    def as_json(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name not in ("report", "changed", "along")}
        kept = self.report.kept if self.report else None
        if self.figures is not None:
            content["figures"] = {**self.figures, "of_what_you_had": self.of_what_you_had}
        along = None if self.along is None else {"start": self.along.start, "alpha": self.along.alpha}
        return dict(_finite({**content, "out": str(self.out), "kept": kept, "along": along}))


def _finite(content: Any) -> Any:
    """The same content for JSON, which has no NaN and no infinity: null instead."""
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_page(wanted: Asked, result: TransportResult, shots: Shots) -> Path:
    """HTML and Markdown; needs a test split, because a page without a measurement would say nothing."""
    from gradfix.report import write_report

    return write_report(page_results(wanted, result, shots), str(wanted.config.report), title="Transport")


def page_results(wanted: Asked, result: TransportResult, shots: Shots) -> Results:
    config, name, traits = wanted.config, wanted.name, wanted.method.traits
    if result.test_before is None or result.test_after is None:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    where: dict[str, Any] = {"pair": None, "shots": shots.per_class, "seed": config.seed, "method": name}
    before, after = _rows(wanted, result, shots)
    if result.figures is not None:
        before |= {"gain": "loss", **result.figures["before"]}
        after |= {"gain": "loss", **result.figures["after"]}
    kind = "Trained" if traits.stays else "Transported"
    titles = {
        FLOOR: METHODS[FLOOR].title,
        name: f"{kind} ({wanted.masked.mask if wanted.masked is not None else name})",
    }
    # A mask that no method stands for has one curve, and it is the page's main one.
    line = traits.drawn or ("main", name)
    shown = {FLOOR: METHODS[FLOOR].traits.as_json(), name: replace(traits, drawn=line).as_json()}
    statement = _statement(wanted, result, after, len(shots.fewshot))
    provenance: dict[str, Any] = {"pair": None, "command": command_line("transport", config), "config": {}}
    had = [{"pair": None, "measure": result.measure, **result.had}] if result.had is not None else []
    return Results(
        rows=[before, after],
        baselines={},
        verdict=statement,
        verdicts=[statement],
        titles=titles,
        traits=shown,
        versions=versions(),
        curves=[{**where, **curve} for curve in _curves(wanted, result)],
        kept=[{**where, "blocks": blocks} for blocks in _kept(wanted, result)],
        changed=[{**where, **result.changed}] if result.changed else [],
        had=had,
        samples=_samples(where, result.figures["samples"]) if result.figures is not None else [],
        notes=list(result.notes),
        provenance=[provenance],
    )


def _samples(where: dict[str, Any], said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a comparison keeps them: the answers of each model apart."""

    def of(method: str, key: str) -> dict[str, Any]:
        rows = [{"prompt": row["prompt"], "reference": row["reference"], "said": row[key]} for row in said]
        return {**where, "method": method, "rows": rows, "old_fine_tune": []}

    old = [row["old_fine_tune"] for row in said if row["old_fine_tune"] is not None]
    return [of(FLOOR, "new_base"), {**of(where["method"], "moved"), "old_fine_tune": old}]


def _rows(wanted: Asked, result: TransportResult, shots: Shots) -> tuple[dict[str, Any], dict[str, Any]]:
    """The target before and after, as rows of a comparison."""
    assert result.test_before is not None and result.test_after is not None
    config = wanted.config
    shared: dict[str, Any] = {
        "pair": None, "measure": result.measure, "task": Path(config.data).name, "shots": shots.per_class,
        "seed": config.seed, "recovered": None, "regime": result.regime, "validation_accuracy": None,
        "loss_before": result.fewshot_loss_before, "slope": None, "samples": len(shots.fewshot),
        "test_samples": int(result.test_before["samples"]),
    }  # fmt: skip
    before = shared | {
        "method": FLOOR, "accuracy": result.test_before["accuracy"], "alpha": 0.0, "seconds": 0.0, "flops": None,
        "measures": _besides(result.test_before), "test_loss": result.test_before["loss"], "loss_after": result.fewshot_loss_before, "notes": [],
        "margin": None, "kept": None,
    }  # fmt: skip
    after = shared | {
        "method": wanted.name, "accuracy": result.test_after["accuracy"], "alpha": result.alpha, "margin": result.margin,
        "measures": _besides(result.test_after), "seconds": sum(result.seconds.values()), "test_loss": result.test_after["loss"], "flops": result.flops,
        "loss_after": result.fewshot_loss_after, "kept": result.report.kept if result.report else None,
        "notes": list(result.notes),
    }  # fmt: skip
    return before, after


def _besides(score: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in score.items() if name not in ("accuracy", "loss", "samples")}


def _kept(wanted: Asked, result: TransportResult) -> list[dict[str, float]]:
    """By block, where the method drops part of the vector; a map of whole vectors says nothing."""
    tensors = result.report.tensors if result.report else {}
    moved = {n: t["kept"] for n, t in tensors.items() if t["fate"] == "transported"}
    dropped = any(share < 1 for share in moved.values())
    return [kept_by_block(moved, dict.fromkeys(moved, 1))] if dropped and wanted.masked is not None else []


def _curves(wanted: Asked, result: TransportResult) -> list[dict[str, Any]]:
    """How far along the vector: scores where alpha was chosen, or a recipe's distance from the old fine-tune."""
    masked = wanted.masked
    if result.curve:
        # Accuracies to which the loss adds less than half an example.
        return [{
            "rule": masked.vote if masked is not None and masked.voted else None, "points": result.curve,
            "best": result.alpha, "measure": "score", "on": _place(wanted.config, result.regime),
        }]  # fmt: skip
    if result.along is None:
        return []
    found = []
    for name, points in result.along.curves.items():
        known = [(alpha, value) for alpha, value in points if value is not None]
        taken = name == result.along.start
        best = result.along.alpha if taken else None
        found.append({
            "rule": None, "points": known, "best": best, "measure": "distance", "line": STARTS.get(name, ("third", name)),
            "on": "from the old fine-tune's answers (KL divergence)",
        })  # fmt: skip
    return found


def _place(config: TransportConfig, regime: str) -> str:
    """Where choices were scored; votes from a file may have seen the examples of every fold."""
    if regime == "validation":
        return "the validation split"
    return "held-out folds of the few-shot set" if config.votes is None else "the few-shot set"


def _went(wanted: Asked, result: TransportResult) -> str:
    """How far along the vector it went, in words."""
    config = wanted.config
    if result.along is not None:
        return f"Its lessons began at {result.along.words()}, where its answers were nearest to the old fine-tune's."
    if not wanted.method.traits.scaled and result.alpha:
        return ""
    if result.regime == "recipe":
        return f"Alpha {result.alpha:g} was set by the recipe."
    if result.regime == "given" or config.alpha not in (None, "auto"):
        return f"Alpha {result.alpha:g} was given."
    return f"Alpha {result.alpha:g} was chosen on {_place(config, result.regime)}."


def _statement(wanted: Asked, result: TransportResult, after: dict[str, Any], samples: int) -> dict[str, Any]:
    """In the place of a verdict: what was done and what it did on test."""
    assert result.test_before is not None and result.test_after is not None
    advice = _deed(wanted, result, samples)
    if result.figures is not None:
        return _spoken_statement(advice, wanted, result, after)
    before, now = result.test_before["accuracy"], result.test_after["accuracy"]
    had = "" if result.had is None else f" You had {result.had['accuracy']:.1f}% on the old base."
    counts = result.changed.get("counts")
    answers = f" {counts['repaired']} answers were repaired, {counts['broken']} broken." if counts else ""
    text = (
        f"{advice} {_went(wanted, result)} Test {result.measure} on {after['test_samples']} examples: {before:.1f}% before, "
        f"{now:.1f}% after.{had}{answers} No other method was tried: that is what gradfix compare is for."
    )
    return _stated(result, after, advice, text)


def _spoken_statement(advice: str, wanted: Asked, result: TransportResult, after: dict[str, Any]) -> dict[str, Any]:
    """Of open answers: hardly any is right to the letter, so the loss per token comes first."""
    assert result.test_before is not None and result.test_after is not None
    told = spoken_figures(result)
    had = "" if result.had is None else f" You had {result.had['loss']:.3f} on the old base"
    way = result.of_what_you_had
    had += "." if had and way is None else f": {100 * way:.0f}% of the way there." if way is not None else ""
    exact = f"{result.test_before['accuracy']:.1f}% before and {result.test_after['accuracy']:.1f}% after"
    text = (
        f"{advice} {_went(wanted, result)} Loss per token on {after['test_samples']} test answers: "
        f"{result.test_before['loss']:.3f} before, {result.test_after['loss']:.3f} after.{had} Right to the letter "
        f"(exact match): {exact}. No other method was tried: that is what gradfix compare is for."
    )
    return {**_stated(result, after, advice, text), "spoken": told}


def spoken_figures(result: TransportResult) -> list[tuple[str, str]]:
    """Of open answers on test, by name: the loss per token, and how much of the old fine-tune's is reached."""
    before, after, way = result.test_before, result.test_after, result.of_what_you_had
    found = [("loss per token you had, on the old base", f"{result.had['loss']:.3f}")] if result.had else []
    if before and after:
        found += [("the target before", f"{before['loss']:.3f}"), ("and after", f"{after['loss']:.3f}")]
    return [*found, *([("of the way to what you had", f"{100 * way:.0f}%")] if way is not None else [])]


def _stated(result: TransportResult, after: dict[str, Any], advice: str, text: str) -> dict[str, Any]:
    assert result.test_before is not None and result.test_after is not None
    before, now = result.test_before["accuracy"], result.test_after["accuracy"]
    return {
        "compared": False, "method": after["method"], "measure": result.measure, "accuracy": now, "over_zero_shot": now - before,
        "had": result.had["accuracy"] if result.had is not None else None, "recovered": None,
        "cost_seconds": after["seconds"], "cost_parts": dict(result.seconds), "best_on_test": None,
        "regime": result.regime, "shots": after["shots"], "pair": None, "seeds": 1, "advice": advice,
        "text": " ".join(text.split()),
    }  # fmt: skip


def _deed(wanted: Asked, result: TransportResult, samples: int) -> str:
    config = wanted.config
    tuned, target = Path(config.tuned).name, Path(config.target).name
    if result.alpha == 0:
        return f"Left {target} as it is."
    if wanted.method.traits.stays:
        return f"Fine-tuned {target} on {samples} labelled examples; nothing of {tuned} was moved."
    return f"Moved {tuned} onto {target}."
