"""From a verdict to a model: what `gradfix transport` does to make what a method of `compare` made.

Masks and alignments are transport's own options; a method that trains is run as compare runs it. A verdict can be
given as the file it stands in: then it says which method is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradfix.checkpoints.open import open_checkpoint
from gradfix.commands.configs import CompareConfig, TransportConfig, command_line, given
from gradfix.commands.setting import Setting, Shots
from gradfix.data import Dataset
from gradfix.errors import CorruptInput, DataError, IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Bound
from gradfix.vectors.masks import MASKS

OWN = ("mask", "best")
SHIPPED: dict[str, dict[str, Any]] = {
    "naive": {"mask": "none"},
    "gradfix": {"mask": "agree"},
    "gradfix_mean": {"mask": "agree", "vote": "mean"},
    "force": {"mask": "force"},
    "magnitude": {"mask": "magnitude"},
    "random": {"mask": "random"},
    "veto": {"mask": "veto"},
    "transfusion": {"mask": "none", "align": "transfusion"},
    "rebasin": {"mask": "none", "align": "rebasin"},
    "align_mask": {"mask": "agree", "align": "transfusion"},
}
DIALS = ("mask", "margin", "alpha", "vote", "votes", "align")  # of masks; other methods set their own
Verdict = Mapping[str, Any]
AGAIN = "write them again with `gradfix compare --json`."
KEYS: dict[str, type | tuple[type, ...]] = {
    "method": str, "pair": (str, type(None)), "shots": int, "regime": str, "transport": bool, "advice": str,
}  # fmt: skip
VOTED = ("direction", "votes")  # what a mask that asks the target's votes sees
READERS = {
    "margin": ("votes",),
    "vote": VOTED,
    "votes": VOTED,
}  # which masks read an option, by what they see


def shippable() -> list[str]:
    """What `--method` takes: all of compare but the target as it is and the references nobody could ship."""
    import gradfix.methods.comparison  # noqa: F401  fills the registry
    from gradfix.methods.methods import METHODS

    able = [name for name, method in METHODS.items() if not method.reference and name != "zero_shot"]
    return list(dict.fromkeys([*OWN, *able]))


def spelled_out(config: TransportConfig) -> tuple[TransportConfig, Verdict | None]:
    """The same transport with the method its verdict names, and the mask, vote and alignment a method stands for."""
    verdict = None
    if config.verdict is not None:
        verdict = _verdict_for(config)
        config = replace(config, method=verdict["method"], verdict=None)
    if config.method == "mask":
        return config, verdict
    if config.method not in shippable():
        raise UsageError(unknown("method", config.method, shippable()))
    if config.unlabelled is not None and config.method != "best":
        if verdict is None:
            raise UsageError(f"--method {config.method} has no --unlabelled: leave it out.")
        config = replace(config, unlabelled=None)  # it was for a verdict that might have been best
    if config.method not in SHIPPED:
        for name in given(config).keys() & set(DIALS):
            raise UsageError(f"--method {config.method} has no --{name}: leave it out.")
        return config, verdict
    wanted = {"vote": "majority", "align": "none", **SHIPPED[config.method]}
    for name, value in given(config).items():
        if value != wanted.get(name, value):
            raise UsageError(
                f"--method {config.method} means --{name} {wanted[name]}: leave --{name} out, or leave --method out "
                "and spell out --mask, --vote and --align."
            )
    return replace(config, method="mask", **wanted), verdict


def refuse_strays(config: TransportConfig) -> None:
    """An option that nothing would read is an error, not ignored; `config` is spelled out."""
    if config.margin != "auto" and not 0 <= float(config.margin) <= 1:
        raise UsageError(f"--margin must lie between 0 and 1, got {config.margin}.")
    if config.method != "mask":
        return
    if config.unlabelled is not None:
        raise UsageError("--unlabelled is for --method best: leave it out.")
    sees = MASKS[config.mask].sees
    for name in [name for name in READERS if name in given(config)]:
        if sees not in READERS[name]:
            able = [mask for mask in MASKS if MASKS[mask].sees in READERS[name]]
            raise UsageError(
                f"--mask {config.mask} reads no --{name} ({', '.join(able)} would): leave it out."
            )
    if config.votes is not None and "vote" in given(config):
        raise UsageError(f"--votes {config.votes} holds votes already taken: leave --vote out.")


def ship_command(config: CompareConfig, verdict: Verdict) -> str | None:
    """The command that writes the model a verdict recommends; None where there is nothing to write."""
    if _keeps_the_target(verdict) or verdict["method"] not in shippable():
        return None
    known = {item.name for item in fields(TransportConfig)}
    shared = {name: value for name, value in given(config).items() if name in known and name != "report"}
    if verdict["method"] != "best":
        shared.pop("unlabelled", None)
    shared |= {"shots": verdict["shots"], "seed": config.seeds[0], "method": verdict["method"], "out": "OUT"}
    return command_line("transport", TransportConfig(**shared))


def follow(verdict: Verdict, shots: Shots, start: Setting) -> Shots:
    """The few-shot set, with a note; refused where the verdict was reached on other data or by other means."""
    regime = "few_shot" if shots.validation is None else "validation"
    if verdict["regime"] != regime:
        ways = {"few_shot": "by folds (--validation none)", "validation": "on validation data"}
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


def _refuse_other_data(verdict: Verdict, shots: Shots, start: Setting) -> None:
    """The examples must be those of the comparison, split by split and in order."""
    splits = {"train": start.dataset.pick("train"), "validation": shots.validation, "test": shots.test}
    ours = Dataset({name: rows for name, rows in splits.items() if rows}, {}, "").hashes()
    theirs = _mapping(_mapping(verdict["compared"], "data"), "sha256")
    for name in splits:
        if ours.get(name) != theirs.get(name):
            raise DataError(
                f"the verdict was reached on other {name} examples than those of {start.dataset.source}. "
                "Compare again, or name a --method."
            )


def _refuse_other_task(verdict: Verdict, start: Setting) -> None:
    """The task's class stands in the results by its bound's name; here its settings are compared."""
    theirs = _mapping(_mapping(verdict["compared"], "config"), "task_options")
    ours = {name: str(value) for name, value in vars(start.task).items()}
    odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if odd:
        raise UsageError(
            f"the verdict was reached with another {' and '.join(odd)} of the task than --task "
            f"{start.options.task} has here. Compare again, or give the options of the comparison."
        )


def refuse_other_bound(verdict: Verdict, bound: Bound) -> None:
    """Two tasks may have the same settings; what they make of the target tells them apart."""
    theirs = _mapping(verdict["compared"], "config").get("task")
    if theirs != type(bound).__name__:
        raise UsageError(
            f"the verdict was reached on another --task ({theirs}, here {type(bound).__name__}). Compare again."
        )


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the results that must be a mapping."""
    part = content.get(name)
    if not isinstance(part, Mapping):
        raise CorruptInput(f"the results have no {name} to tell what was compared: {AGAIN}")
    return part


