"""`gradfix evaluate`: score a checkpoint on labelled examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradfix.commands.configs import EvaluateConfig
from gradfix.commands.guard import among_processes, halving_batches, in_dict
from gradfix.commands.setting import setting
from gradfix.data import Dataset
from gradfix.errors import DataError
from gradfix.registry import unknown
from gradfix.tasks.scoring import evaluate


@among_processes
@halving_batches(in_dict)
def run_evaluate(config: EvaluateConfig, stage: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    start = setting(config)
    split = _split_called(config.split, start.dataset)
    rows = start.dataset.splits[split]
    stage("loading the model")
    bound = start.open(config.model, head_from=config.head_from)
    stage(f"scoring {len(rows)} examples")
    scores = evaluate(bound.model, bound, bound.scoring_batches(rows, config.batch_size))
    return {
        "model": config.model,
        "split": split,
        "measure": bound.measure,
        **scores,
        "notes": [*bound.notes, *bound.cuts()],
    }


def _split_called(name: str, dataset: Dataset) -> str:
    """The split the user named; only the default stands for whatever a file without splits holds."""
    if name in dataset.splits:
        return name
    if name == EvaluateConfig.split and len(dataset.splits) == 1:
        return next(iter(dataset.splits))
    raise DataError(f"{dataset.source}: " + unknown("split", name, list(dataset.splits)))
