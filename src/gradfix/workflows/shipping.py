"""From a verdict to a model: what `gradfix transport` does to make what a method of `compare` made.

Masks and alignments are transport's own options; a method that trains is run as compare runs it. A verdict can be
given as the file it stands in: then it says which method is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.registry import unknown
from gradfix.workflows.configs import CompareConfig, TransportConfig, command_line, given
from gradfix.workflows.setting import Shots

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
KEYS = {"method", "pair", "shots", "regime", "transport", "advice"}


def shippable() -> list[str]:
    """What `--method` takes: all of compare but the target as it is and the references nobody could ship."""
    import gradfix.comparison.running  # noqa: F401  fills the registry
    from gradfix.comparison.methods import METHODS

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
    wanted = SHIPPED.get(config.method)
    for name, value in given(config).items():
        if wanted is None and name in DIALS:
            raise UsageError(f"--method {config.method} has no --{name}: leave it out.")
        if wanted is not None and value != wanted.get(name, value):
            raise UsageError(f"--method {config.method} means --{name} {wanted[name]}: leave --{name} out.")
    return (config if wanted is None else replace(config, method="mask", **wanted)), verdict


def ship_command(config: CompareConfig, verdict: Verdict) -> str | None:
    """The command that writes the model a verdict recommends; None where there is nothing to write."""
    if _keeps_the_target(verdict) or verdict["method"] not in shippable():
        return None
    known = {item.name for item in fields(TransportConfig)}
    shared = {name: value for name, value in given(config).items() if name in known and name != "report"}
    shared |= {"shots": verdict["shots"], "method": verdict["method"], "out": "OUT"}
    return command_line("transport", TransportConfig(**shared))


def follow(verdict: Verdict, shots: Shots) -> Shots:
    """The few-shot set, with a note; refused where the verdict was reached by other means of choosing."""
    regime = "few_shot" if shots.validation is None else "validation"
    if verdict["regime"] != regime:
        ways = {"few_shot": "by folds (--validation none)", "validation": "on validation data"}
        theirs = ways.get(verdict["regime"], "otherwise")
        raise UsageError(f"the verdict was reached {theirs}, but this transport chooses {ways[regime]}.")
    return replace(shots, notes=(*shots.notes, f"{verdict['method']} is the verdict: {verdict['advice']}"))


def _keeps_the_target(verdict: Verdict) -> bool:
    from gradfix.comparison.verdicts import STAYS

    method = verdict["method"]
    return method == "zero_shot" or (method not in STAYS and not verdict["transport"])


def _verdict_for(config: TransportConfig) -> Verdict:
    """The verdict on these checkpoints and this budget; one on others is refused."""
    from gradfix.comparison.results import Results

    file = config.verdict
    if config.method not in OWN or "mask" in given(config):
        raise UsageError(f"--verdict {file} says what to ship: leave --method and --mask out.")
    results = Results.load(str(file))
    if any(KEYS - set(verdict) for verdict in results.verdicts):
        raise CorruptInput(f"{file} has a damaged verdict; write it again with `gradfix compare --json`.")
    pair = _pair_of(config, results.provenance)
    found = [verdict for verdict in results.verdicts if verdict["pair"] == pair]
    budgets = [verdict["shots"] for verdict in found]
    if config.shots not in budgets:
        raise UsageError(
            f"{file} has verdicts for {' and '.join(map(str, budgets))} examples per class, not for {config.shots}; "
            "choose one by --shots."
        )
    verdict = found[budgets.index(config.shots)]
    if _keeps_the_target(verdict):
        raise UnsafeResult(f"the verdict of {file}: {verdict['advice']} Nothing was written.")
    return verdict


def _pair_of(config: TransportConfig, entries: list[dict[str, Any]]) -> Any:
    """The name of the pair whose weights are these three."""
    base = open_checkpoint(config.base)
    ours = {
        "base": base.fingerprint(),
        "tuned": open_checkpoint(config.tuned, base=base).fingerprint(),
        "target": open_checkpoint(config.target).fingerprint(),
    }
    others: list[str] = []
    for entry in entries:
        theirs = entry.get("inputs") or {}
        others = [role for role in ours if dict(theirs.get(role) or {}).get("weights") != ours[role]]
        if not others:
            return entry.get("pair")
    raise IncompatibleCheckpoints(
        f"the verdict of {config.verdict} was reached on other weights than these (--{' and --'.join(others or ours)}). "
        "Compare again, or name a --method."
    )
