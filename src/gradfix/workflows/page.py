"""The report of a single transport: the target before and after, in the same page as a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfix.checkpoints.folder import versions
from gradfix.comparison.results import Results
from gradfix.diagnostics import kept_by_block
from gradfix.errors import DataError
from gradfix.workflows.configs import TransportConfig, command_line

if TYPE_CHECKING:
    from gradfix.workflows.transporting import TransportResult


def write_page(config: TransportConfig, result: TransportResult, samples: int) -> Path:
    """HTML and Markdown; needs a test split, because a page without a measurement would say nothing."""
    from gradfix.report import write_report

    return write_report(page_results(config, result, samples), str(config.report), title="Transport")


def page_results(config: TransportConfig, result: TransportResult, samples: int) -> Results:
    if result.before is None or result.after is None:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    name = config.method
    if name == "mask":
        name = {"agree": "gradfix", "none": "naive"}.get(config.mask, config.mask)
    scores = dict(result.curve.points) if result.curve else {}
    shared: dict[str, Any] = {
        "pair": None, "task": Path(config.data).name, "shots": config.shots, "seed": config.seed, "recovered": None,
        "regime": result.regime, "validation_accuracy": None, "loss_before": result.loss_before, "slope": None,
        "flops": None, "samples": samples, "test_samples": int(result.before["samples"]), "margin": None, "kept": None,
    }  # fmt: skip
    before = shared | {
        "method": "zero_shot", "accuracy": result.before["accuracy"], "alpha": 0.0, "seconds": 0.0,
        "validation_score": scores.get(0.0, -float(result.loss_before or 0)), "test_loss": result.before["loss"],
        "loss_after": result.loss_before, "notes": [],
    }  # fmt: skip
    after = shared | {
        "method": name, "accuracy": result.after["accuracy"], "alpha": result.alpha, "margin": result.margin,
        "seconds": sum(result.seconds.values()), "test_loss": result.after["loss"],
        "validation_score": scores.get(result.alpha, -float(result.loss_after or 0)),
        "loss_after": result.loss_after, "kept": result.report.kept if result.report else None,
        "notes": list(result.notes),
    }  # fmt: skip
    where = {"pair": None, "shots": config.shots, "seed": config.seed, "method": name}
    details: dict[str, Any] = {"curves": [], "kept": []}
    if result.curve:
        details["curves"].append(
            {**where, "rule": config.vote, "points": result.curve.points, "best": result.alpha}
        )
    if result.report and result.report.tensors:
        moved = {n: t["kept"] for n, t in result.report.tensors.items() if t["fate"] == "transported"}
        details["kept"].append({**where, "blocks": kept_by_block(moved, dict.fromkeys(moved, 1))})
    titles = {
        "zero_shot": "Target as it is",
        name: f"Transported ({config.mask if config.method == 'mask' else config.method})",
    }
    provenance: dict[str, Any] = {"pair": None, "command": command_line("transport", config), "config": {}}
    return Results.build(
        [before, after],
        titles=titles,
        versions=versions(),
        notes=list(result.notes),
        provenance=[provenance],
        **details,
    )
