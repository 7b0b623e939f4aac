"""mergekit's methods: the table they stand in, which inputs and parameters each takes, and their values for one tensor.

What they compute is said in `blends` (sums of task vectors) and `averages` (all others)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradfix.errors import UsageError
from gradfix.merging.bundles import Bundle, Merge, Rule
from gradfix.merging.formulas import Formula
from gradfix.merging.grammar import Document, ModelRef, OutputSlice, Setting, evaluate
from gradfix.registry import Registry, unknown

NEEDED = object()  # a parameter without a default
Parameters = Mapping[str, tuple[type, Any]]


@dataclass(frozen=True)
class Given:
    """The parameters for one tensor: the method's own, and every input's."""

    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]
    seed: int = 0

    def each(self, name: str) -> list[Any]:
        return [one[name] for one in self.own]


@dataclass(frozen=True)
class Dialect:
    """One of mergekit's methods.

    `base` is "needed", "allowed" or "ignored"; `differences` says whether the inputs are changes of the base or
    weights; `inputs` are the least and the most models beside a base that is needed or given."""

    plan: Callable[[Bundle, Given], Rule]
    shared: Parameters = field(default_factory=dict)
    own: Parameters = field(default_factory=dict)
    base: str = "needed"
    differences: bool = True
    inputs: tuple[int, float] = (1, math.inf)
    whole_rows: bool = False
    random: bool = False

    def merge(self) -> Merge:
        """What the rules must be shown."""
        return Merge(self.plan, self.whole_rows)

    def changes(self, with_base: bool) -> bool:
        """Whether the inputs of a slice are shown as changes of its base."""
        return self.differences and with_base


METHODS: Registry[Dialect] = Registry("merge_method", group="gradfix.mergekit_methods")


Plan = Callable[[Bundle, Given], Rule]


def mergekit_method(name: str, **about: Any) -> Callable[[Plan], Plan]:
    """Put a plan into the table: a function of the inputs of one tensor, as a bundle, and its parameters."""

    def add(plan: Plan) -> Plan:
        METHODS.register(name)(Dialect(plan, **about))
        return plan

    return add


def known_parameters() -> list[str]:
    return sorted({name for method in METHODS.values() for name in (*method.shared, *method.own)})


def check_document(document: Document) -> tuple[str, ...]:
    """Refuse what cannot be meant; say what means nothing to the method, as it does in mergekit."""
    try:
        method = METHODS[document.method]
    except UsageError as error:
        raise UsageError(f"{document.where}: {error}") from None
    idle: set[str] = set()
    for module, part in document.slices():
        _check_inputs(document, method, part)
        for settings in (
            document.parameters,
            module.parameters,
            part.parameters,
            *(s.parameters for s in part.sources),
        ):
            for name, setting in settings.items():
                kind = {**method.shared, **method.own}.get(name)
                if kind is None and name not in known_parameters():
                    raise UsageError(f"{document.where}: {unknown('parameter', name, known_parameters())}")
                if kind is None:
                    idle.add(name)
                else:
                    _check_setting(setting, kind[0], f"{document.where}: {name}")
    means = f"nothing to {document.method} (in mergekit neither)"
    return tuple(f"the parameter {name} means {means}" for name in sorted(idle))


def _check_setting(setting: Setting, kind: type, where: str) -> None:
    """Every value of it, whichever tensor it is for."""
    for one in setting if isinstance(setting, list) else [setting]:
        if isinstance(one, dict):
            evaluate([one | {"filter": None}], kind, "", 0.0, where)
        else:
            evaluate(one, kind, "", 0.0, where)


def _check_inputs(document: Document, method: Dialect, part: OutputSlice) -> None:
    models = [source.model for source in part.sources]
    based = part.base is not None and part.base in models
    if method.base != "ignored" and part.base is not None and not based:
        raise UsageError(f"{document.where}: base_model {part.base} is not among the sources of a slice; add it.")
    if method.base == "needed" and not based:
        raise UsageError(f"{document.where}: {document.method} needs a base_model.")
    count = len(models) - (based and method.base != "ignored")
    least, most = method.inputs
    if not least <= count <= most:
        wanted = f"{least}" if least == most else f"at least {least}" if most == math.inf else f"at most {most:g}"
        beside = " beside the base_model" if method.base != "ignored" else ""
        raise UsageError(f"{document.where}: {document.method} takes {wanted} models{beside}, got {count}.")


def given_for(document: Document, formula: Formula, tensors: Mapping[ModelRef, str], seed: int) -> Given:
    """The parameters for one tensor of the output; `tensors` names it in the inputs that have parameters."""
    method, part, t = METHODS[document.method], formula.part, formula.t
    outer = [part.parameters, formula.module.parameters, document.parameters]

    def ask(parameters: Parameters, scopes: list[Mapping[str, Setting]], tensor: str, whose: str) -> dict[str, Any]:
        found = {}
        for name, (kind, default) in parameters.items():
            value = None
            for scope in scopes:
                if value is None and name in scope:
                    value = evaluate(scope[name], kind, tensor, t, f"{document.where}: {name}")
            if value is None and default is NEEDED:
                raise UsageError(f"{document.where}: {whose} has no {name} for {tensor!r}; {document.method} needs it.")
            found[name] = default if value is None else value
        return found

    shared = ask(method.shared, outer, formula.name, document.method)
    own = []
    for source in part.sources:
        if source.model in tensors:
            own.append(ask(method.own, [source.parameters, *outer], tensors[source.model], str(source.model)))
    return Given(shared, own, seed)
