"""Merge recipes: YAML in, a frozen and checked config out.

A recipe names the target, the vectors (each with its own base) and how to put them together. Unknown keys
are errors with a suggestion."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gradfix.align.coordinates import OUTSIDES
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
    on every task's validation data) with data and 1 without. `coordinates` is how vectors of another shape than the
    target are rewritten for it; they need data. `options` are the method's own."""

    target: str
    vectors: tuple[VectorRecipe, ...] = Field(min_length=1)
    out: str | None = None
    method: str = "ties"
    order: Literal["plain", "mask_then_merge", "merge_then_mask"] | None = None
    mask: str = "agree"
    margin: float | None = Field(default=None, ge=0, le=1)
    alpha: float | Literal["auto"] | None = None
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
    coordinates: str = "bico"
    force: bool = False

    @field_validator("alpha")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"must be a finite number or auto, got {value}")
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        MERGES[value]
        return value

    @field_validator("coordinates")
    @classmethod
    def _known_coordinates(cls, value: str) -> str:
        OUTSIDES[value]
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
