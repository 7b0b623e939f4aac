"""`gradfix compare` and `gradfix report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import torch_dtype, write_text
from gradfix.commands.configs import CompareConfig, ReportConfig, command_line
from gradfix.commands.guard import among_processes, halving_batches, in_notes
from gradfix.commands.setting import (
    NO_VALIDATION,
    device_of,
    make_task,
    read_data,
    unseen_unlabelled,
    used_note,
    with_shots,
)
from gradfix.commands.telling import general_texts, speech_from
from gradfix.data import Dataset, Row, few_shot, without_duplicates
from gradfix.errors import CorruptInput, GradfixError, UsageError
from gradfix.methods.comparison import compare
from gradfix.methods.headed import open_target
from gradfix.methods.methods import METHODS
from gradfix.methods.opening import read_splits, refuse_itself, vector_of
from gradfix.methods.results import Results
from gradfix.methods.support import NO_LABELS
from gradfix.methods.trial import Passes
from gradfix.report import to_markdown, write_report
from gradfix.report.tracking import parse, track
from gradfix.system.meter import Countdown, steps_told
from gradfix.system.processes import current

# Options that the command and `gradfix.compare` call by one name.
SAME = (
    "base",
    "tuned",
    "target",
    "target_tuned",
    "shots",
    "seeds",
    "head",
    "strict",
    "align",
    *Passes.__dataclass_fields__,
)


@among_processes
@halving_batches(in_notes)
def run_compare(
    config: CompareConfig, json_out: str | None = None, stage: Callable[[str], None] = lambda _: None
) -> Results:
    """All methods under one budget; finished units are kept in the work folder, so a killed run goes on."""
    if config.track:
        parse(config.track)  # a missing tracker is better known before the work than after
    heal_torchvision()
    stage("reading examples")
    config, dataset, validation, unlabelled = _examples(config)
    with steps_told(stage):
        results = compare(
            **{name: getattr(config, name) for name in SAME},
            data=dataset,
            task=make_task(config, dataset),
            speech=speech_from(config),
            general=general_texts(config),
            methods=config.methods or None,
            validation=validation,
            unlabelled=unlabelled,
            work=_work_folder(config, json_out),
            finetune={"steps": config.finetune_steps} if config.finetune_target else False,
            dtype=torch_dtype(config.dtype),
            device=device_of(config.device),
            command=command_line("compare", config),
            progress=Countdown(stage),
        )
    if config.report and current().leads:
        write_report(results, config.report)
    if config.track and current().leads:
        track(results, config.track)
    return results


def _examples(config: CompareConfig) -> tuple[CompareConfig, Dataset, Any, list[Row] | None]:
    """The options with their budgets, the data, what choices are made on, and inputs without labels."""
    dataset = read_data(config.data, config)
    splits: dict[str, list[Row] | None] = {name: dataset.splits.get(name) for name in ("train", "validation", "test")}
    validation: Any = "auto" if config.validation is None else config.validation
    if validation == NO_VALIDATION:
        splits["validation"] = None
    elif validation != "auto":
        validation = read_data(str(config.validation), config, labels=dataset.labels)
        splits["validation"] = validation.pick("validation", "train")
    kept, notes = without_duplicates(splits, config.drop_duplicates)
    if isinstance(validation, Dataset):
        validation = replace(validation, splits={"validation": kept["validation"] or []})
    if config.drop_duplicates is not None:
        rest = {name: rows for name, rows in kept.items() if rows is not None}
        dataset = replace(dataset, splits={**dataset.splits, **rest}, notes=(*dataset.notes, *notes))
    unlabelled = unseen_unlabelled(config, dataset.splits.get("test")) if config.unlabelled else None
    config = with_shots(config, dataset.pick("train") if "train" in dataset.splits else ())
    return config, _said(dataset, config), validation, unlabelled


def _said(dataset: Dataset, config: CompareConfig) -> Dataset:
    """The data with a note on how much of it the budgets use."""
    train = dataset.splits.get("train")
    if train is None:  # read_splits refuses it
        return dataset
    labels = list(dataset.labels)
    used = [len(few_shot(train, shots, 0, config.allow_fewer, labels)) if shots else 0 for shots in config.shots]
    notes = (note for count in used for note in used_note(count, train, bool(dataset.labels)))
    return replace(dataset, notes=(*dataset.notes, *notes))


def plan_compare(config: CompareConfig) -> str:
    """Everything a comparison does before its first method runs: what it would refuse is refused here."""
    heal_torchvision()
    config, dataset, validation, unlabelled = _examples(config)
    splits, _ = read_splits(dataset, validation, unlabelled)
    task = make_task(config, dataset)
    methods = config.methods or tuple(METHODS)
    for name in methods:
        METHODS[name]
    trio = Trio.open(config.base, config.tuned, config.target, head=config.head, strict=config.strict, across=True)
    refuse_itself(trio)
    labels = list(dataset.labels)
    if 0 in config.shots and unlabelled is None:
        raise UsageError(NO_LABELS)
    most = max(config.shots) or 1
    picked = few_shot(splits.train, most, config.seeds[0], config.allow_fewer, labels=labels)
    bound = open_target(trio, task, torch_dtype(config.dtype), device_of(config.device))
    vector_of(trio, config.align)
    bound.collate([splits.train[index] for index in picked])
    if config.track:
        parse(config.track)
    budgets = " and ".join(map(str, config.shots))
    return (
        f"would compare {len(methods)} methods with {budgets} examples per class under "
        f"{len(config.seeds)} seeds, {config.base} to {config.target}"
    )


def _work_folder(config: CompareConfig, json_out: str | None) -> Path | None:
    if config.work:
        return Path(config.work)
    return Path(json_out).with_suffix(".work") if json_out and json_out != "-" else None


def run_report(config: ReportConfig) -> Path:
    """The page (or Markdown) of results made earlier."""
    results = Results.load(config.results)
    try:
        return _rendered(config, results)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        if isinstance(error, GradfixError):
            raise
        raise CorruptInput(
            f"{config.results} cannot be shown ({type(error).__name__}): a field is missing or has another type. "
            "Write it again with `gradfix compare --json`."
        ) from error


def plan_report(config: ReportConfig) -> str:
    results = Results.load(config.results)
    out = config.out or Path(config.results).with_suffix(".html")
    return f"would write {out} from {len(results.rows)} rows"


def _rendered(config: ReportConfig, results: Results) -> Path:
    out = Path(config.out) if config.out else Path(config.results).with_suffix(".html")
    if out.suffix == ".md":
        write_text(out, to_markdown(results))
        return out
    return write_report(results, out)
