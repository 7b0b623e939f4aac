"""The grammar of mergekit's files: models, slices, modules, and parameters that vary by layer and by tensor.

Everything a file says is read or refused by name; nothing is left out in silence. What the words mean is said by
`dialect` (methods) and `formulas` (layers and tensors)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradfix.errors import UsageError
from gradfix.registry import unknown

Setting = Any  # a value, a gradient over layers, or a list of {filter, value}
Settings = Mapping[str, Setting]
DOCUMENT = (
    "merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template", "name",
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "float64")
TRUE, FALSE = ("true", "yes", "on", "y", "t", "1"), ("false", "no", "off", "n", "f", "0")


@dataclass(frozen=True)
class ModelRef:
    """A model by path or hub id, perhaps with an adapter on it."""

    path: str
    lora: str | None = None

    def __str__(self) -> str:
        return self.path if self.lora is None else f"{self.path}+{self.lora}"


@dataclass(frozen=True)
class SourceLayers:
    """Layers first .. last of a model as one input of a slice; None stands for all of them."""

    model: ModelRef
    layers: tuple[int, int] | None
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class OutputSlice:
    """Layers of the output, and the inputs that are merged into them."""

    sources: tuple[SourceLayers, ...]
    base: ModelRef | None
    parameters: Settings = field(default_factory=dict)

    @property
    def depth(self) -> int | None:
        first = self.sources[0].layers
        return None if first is None else first[1] - first[0]


@dataclass(frozen=True)
class OutputModule:
    """The slices of one stack of layers; `name` is None where the file names no modules."""

    name: str | None
    slices: tuple[OutputSlice, ...]
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSource:
    """Where the row of one token comes from: a model's own, a token of a model, zeros, or (None) as without it."""

    model: ModelRef | None = None
    token: str | int | None = None
    zero: bool = False
    force: bool = False


@dataclass(frozen=True)
class TokenizerRequest:
    """The tokenizer of the output: "base", "union" or a model's; rows of single tokens; padding of the table."""

    source: str | ModelRef
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True)
class Document:
    """One merge of a file."""

    method: str
    modules: tuple[OutputModule, ...]
    base: ModelRef | None = None
    parameters: Settings = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: TokenizerRequest | None = None
    chat_template: str | None = None
    name: str | None = None
    where: str = ""

    def slices(self) -> Iterator[tuple[OutputModule, OutputSlice]]:
        for module in self.modules:
            for part in module.slices:
                yield module, part

    def models(self) -> list[ModelRef]:
        """Every model of the document once, the base first."""
        listed = [self.base] if self.base else []
        listed += [source.model for _, part in self.slices() for source in part.sources]
        return list(dict.fromkeys(listed))


def read_document(content: Mapping[str, Any], where: str) -> Document:
    _only(content, DOCUMENT, "key", where)
    method = content.get("merge_method")
    if not isinstance(method, str):
        raise UsageError(f"{where}: merge_method is missing.")
    base = _model(content["base_model"], f"{where}: base_model") if content.get("base_model") else None
    given = [key for key in ("models", "slices", "modules") if content.get(key)]
    if len(given) != 1:
        raise UsageError(f"{where}: exactly one of models, slices and modules is needed; found {given or 'none'}.")
    return Document(
        method=method, base=base, modules=_modules(content, given[0], base, where),
        parameters=_settings(content, where), dtype=_dtype(content, "dtype", where),
        out_dtype=_dtype(content, "out_dtype", where), tokenizer=_tokenizer(content, where),
        chat_template=_template(content, where), name=_name(content, where), where=where,
    )  # fmt: skip


def _only(holder: Mapping[str, Any], known: Sequence[str], kind: str, where: str) -> None:
    for key in holder:
        if key not in known:
            raise UsageError(f"{where}: {unknown(kind, str(key), list(known))}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected `name: value` lines, got {value!r}.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: expected a list, got {value!r}.")
    return value


def _modules(content: Mapping[str, Any], key: str, base: ModelRef | None, where: str) -> tuple[OutputModule, ...]:
    if key != "modules":
        return (OutputModule(None, _parts(content, key, base, where)),)
    found = []
    for name, one in _mapping(content["modules"], f"{where}: modules").items():
        here = f"{where}: module {name!r}"
        _only(_mapping(one, here), ("slices", "models", "parameters", "name"), "key", here)
        inside = [k for k in ("models", "slices") if one.get(k)]
        if len(inside) != 1:
            raise UsageError(f"{here}: one of models and slices is needed.")
        found.append(OutputModule(str(name), _parts(one, inside[0], base, here), _settings(one, here)))
    return tuple(found)


