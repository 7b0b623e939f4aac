"""From a verdict to a model: the file of a comparison says what `gradfix transport` is to ship.

A verdict on other weights, other data or another task is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradfix.checkpoints.trio import Trio
from gradfix.commands.configs import CompareConfig, TransportConfig, command_line, given
from gradfix.commands.setting import Prepared, Shots
from gradfix.data import Dataset
from gradfix.errors import CorruptInput, DataError, IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.methods.method import FLOOR
from gradfix.methods.methods import METHODS, traits_of
from gradfix.methods.results import Results
from gradfix.tasks.base import Bound

Verdict = Mapping[str, Any]
AGAIN = "write them again with `gradfix compare --json`."
KEYS: dict[str, type | tuple[type, ...]] = {
    "method": str, "pair": (str, type(None)), "shots": int, "regime": str, "transport": bool, "advice": str,
}  # fmt: skip


def ship_command(config: CompareConfig, verdict: Verdict) -> str | None:
    """The command that writes the model a verdict recommends; None where there is nothing to write."""
    name = verdict["method"]
    if _keeps_the_target(verdict) or name not in METHODS or not METHODS[name].traits.ships:
        return None
    known = {item.name for item in fields(TransportConfig)}
    shared = {name: value for name, value in given(config).items() if name in known and name != "report"}
    if not METHODS[name].traits.unlabelled:
        shared.pop("unlabelled", None)
    shared |= {"shots": verdict["shots"], "seed": config.seeds[0], "method": name, "out": "OUT"}
    return command_line("transport", TransportConfig(**shared))


def read_verdict(config: TransportConfig, trio: Trio) -> Verdict:
    """The verdict on these checkpoints and this budget; one on others is refused."""
    file = config.verdict
    results = Results.load(str(file))
    whole = [
        all(name in verdict and isinstance(verdict[name], kind) for name, kind in KEYS.items())
        for verdict in results.verdicts
    ]
    if not all(whole) or not whole:
        raise CorruptInput(f"{file} has {'a damaged' if whole else 'no'} verdict; {AGAIN}")
    compared = _entry_for(trio, str(file), results.provenance)
    found = [verdict for verdict in results.verdicts if verdict["pair"] == compared.get("pair")]
    budgets = [verdict["shots"] for verdict in found]
    if config.shots not in budgets and (config.shots is not None or len(budgets) > 1):
        raise UsageError(
            f"{file} has verdicts for {' and '.join(map(str, budgets))} examples per class"
            f"{'' if config.shots is None else f', not for {config.shots}'}; choose one by --shots."
        )
    verdict = found[0 if config.shots is None else budgets.index(config.shots)]
    if _keeps_the_target(verdict):
        raise UnsafeResult(f"the verdict of {file}: {verdict['advice']} Nothing was written.")
    return {**verdict, "compared": compared}


def follow(verdict: Verdict, shots: Shots, start: Prepared) -> Shots:
    """The few-shot set, with a note; refused where the verdict was reached on other data or by other means."""
    regime = "validation" if shots.validation is not None else "few_shot" if shots.fewshot else "answers"
    if verdict["regime"] != regime:
        ways = {
            "few_shot": "by folds (--validation none)",
            "validation": "on validation data",
            "answers": "without labels (--shots 0)",
        }
        theirs = ways.get(verdict["regime"], "otherwise")
        raise UsageError(f"the verdict was reached {theirs}, but this transport chooses {ways[regime]}.")
    _refuse_other_data(verdict, shots, start)
    _refuse_other_task(verdict, start)
    return replace(shots, notes=(*shots.notes, f"{verdict['method']} is the verdict: {verdict['advice']}"))


def refuse_nothing(verdict: Verdict, alpha: float, seed: int) -> None:
    """A verdict to ship, and nothing to ship: the seed's own examples say otherwise than all seeds together."""
    if alpha == 0:
        raise UnsafeResult(
            f"the verdict is {verdict['method']}, but on the examples of seed {seed} alpha 0 scored best: nothing was "
            "written. Take a --seed of the comparison that gained, or --force to write the target as it is."
        )


def refuse_other_bound(verdict: Verdict, bound: Bound) -> None:
    """Two tasks may have the same settings; what they make of the target tells them apart."""
    theirs = _mapping(verdict["compared"], "config").get("task")
    if theirs != type(bound).__name__:
        raise UsageError(
            f"the verdict was reached on another --task ({theirs}, here {type(bound).__name__}). Compare again."
        )


def _refuse_other_data(verdict: Verdict, shots: Shots, start: Prepared) -> None:
    """The examples must be those of the comparison, split by split and in order."""
    splits = {"train": shots.pool, "validation": shots.validation, "test": shots.test}
    ours = Dataset({name: rows for name, rows in splits.items() if rows}, {}, "").hashes()
    theirs = _mapping(_mapping(verdict["compared"], "data"), "sha256")
    for name in splits:
        if ours.get(name) != theirs.get(name):
            raise DataError(
                f"the verdict was reached on other {name} examples than those of {start.dataset.source}. "
                "Compare again, or name a --method."
            )


def _refuse_other_task(verdict: Verdict, start: Prepared) -> None:
    """The task's class stands in the results by its bound's name; here its settings are compared."""
    theirs = _mapping(_mapping(verdict["compared"], "config"), "task_options")
    ours = {name: str(value) for name, value in vars(start.task).items()}
    odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if odd:
        raise UsageError(
            f"the verdict was reached with another {' and '.join(odd)} of the task than --task "
            f"{start.options.task} has here. Compare again, or give the options of the comparison."
        )


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the results that must be a mapping."""
    part = content.get(name)
    if not isinstance(part, Mapping):
        raise CorruptInput(f"the results have no {name} to tell what was compared: {AGAIN}")
    return part


def _keeps_the_target(verdict: Verdict) -> bool:
    name = verdict["method"]
    return name == FLOOR or (not traits_of(name).stays and not verdict["transport"])


def _entry_for(trio: Trio, file: str, entries: list[dict[str, Any]]) -> Mapping[str, Any]:
    """What the results say about the comparison of these three weights."""
    ours = trio.fingerprints()
    others: list[str] = []
    for entry in entries:
        theirs = _mapping(entry, "inputs")
        others = [role for role in ours if _mapping(theirs, role).get("weights") != ours[role]]
        if not others:
            return entry
    raise IncompatibleCheckpoints(
        f"the verdict of {file} was reached on other weights than these (--{' and --'.join(others or ours)}). "
        "Compare again, or name a --method."
    )
