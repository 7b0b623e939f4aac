"""The report of a single transport: the target before and after, on the same kind of page as a comparison.

It says what was done and measured; what other methods would have done, nobody measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfix.checkpoints.folder import versions
from gradfix.commands.asked import Asked
from gradfix.commands.configs import TransportConfig, command_line
from gradfix.errors import DataError
from gradfix.methods.method import FLOOR
from gradfix.methods.methods import METHODS
from gradfix.methods.results import Results
from gradfix.vectors.diagnostics import kept_by_block

if TYPE_CHECKING:
    from gradfix.commands.transport import TransportResult


def write_page(wanted: Asked, result: TransportResult, samples: int) -> Path:
    """HTML and Markdown; needs a test split, because a page without a measurement would say nothing."""
    from gradfix.report import write_report

    return write_report(page_results(wanted, result, samples), str(wanted.config.report), title="Transport")


def page_results(wanted: Asked, result: TransportResult, samples: int) -> Results:
    config, name, traits = wanted.config, wanted.name, wanted.method.traits
    if result.test_before is None or result.test_after is None:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    shared: dict[str, Any] = {
        "pair": None, "measure": result.measure, "task": Path(config.data).name, "shots": config.shots,
        "seed": config.seed, "recovered": None, "regime": result.regime, "validation_accuracy": None,
        "loss_before": result.fewshot_loss_before, "slope": None, "flops": None, "samples": samples,
        "test_samples": int(result.test_before["samples"]), "margin": None, "kept": None,
    }  # fmt: skip
    before = shared | {
        "method": FLOOR, "accuracy": result.test_before["accuracy"], "alpha": 0.0, "seconds": 0.0,
        "test_loss": result.test_before["loss"], "loss_after": result.fewshot_loss_before, "notes": [],
    }  # fmt: skip
    after = shared | {
        "method": name, "accuracy": result.test_after["accuracy"], "alpha": result.alpha, "margin": result.margin,
        "seconds": sum(result.seconds.values()), "test_loss": result.test_after["loss"],
        "loss_after": result.fewshot_loss_after, "kept": result.report.kept if result.report else None,
        "notes": list(result.notes),
    }  # fmt: skip
    where = {"pair": None, "shots": config.shots, "seed": config.seed, "method": name}
    details: dict[str, Any] = {"curves": [], "kept": []}
    if result.curve:
        details["curves"].append({**where, **_curve(wanted, result)})
    tensors = result.report.tensors if result.report else {}
    moved = {n: t["kept"] for n, t in tensors.items() if t["fate"] == "transported"}
    if moved:
        details["kept"].append({**where, "blocks": kept_by_block(moved, dict.fromkeys(moved, 1))})
    kind = "Trained" if traits.stays else "Transported"
    titles = {
        FLOOR: METHODS[FLOOR].title,
        name: f"{kind} ({wanted.masked.mask if wanted.masked is not None else name})",
    }
    # A mask that no method stands for has one curve, and it is the page's main one.
    line = traits.drawn or ("main", name)
    shown = {FLOOR: METHODS[FLOOR].traits.as_json(), name: replace(traits, drawn=line).as_json()}
    statement = _statement(wanted, result, after, samples)
    provenance: dict[str, Any] = {"pair": None, "command": command_line("transport", config), "config": {}}
    return Results(
        rows=[before, after],
        baselines={},
        verdict=statement,
        verdicts=[statement],
        titles=titles,
        traits=shown,
        versions=versions(),
        notes=list(result.notes),
        provenance=[provenance],
        **details,
    )


def _curve(wanted: Asked, result: TransportResult) -> dict[str, Any]:
    """What the search saw: accuracies to which the loss adds less than half an example."""
    masked = wanted.masked
    return {
        "rule": masked.vote if masked is not None and masked.voted else None, "points": result.curve, "best": result.alpha,
        "measure": "score", "on": _place(wanted.config, result.regime),
    }  # fmt: skip


def _place(config: TransportConfig, regime: str) -> str:
    """Where choices were scored; votes from a file may have seen the examples of every fold."""
    if regime == "validation":
        return "the validation split"
    return "held-out folds of the few-shot set" if config.votes is None else "the few-shot set"


def _chosen(config: TransportConfig, result: TransportResult) -> str:
    if result.regime == "recipe":
        return "set by the recipe"
    if result.regime == "given" or config.alpha not in (None, "auto"):
        return "given"
    return f"chosen on {_place(config, result.regime)}"


def _statement(wanted: Asked, result: TransportResult, after: dict[str, Any], samples: int) -> dict[str, Any]:
    """In the place of a verdict: what was done and what it did on test."""
    assert result.test_before is not None and result.test_after is not None
    config = wanted.config
    advice = _deed(wanted, result, samples)
    before, now = result.test_before["accuracy"], result.test_after["accuracy"]
    text = (
        f"{advice} Alpha {result.alpha:g} was {_chosen(config, result)}. Test {result.measure} on {after['test_samples']} "
        f"examples: {before:.1f}% before, {now:.1f}% after. No other method was tried: that is what gradfix compare is for."
    )
    return {
        "compared": False, "method": after["method"], "measure": result.measure, "accuracy": now, "over_zero_shot": now - before,
        "recovered": None, "cost_seconds": after["seconds"], "best_on_test": None, "regime": result.regime,
        "shots": config.shots, "pair": None, "seeds": 1, "advice": advice, "text": text,
    }  # fmt: skip


def _deed(wanted: Asked, result: TransportResult, samples: int) -> str:
    config = wanted.config
    tuned, target = Path(config.tuned).name, Path(config.target).name
    if result.alpha == 0:
        return f"Kept {target} as it is."
    if wanted.method.traits.stays:
        return f"Fine-tuned {target} on {samples} labelled examples; nothing of {tuned} was moved."
    return f"Moved {tuned} onto {target}."
