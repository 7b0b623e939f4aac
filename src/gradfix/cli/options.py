"""From a config dataclass to a command: options, YAML file, checks.

What the user typed wins over the YAML file, which wins over the default. Unknown YAML keys and missing
required options are errors with the way out. `--shots 5 50` is read as two values."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from gradfix.cli.console import Printer
from gradfix.commands.configs import help_text
from gradfix.errors import UsageError
from gradfix.registry import unknown

Config = Any
SHORT_FLAG = re.compile(r"-[A-Za-z]+")  # not -1, which may be a value
END = "\0"  # no argument of a process can hold it


def fields_of(kind: type[Config]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def expand_lists(argv: list[str], kind: type[Config] | None) -> list[str]:
    """`--shots 5 50` -> `--shots 5 --shots 50`, for the options of this command that take several values."""
    known = fields_of(kind) if kind else {}
    repeatable = {flag(name) for name, field in known.items() if "tuple" in str(field.type)}
    out: list[str] = []
    current, empty = "", False  # the list that values go to now, and whether it has none yet
    for token in [*argv, END]:
        if token == END or token.startswith("--") or SHORT_FLAG.fullmatch(token):
            if empty:
                raise UsageError(f"{current} needs at least one value; give one, or leave the option out.")
            current = token if token in repeatable else ""
            empty = bool(current)
            out += [] if current or token == END else [token]
        else:
            out += [current, token] if current else [token]
            empty = False
    return out


def command(kind: type[Config], body: Callable[[Config, Printer], None], *, explained: bool) -> Callable[..., None]:
    """A typer callback whose options are the fields of `kind`."""
    hints = typing.get_type_hints(kind)
    order = sorted(fields_of(kind).items(), key=lambda item: not item[1].metadata["required"])
    order.sort(key=lambda item: not item[1].metadata["positional"])
    parameters = [_parameter(field, hints[name], explained) for name, field in order]
    has_config = "config" in fields_of(kind)
    if not has_config:
        parameters.append(_keyword("config", str | None, typer.Option("--config", help="YAML file with any of these options.")))  # fmt: skip
    parameters.append(_keyword("json", str | None, typer.Option("--json", help="Write the result as JSON to this file ('-': stdout).")))  # fmt: skip
    parameters.append(_keyword("quiet", bool, typer.Option("--quiet", "-q", help="Print nothing but errors."), False))

    def callback(**given: Any) -> None:
        out = Printer(given.pop("json"), given.pop("quiet"))
        path = None if has_config else given.pop("config")
        config = settle(kind, given, path)
        from gradfix.commands.guard import guard_outputs

        guard_outputs(config, out.json_path, parts=[SimpleNamespace(config=path)])
        body(config, out)

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return callback


def _parameter(field: dataclasses.Field[Any], hint: Any, explained: bool) -> inspect.Parameter:
    name, text = field.name, help_text(field) if explained else field.metadata["help"]
    if field.default not in (None, dataclasses.MISSING, (), False):
        shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        text += f" [default: {shown}]"
    if field.metadata["required"]:
        text += " [required]"
    kind = _plain(hint)
    if field.metadata["positional"]:
        return _keyword(name, kind, typer.Argument(help=text, metavar=name.upper()))
    if kind == (bool | None):
        return _keyword(name, kind, typer.Option(f"{flag(name)}/--no-{name.replace('_', '-')}", help=text))
    return _keyword(name, kind, typer.Option(flag(name), help=text))


def _plain(hint: Any) -> Any:
    """The option's type, always optional, so that 'not given' can be told from the default."""
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]] | None  # type: ignore[misc]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint | None


def _keyword(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def settle(kind: type[Config], given: dict[str, Any], path: str | None) -> Config:
    """Typed values over YAML values over defaults, checked by pydantic."""
    known = fields_of(kind)
    values = _from_yaml(path, known) if path else {}
    values |= {name: value for name, value in given.items() if value is not None and value != []}
    for name, field in known.items():
        stand_in = field.metadata["stand_in"]
        if name not in values and values.get(stand_in) is not None:
            values[name] = values[stand_in]
        if field.metadata["required"] and name not in values:
            word = name.upper() if field.metadata["positional"] else flag(name)
            raise UsageError(f"{word} is missing: {help_text(field)}")
    from pydantic import TypeAdapter, ValidationError

    try:
        config = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        raise UsageError(f"{flag(name)}: {first['msg'].lower()}, got {first['input']!r}.") from None
    for name, field in known.items():
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            _refuse_odd(name.upper() if field.metadata["positional"] else flag(name), item, field.metadata)
    return config


def _refuse_odd(word: str, value: Any, about: Mapping[str, Any]) -> None:
    """Values of the right type that no run can use: nothing, bytes no system takes, numbers out of range."""
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise UsageError(f"{word} is empty or holds a zero byte; give a value, or leave the option out.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not math.isfinite(value):
        raise UsageError(f"{word} must be a finite number, got {value}.")
    if about.get("least") is not None and value < about["least"]:
        raise UsageError(f"{word} must be at least {about['least']}, got {value}.")
    if about.get("most") is not None and value > about["most"]:
        raise UsageError(f"{word} must be at most {about['most']}, got {value}.")


def _from_yaml(path: str, known: dict[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    from gradfix.system.yamlfile import load_yaml

    content = load_yaml(Path(path))
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold options as `name: value` lines.")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in values:
        if name not in known:
            raise UsageError(f"{path}: " + unknown("option", name, list(known)))
    for name, value in values.items():
        hint = str(known[name].type)
        if hint == "str" or hint.startswith("str |"):
            values[name] = value if value is None or isinstance(value, str) else str(value)
        if "tuple" in hint and not isinstance(value, (list, tuple)):
            values[name] = (value,)
    return {name: value for name, value in values.items() if value is not None}
