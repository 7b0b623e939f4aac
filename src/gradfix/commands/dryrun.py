"""`--dry-run` of the commands whose work cannot be undone by reading: the same checks, one sentence, no file.

transport, finetune, merge, push and init have theirs in their own workflow."""

from __future__ import annotations

from pathlib import Path

from gradfix.checkpoints.open import open_checkpoint
from gradfix.commands.configs import CompareConfig, ReportConfig, SelectConfig, VoteConfig
from gradfix.commands.setting import NO_VALIDATION, draw, make_task, read_data, read_unlabelled, setting
from gradfix.data import Dataset, Row, check_disjoint
from gradfix.errors import DataError


def plan_vote(config: VoteConfig) -> str:
    """Data, task, few-shot set and target are checked; no model is loaded."""
    shots = draw(setting(config), config, base=config.base)
    target = open_checkpoint(config.target)
    return f"would ask {target} about {len(shots.fewshot)} examples and write the votes to {config.out}"


def plan_select(config: SelectConfig) -> str:
    start = setting(config)
    shots = draw(start, config, base=config.base)
    return f"would write {len(shots.indices)} examples chosen by {config.select} to {config.out}"


def plan_compare(config: CompareConfig) -> str:
    """Everything a comparison could stumble over before its first model is loaded."""
    import gradfix.methods.comparison  # noqa: F401  fills the registry of methods
    from gradfix.checkpoints.trio import Trio
    from gradfix.data import few_shot
    from gradfix.methods.methods import METHODS

    dataset = read_data(config.data, config)
    pool = _separate(config, dataset)
    make_task(config, dataset)
    methods = config.methods or tuple(METHODS)
    for name in methods:
        METHODS[name]
    Trio.open(config.base, config.tuned, config.target, head="skip")
    few_shot(pool, max(config.shots), config.seeds[0], config.allow_fewer, labels=list(dataset.labels))
    if config.track:
        from gradfix.report.tracking import parse

        parse(config.track)
    budgets = " and ".join(map(str, config.shots))
    return (
        f"would compare {len(methods)} methods with {budgets} examples per class under "
        f"{len(config.seeds)} seeds, {config.base} to {config.target}"
    )


def _separate(config: CompareConfig, dataset: Dataset) -> list[Row]:
    """The train split, once the splits a comparison needs are there and share no example with test."""
    for name in ("train", "test"):
        if name not in dataset.splits:
            raise DataError(
                f"{dataset.source} has no {name} split, and compare needs one ({', '.join(dataset.splits)} found). "
                "Give a folder with train and test files."
            )
    parts = dict(dataset.splits)
    if config.validation is not None:
        parts["validation"] = []
    if config.validation not in (None, NO_VALIDATION):
        other = read_data(str(config.validation), config, labels=dataset.labels)
        parts["validation"] = other.pick("validation", "train")
    check_disjoint({name: rows for name, rows in parts.items() if rows})
    if config.unlabelled:
        check_disjoint({"unlabelled": read_unlabelled(config.unlabelled, config), "test": parts["test"]})
    return parts["train"]


def plan_report(config: ReportConfig) -> str:
    from gradfix.methods.results import Results

    results = Results.load(config.results)
    out = config.out or Path(config.results).with_suffix(".html")
    return f"would write {out} from {len(results.rows)} rows"