def _parts(holder: Mapping[str, Any], key: str, base: ModelRef | None, where: str) -> tuple[OutputSlice, ...]:
    """The slices; models are one slice of all layers, and the base is one of its inputs."""
    if key == "models":
        sources = [_source(one, f"{where}: models[{i}]", False) for i, one in enumerate(_list(holder[key], where))]
        if base is not None and base not in [source.model for source in sources]:
            sources.append(SourceLayers(base, None))
        return (_unique(OutputSlice(tuple(sources), base), where),)
    return tuple(_slice(one, base, f"{where}: slices[{i}]") for i, one in enumerate(_list(holder[key], where)))


def _slice(one: Any, base: ModelRef | None, where: str) -> OutputSlice:
    _only(_mapping(one, where), ("sources", "base_model", "parameters", "residual_weight"), "key", where)
    if one.get("residual_weight") is not None:
        raise UsageError(f"{where}: residual_weight does nothing in mergekit either; remove it.")
    own = _model(one["base_model"], where) if one.get("base_model") else base
    listed = _list(one.get("sources"), f"{where}: sources")
    sources = tuple(_source(source, f"{where}: sources[{i}]", True) for i, source in enumerate(listed))
    found = _unique(OutputSlice(sources, own, _settings(one, where)), where)
    depths = {source.layers[1] - source.layers[0] for source in sources if source.layers}
    if len(depths) != 1:
        raise UsageError(f"{where}: the sources have different numbers of layers ({sorted(depths)}).")
    return found


