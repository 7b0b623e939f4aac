"""From a verdict to a model: the options of `gradfix transport` that make what a method of `compare` made.

Every method that moves the task vector can be shipped by its name; the ones that only train cannot, and no
command is offered for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradfix.errors import UsageError
from gradfix.workflows.configs import CompareConfig, TransportConfig, command_line, given

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


def spelled_out(config: TransportConfig) -> TransportConfig:
    """The same transport with the mask, vote and alignment its `method` stands for."""
    if config.method in OWN:
        return config
    if config.method not in SHIPPED:
        raise UsageError(
            f"no method called {config.method!r} can be shipped; there are: {', '.join([*OWN, *SHIPPED])}."
        )
    wanted = SHIPPED[config.method]
    clashes = [name for name in wanted if given(config).get(name, wanted[name]) != wanted[name]]
    if clashes:
        name = clashes[0]
        raise UsageError(f"--method {config.method} means --{name} {wanted[name]}: leave --{name} out.")
    return replace(config, method="mask", **wanted)


def ship_command(config: CompareConfig, verdict: Mapping[str, Any]) -> str | None:
    """The command that writes the model a verdict recommends; None where there is nothing to move."""
    method = verdict["method"]
    if not verdict["transport"] or method not in (*SHIPPED, "best"):
        return None
    known = {item.name for item in fields(TransportConfig)}
    shared = {name: value for name, value in given(config).items() if name in known and name != "report"}
    shared |= {"shots": verdict["shots"], "method": method, "out": "OUT"}
    return command_line("transport", TransportConfig(**shared))
