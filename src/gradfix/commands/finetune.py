"""`gradfix finetune`: the recipe that makes fine-tunes, from a checkpoint folder to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradfix.checkpoints.folder import save_like
from gradfix.checkpoints.open import open_checkpoint, resolve
from gradfix.checkpoints.slices import on_the_leader
from gradfix.checkpoints.write import discard, refuse_inside, refuse_occupied
from gradfix.commands.configs import FinetuneConfig, given
from gradfix.commands.guard import among_processes, sole_writer
from gradfix.commands.setting import Prepared, apart, setting
from gradfix.data import Row, check_disjoint, few_shot
from gradfix.errors import DataError, UsageError
from gradfix.system.processes import current
from gradfix.tasks.loading import ADAPTER_CONFIG
from gradfix.tasks.scoring import evaluate


@among_processes
def run_finetune(config: FinetuneConfig, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    from gradfix.training.finetuning import finetune

    if (resolve(config.model) / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{config.model} is an adapter, which is no model to train: give the model it was trained on (base), or "
            "merge it in peft and give the result."
        )
    source, out = open_checkpoint(config.model), Path(config.out)
    refuse_inside(out, [source.path] if source.path else [])
    refuse_occupied(out, config.overwrite)
    start = apart(setting(config), config.drop_duplicates)
    rows, notes = _training_rows(start, config)
    if config.dry_run:
        start.open(config.model)
        return {
            "summary": f"would fine-tune {config.model} on {len(rows)} examples for {config.steps} steps into {out}",
            "notes": notes,
        }
    with sole_writer(config):
        bound = start.open(config.model)
        state = out.with_name(f".{out.name}.finetune")
        finetune(
            bound, rows, steps=config.steps, batch_size=config.train_batch, lr=config.lr,
            weight_decay=config.weight_decay, warmup=config.warmup, seed=config.seed, progress=progress,
            checkpoint=state,
        )  # fmt: skip
        trained = on_the_leader(current(), dict(bound.model.named_parameters()))
        if current().leads:
            save_like(
                source, bound.model, out, overwrite=config.overwrite, details={"command": given(config)},
                extras=bound.save_extras, parameters=trained,
            )  # fmt: skip
            discard(state)
    result: dict[str, Any] = {"out": str(out), "summary": f"wrote {out}", "notes": [*notes, *bound.notes]}
    test = start.dataset.splits.get("test")
    if test:
        result["test"] = evaluate(bound.model, bound, bound.scoring_batches(test, config.batch_size))
        result["measure"] = bound.measure
        result["summary"] += f": test {bound.measure} {result['test']['accuracy']:.2f} %"
    result["notes"] += bound.cuts()
    return result


def _training_rows(start: Prepared, config: FinetuneConfig) -> tuple[list[Row], list[str]]:
    """The examples to train on, none of which the test split knows, and notes on the data."""
    rows, test = start.dataset.pick("train"), start.dataset.splits.get("test")
    if rows is test:
        raise DataError(
            f"{start.dataset.source} has only a test split; examples to train on come from train. Add a train file."
        )
    if config.shots is not None:
        rows = [rows[index] for index in few_shot(rows, config.shots, config.seed)]
    repeats = check_disjoint({"train": rows, **({"test": test} if test else {})})
    return rows, [*start.notes, *repeats]