def _keeps_the_target(verdict: Verdict) -> bool:
    from gradfix.methods.verdicts import STAYS

    method = verdict["method"]
    return method == "zero_shot" or (method not in STAYS and not verdict["transport"])


def _verdict_for(config: TransportConfig) -> Verdict:
    """The verdict on these checkpoints and this budget; one on others is refused."""
    from gradfix.methods.results import Results

    file = config.verdict
    if config.method not in OWN or "mask" in given(config):
        raise UsageError(f"--verdict {file} says what to ship: leave --method and --mask out.")
    results = Results.load(str(file))
    whole = [
        all(name in verdict and isinstance(verdict[name], kind) for name, kind in KEYS.items())
        for verdict in results.verdicts
    ]
    if not all(whole) or not whole:
        raise CorruptInput(f"{file} has {'a damaged' if whole else 'no'} verdict; {AGAIN}")
    compared = _entry_for(config, results.provenance)
    found = [verdict for verdict in results.verdicts if verdict["pair"] == compared.get("pair")]
    budgets = [verdict["shots"] for verdict in found]
    if config.shots not in budgets:
        raise UsageError(
            f"{file} has verdicts for {' and '.join(map(str, budgets))} examples per class, not for {config.shots}; "
            "choose one by --shots."
        )
    verdict = found[budgets.index(config.shots)]
    if _keeps_the_target(verdict):
        raise UnsafeResult(f"the verdict of {file}: {verdict['advice']} Nothing was written.")
    return {**verdict, "compared": compared}


def _entry_for(config: TransportConfig, entries: list[dict[str, Any]]) -> Mapping[str, Any]:
    """What the results say about the comparison of these three weights."""
    base = open_checkpoint(config.base)
    ours = {
        "base": base.fingerprint(),
        "tuned": open_checkpoint(config.tuned, base=base).fingerprint(),
        "target": open_checkpoint(config.target).fingerprint(),
    }
    others: list[str] = []
    for entry in entries:
        theirs = _mapping(entry, "inputs")
        others = [role for role in ours if _mapping(theirs, role).get("weights") != ours[role]]
        if not others:
            return entry
    raise IncompatibleCheckpoints(
        f"the verdict of {config.verdict} was reached on other weights than these (--{' and --'.join(others or ours)}). "
        "Compare again, or name a --method."
    )
