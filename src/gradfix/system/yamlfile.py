"""Read a YAML file of settings: plain values only, and every key once.

YAML's own rule lets a repeated key overwrite the first in silence; here it is an error with both lines.
No tag can build an object, so a config file cannot run code."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown

MAX_BYTES = 1 << 20
Model = TypeVar("Model", bound=BaseModel)


class _OneKeyEach(yaml.SafeLoader):
    """The safe loader, without overwriting and without aliases (which can grow without bound)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise UsageError(f"line {line}: a key must be a plain word.")
            if key in lines:
                raise UsageError(f"line {line}: key {key!r} is already on line {lines[key]}. Keep one.")
            lines[key] = line
        return super().construct_mapping(node, deep)


def load_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's top-level mapping; an empty file is an empty mapping."""
    documents = load_documents(path)
    if len(documents) > 1:
        raise UsageError(f"{path} holds {len(documents)} documents (parts after a line of ---); one is expected.")
    return documents[0]


def load_documents(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The top-level mapping of every document in the file, at least one."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB; is it a config file?")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptInput(
            f"{path} cannot be read as text ({type(error).__name__}); give a YAML file in UTF-8."
        ) from None
    try:
        contents = list(yaml.load_all(text, Loader=_OneKeyEach))
    except UsageError as error:
        raise UsageError(f"{path}, {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {_where(error)}.") from None
    except (RecursionError, ValueError, OverflowError, TypeError) as error:
        raise UsageError(f"{path} is not valid YAML ({type(error).__name__}).") from None
    found: list[dict[str, Any]] = [content for content in contents if content is not None]
    for content in found:
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise UsageError(f"{path} must hold settings as `name: value` lines.")
    return found or [{}]


def checked(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Validate settings; the first fault becomes one line that names the key and the way out."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(f"{where}: {_fault(model, error)}") from None


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or type(error).__name__
    return f"line {mark.line + 1}: {problem}" if mark is not None else " ".join(str(problem).split())[:200]


def _fault(model: type[BaseModel], error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    place = _dotted(fault["loc"])
    if fault["type"] == "extra_forbidden":
        home = _model_at(model, fault["loc"][:-1])
        inside = f"{_dotted(fault['loc'][:-1])}: " if len(fault["loc"]) > 1 else ""
        return inside + unknown("key", str(fault["loc"][-1]), list(home.model_fields))
    if fault["type"] == "missing":
        return f"{place} is missing."
    message = fault["msg"].removeprefix("Value error, ")
    return f"{place}: {message}." if place else f"{message.rstrip('.')}."


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """The nested model a location lies in, for its list of keys."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            candidates = _models_in(model.model_fields[part].annotation)
            model = candidates[0] if candidates else model
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _models_in(inner)]
