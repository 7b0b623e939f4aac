"""Merge recipes: YAML in, a frozen and checked config out; mergekit's files can be read as well.

A recipe names the target, the vectors (each with its own base) and how to put them together. Unknown keys
are errors with a suggestion."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gradfix.errors import UsageError
from gradfix.merging.rules import MERGES
from gradfix.system.yamlfile import checked, load_yaml
from gradfix.vectors.masks import MASKS

Share = Annotated[float, Field(gt=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class VectorRecipe(_Frozen):
    """One fine-tune: where it is, what it is good at, how much it counts.

    `votes` is a file made by `gradfix vote`; without one the votes are taken on `data`. Vectors with the
    same data share their votes."""

    base: str
    tuned: str
    weight: float = 1.0
    density: Share | None = None
    votes: str | None = None
    data: str | None = None
    task: str | None = None
    validation: str | None = None
    label_column: str | None = None
    text_column: tuple[str, ...] = ()
    text_template: str | None = None
    image_column: str | None = None
    pooling: str | None = None
    max_length: int | None = None

    @field_validator("text_column", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class MergeRecipe(_Frozen):
    """What to merge onto what, and how.

    `order` is where the votes come in; by default "plain" without votes or data, "mask_then_merge" when all
    vectors serve one task and "merge_then_mask" when they serve several. `alpha` is by default "auto" (chosen
    on every task's validation data) with data and 1 without. `options` are the method's own."""

    target: str
    vectors: tuple[VectorRecipe, ...] = Field(min_length=1)
    out: str | None = None
    method: str = "ties"
    order: Literal["plain", "mask_then_merge", "merge_then_mask"] | None = None
    mask: str = "agree"
    margin: float | None = Field(default=None, ge=0, le=1)
    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] | None = None
    density: Share | None = None
    options: dict[str, Any] = {}
    task: str | None = None
    shots: int = Field(default=5, ge=1)
    select: str = "random"
    allow_fewer: bool = False
    engine: str = "auto"
    batch_size: int = Field(default=16, ge=1)
    seed: int = 0
    head: Literal["error", "copy", "skip"] = "error"
    dtype: str | None = None
    device: str | None = None
    force: bool = False

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        MERGES[value]
        return value

    @field_validator("mask")
    @classmethod
    def _known_mask(cls, value: str) -> str:
        MASKS[value]
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> MergeRecipe:
        trims = "density" in MERGES[self.method].options
        if not trims and (self.density is not None or any(v.density is not None for v in self.vectors)):
            raise ValueError(f"density means nothing to the merge {self.method!r}")
        if self.order == "plain" and any(vector.votes for vector in self.vectors):
            raise ValueError("order plain uses no votes; choose another order or drop them")
        if any(vector.data and not (vector.task or self.task) for vector in self.vectors):
            raise ValueError("a vector with data needs a task (zero-shot, classification, seq2seq or causal)")
        if self.alpha == "auto" and not any(vector.data for vector in self.vectors):
            raise ValueError("alpha auto needs data to choose it on; give every vector its data, or a number")
        return self

    def densities(self) -> float | list[float] | None:
        """One number, or one per vector where vectors set their own."""
        if all(vector.density is None for vector in self.vectors):
            return self.density
        common = 1.0 if self.density is None else self.density
        return [common if vector.density is None else vector.density for vector in self.vectors]

    def settled_order(self) -> str:
        if self.order is not None:
            return self.order
        asked = {vector.votes or vector.data for vector in self.vectors} - {None}
        if not asked:
            return "plain"
        return "mask_then_merge" if len(asked) == 1 else "merge_then_mask"

    def settled_alpha(self) -> float | Literal["auto"]:
        if self.alpha is not None:
            return self.alpha
        return "auto" if any(vector.data for vector in self.vectors) else 1.0


def load_recipe(path: str | os.PathLike[str], **given: Any) -> MergeRecipe:
    """A recipe from its YAML file; `given` values that are not None win over the file."""
    return checked(MergeRecipe, {**load_yaml(path), **_present(given)}, str(path))


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class Imported:
    """A foreign merge file in our words: what it says, what it leaves open, what a reader should know."""

    values: dict[str, Any]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    source: str

    def complete(self, **given: Any) -> MergeRecipe:
        """The recipe, once what is missing has been supplied."""
        values = {**self.values, **_present(given)}
        lacking = [key for key in self.missing if key not in values]
        if lacking:
            raise UsageError(
                f"{self.source} does not say: {', '.join(lacking)}. The target is the model the vectors go onto: "
                f"a new base, or {self.values['vectors'][0]['base']} to merge in place as mergekit does."
            )
        return checked(MergeRecipe, values, self.source)


NO_WEIGHT = 1e-8  # weights that sum to less are not divided by their sum
LINEAR = ("task_arithmetic", "dare_linear")
IMPORTED = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
_KNOWN = {"merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "name"}
_SILENT = {"tokenizer_source", "tokenizer", "chat_template"}
_PARAMETERS = {"weight", "density", "normalize", "rescale", "lambda", "int8_mask"}


def from_mergekit(path: str | os.PathLike[str]) -> Imported:
    """Read a mergekit file of task_arithmetic, ties, dare_linear or dare_ties over whole models.

    What mergekit computes is kept where both can: trimming per tensor, `lambda` as alpha, its defaults. The
    target is always missing: mergekit writes onto the base, gradfix onto any release."""
    where, content = str(path), load_yaml(path)
    method = content.get("merge_method")
    if method not in IMPORTED:
        raise UsageError(f"{where}: merge_method {method!r} cannot be imported; there are: {', '.join(IMPORTED)}.")
    for key in content:
        if key not in _KNOWN | _SILENT:
            raise UsageError(f"{where}: {key!r} has no counterpart here (whole models only, no slices).")
    base = content.get("base_model")
    if not isinstance(base, str) or not isinstance(content.get("models"), list):
        raise UsageError(f"{where}: base_model and a list of models are needed.")
    shared = _parameters(content, where)
    listed = [_vector(entry, base, shared, where) for entry in content["models"]]
    vectors = [vector for vector in listed if vector is not None]
    if not vectors:
        raise UsageError(f"{where}: no model beside the base.")
    values = _method_values(str(method), vectors, shared)
    notes = _notes(str(method), content)
    dtype = content.get("out_dtype") or content.get("dtype")
    if dtype is not None:
        values["dtype"] = str(dtype)
    return Imported(values, ("target",), notes, where)


def _method_values(method: str, vectors: list[dict[str, Any]], shared: Mapping[str, Any]) -> dict[str, Any]:
    normalize = bool(shared.get("normalize", method == "ties"))
    values: dict[str, Any] = {"method": method, "vectors": vectors, "alpha": float(shared.get("lambda", 1.0))}
    options: dict[str, Any] = {}
    if method == "ties":
        options["per_tensor"] = True
    if method not in LINEAR:
        options["normalize"] = normalize
    total = sum(vector["weight"] for vector in vectors)
    if method in LINEAR and normalize and abs(total) > NO_WEIGHT:
        if method == "task_arithmetic":
            values["method"] = "mean"
        else:
            for vector in vectors:
                vector["weight"] /= total
    if method.startswith("dare"):
        options["rescale"] = bool(shared.get("rescale", True))
    if method == "task_arithmetic":
        for vector in vectors:
            vector.pop("density", None)
    return {**values, "options": options} if options else values


def _notes(method: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if method == "ties":
        notes.append("trimmed per tensor as mergekit does; drop options.per_tensor for the paper's global trim")
    if method.startswith("dare"):
        notes.append("survivors are divided by the density (the paper); mergekit matches each tensor's L1 norm")
    if any(content.get(key) for key in _SILENT):
        notes.append("tokenizer and chat template come from the target")
    return tuple(notes)


def _parameters(holder: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = holder.get("parameters") or {}
    if not isinstance(given, dict):
        raise UsageError(f"{where}: parameters must be `name: value` lines.")
    for name, value in given.items():
        if name not in _PARAMETERS:
            raise UsageError(f"{where}: parameter {name!r} has no counterpart here.")
        if isinstance(value, list | dict):
            raise UsageError(f"{where}: parameter {name!r} varies by layer or filter; here it is one number.")
        if not isinstance(value, bool) and name in ("weight", "density", "lambda"):
            _number(value, name, where)
    return given


def _number(value: Any, name: str, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: {name} must be a number, got {value!r}.") from None


def _vector(entry: Any, base: str, shared: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        raise UsageError(f"{where}: every entry of models needs a `model`.")
    model = entry["model"]
    if model == base:
        return None
    whole, plus, adapter = model.partition("+")
    if plus and whole != base:
        raise UsageError(f"{where}: {model} puts an adapter on another model than base_model {base}.")
    own = {**shared, **_parameters(entry, where)}
    if "weight" not in own:
        raise UsageError(f"{where}: {model} has no weight.")
    return {
        "base": base,
        "tuned": adapter if plus else model,
        "weight": _number(own["weight"], "weight", where),
        "density": _number(own.get("density", 1.0), "density", where),
    }