def _unique(part: OutputSlice, where: str) -> OutputSlice:
    models = [source.model for source in part.sources]
    twice = next((model for model in models if models.count(model) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: {twice} is an input twice; give it once.")
    return part


def _source(one: Any, where: str, sliced: bool) -> SourceLayers:
    known = ("model", "parameters", *(("layer_range",) if sliced else ()))
    _only(_mapping(one, where), known, "key", where)
    if "model" not in one:
        raise UsageError(f"{where}: a `model` is needed.")
    return SourceLayers(
        _model(one["model"], where), _range(one.get("layer_range"), where) if sliced else None, _settings(one, where)
    )


def _range(value: Any, where: str) -> tuple[int, int]:
    plain = isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)
    if not plain or not 0 <= value[0] < value[1]:
        raise UsageError(f"{where}: layer_range must be [first, end] with 0 <= first < end, got {value!r}.")
    return value[0], value[1]


def _model(value: Any, where: str) -> ModelRef:
    """`path`, `path@revision`, `path+adapter`, or the same as a mapping."""
    if isinstance(value, str):
        path, plus, lora = value.partition("+")
        if not path or "+" in lora or (plus and not lora):
            raise UsageError(f"{where}: {value!r} is no model; give PATH or PATH+ADAPTER.")
        return ModelRef(path, lora or None)
    holder = _mapping(value, where)
    if "path" in holder:
        _only(holder, ("path", "revision"), "key of a model", where)
        return ModelRef(_path(holder, where))
    _only(holder, ("model", "lora", "override_architecture"), "key of a model", where)
    if holder.get("override_architecture"):
        raise UsageError(
            f"{where}: override_architecture has no counterpart here: tensors go by the names in the files."
        )
    adapter = holder.get("lora")
    return ModelRef(_path(holder.get("model"), where), None if adapter is None else _path(adapter, where))


def _path(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    holder = _mapping(value, where)
    _only(holder, ("path", "revision"), "key of a model", where)
    revision = holder.get("revision")
    return f"{holder['path']}@{revision}" if revision else str(holder["path"])


def _settings(holder: Mapping[str, Any], where: str) -> Settings:
    given = holder.get("parameters")
    return {} if given is None else dict(_mapping(given, f"{where}: parameters"))


def _dtype(content: Mapping[str, Any], key: str, where: str) -> str | None:
    value = content.get(key)
    if value is None:
        return None
    plain = str(value).removeprefix("torch.")
    if plain not in DTYPES:
        raise UsageError(f"{where}: {key}: {unknown('dtype', plain, list(DTYPES))}")
    return plain


def _name(content: Mapping[str, Any], where: str) -> str | None:
    name = content.get("name")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"{where}: name must be a word, got {name!r}.")
    return name


def _template(content: Mapping[str, Any], where: str) -> str | None:
    template = content.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise UsageError(f"{where}: chat_template must be text, got {template!r}.")
    return template or None


def _tokenizer(content: Mapping[str, Any], where: str) -> TokenizerRequest | None:
    source, whole = content.get("tokenizer_source"), content.get("tokenizer")
    if source is not None and whole is not None:
        raise UsageError(f"{where}: give tokenizer_source or tokenizer, not both.")
    if source is not None:
        return TokenizerRequest(_token_home(source, f"{where}: tokenizer_source"))
    if whole is None:
        return None
    here = f"{where}: tokenizer"
    _only(_mapping(whole, here), ("source", "tokens", "pad_to_multiple_of"), "key", here)
    padding = whole.get("pad_to_multiple_of")
    if padding is not None and (type(padding) is not int or padding < 1):
        raise UsageError(f"{here}: pad_to_multiple_of must be a whole number above 0, got {padding!r}.")
    tokens = {
        str(token): _token(one, f"{here}: token {token!r}")
        for token, one in _mapping(whole.get("tokens") or {}, here).items()
    }
    return TokenizerRequest(_token_home(whole.get("source", "union"), here), tokens, padding)


def _token_home(value: Any, where: str) -> str | ModelRef:
    return value if value in ("base", "union") else _model(value, where)


def _token(one: Any, where: str) -> TokenSource:
    holder = _mapping(one or {}, where)
    _only(holder, ("source", "force"), "key", where)
    force = flag(holder.get("force", False), where)
    source = holder.get("source")
    if not isinstance(source, dict) or "kind" not in source:
        return TokenSource(None if source is None else _model(source, where), force=force)
    if source["kind"] == "zero":
        return TokenSource(zero=True, force=force)
    if source["kind"] != "model_token":
        raise UsageError(f"{where}: {unknown('kind of token source', str(source['kind']), ['model_token', 'zero'])}")
    _only(source, ("kind", "model", "token", "token_id"), "key", where)
    named = [source[key] for key in ("token", "token_id") if source.get(key) is not None]
    if len(named) != 1 or "model" not in source:
        raise UsageError(f"{where}: a model_token needs a model and one of token and token_id.")
    return TokenSource(_model(source["model"], where), named[0], force=force)


def flag(value: Any, where: str) -> bool:
    """True or false, also quoted, as 0 or 1, or as yes and no."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in TRUE + FALSE:
        raise UsageError(f"{where}: expected true or false, got {value!r}.")
    return word in TRUE


def number(value: Any, where: str) -> float:
    """A number, also as text (YAML reads 1e-5 as a word)."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{where}: expected a number, got {value!r}.")
    return found


def whole_number(value: Any, where: str) -> int:
    found = number(value, where)
    if found != int(found):
        raise UsageError(f"{where}: expected a whole number, got {value!r}.")
    return int(found)


KINDS = {bool: flag, float: number, int: whole_number}


def evaluate(setting: Setting, kind: type, tensor: str, t: float, where: str) -> Any:
    """The value for one tensor at t (0 for the first layer of a slice, 1 for its last); None where no filter fits.

    Numbers in a list are interpolated over the layers, flags are taken as they come."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return KINDS[kind](setting, where)
    if any(isinstance(one, dict) for one in setting):
        return _filtered(setting, kind, tensor, t, where)
    if not setting:
        return None
    values = [KINDS[kind](one, where) for one in setting]
    place = t * (len(values) - 1)
    low = int(place)
    if kind is bool:
        return values[low]
    mixed = (1 - (place - low)) * values[low] + (place - low) * values[min(low + 1, len(values) - 1)]
    return KINDS[kind](mixed, where)


def _filtered(conditions: list[Any], kind: type, tensor: str, t: float, where: str) -> Any:
    for one in conditions:
        _only(_mapping(one, where), ("filter", "value"), "key", where)
        wanted = one.get("filter")
        if wanted in (None, "*") or (isinstance(wanted, str) and wanted in tensor):
            return evaluate(one.get("value"), kind, tensor, t, where)
    return None
