"""The language of permutation specs: which axes of which tensors must move together.

A family is a few tables of text (`families.py`). One line names a tensor and, per axis, the group
that permutes it; two axes with one group share one permutation. A spec that forgot an axis would
change the function of the permuted model, so a tensor no line covers is an error, never a copy.

    linear  encoder.layer.{i}.intermediate.dense   mlp residual@b

Kinds of line: `linear` covers NAME.weight with all axes and NAME.bias with the first; `conv1d`
stores its weight transposed, so the bias takes the last axis; `tensor` is exactly that name.
Axis words:
    -            never permuted            *  no axis of this tensor is permuted
    residual@x   the residual stream at point x: a, b, c, d are the points before, between and after
                 the parts of a layer, 0 the embeddings, end the last layer. They are all one
                 permutation unless per-junction permutations are asked for.
    q k v o qkv  an attention axis: heads x width of a head (qkv: the three packed one after another);
                 `q:cross` belongs to a second attention of the layer
    q_norm       a norm of the queries (k_norm: of the keys): one head wide and shared by all heads
                 (Qwen3), so it stays, or as wide as all heads (OLMo2), so it moves with them
    order        one entry per head, e.g. a bias table
    any word     a plain group, of the layer where the name has one"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# A group is a stack of permutations, (copies, size): one for a plain axis, one per head inside heads.
Groups = Mapping[str, Tensor]


@dataclass(frozen=True)
class AxisPart:
    """A run of indices along one axis: key/value groups x queries of a group x inside a head.

    Each factor is permuted by the group it names, or not at all. A plain axis is one group of one."""

    size: tuple[int, int, int]
    order: str = ""
    queries: str = ""
    inner: str = ""

    @property
    def length(self) -> int:
        groups, queries, inner = self.size
        return groups * queries * inner

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.order, self.queries, self.inner) if name)

    def stacks(self) -> dict[str, tuple[int, int]]:
        """Shape (copies, size) of every permutation stack this part needs."""
        groups, queries, inner = self.size
        shapes = {self.order: (1, groups), self.queries: (groups, queries), self.inner: (groups, inner)}
        return {name: shapes[name] for name in self.names}

    def index(self, groups: Groups) -> Tensor:
        """Where each new position reads from; `groups` without one of our names leaves that factor alone."""
        copies, queries, inner = self.size
        order = self._stack(self.order, 1, copies, groups)[0]
        within = self._stack(self.queries, copies, queries, groups)
        column = self._stack(self.inner, copies, inner, groups)
        head = order[:, None] * queries + within
        return (head[:, :, None] * inner + column[:, None, :]).reshape(-1)

    @staticmethod
    def _stack(name: str, copies: int, size: int, groups: Groups) -> Tensor:
        if name and name in groups:
            return groups[name]
        return torch.arange(size).expand(copies, size)


class SpecLine(NamedTuple):
    """One line of a table: a tensor name pattern and the words of its axes."""

    pattern: re.Pattern[str]
    axes: tuple[str, ...]
    tower: Tower


@dataclass(frozen=True)
class Tower:
    """One stack of layers and the tensors around it; `stream` names its residual permutation."""

    table: str
    name: str = ""
    prefix: str = ""
    stream: str = "residual"
    parts_per_layer: int = 2
    tied_heads: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}." if self.name else ""

    @cached_property
    def rows(self) -> tuple[SpecLine, ...]:
        lines = (line.split() for line in self.table.strip().splitlines() if line.strip())
        return tuple(row for kind, name, *axes in lines for row in self._rows(kind, name, tuple(axes)))

    def _rows(self, kind: str, name: str, axes: tuple[str, ...]) -> list[SpecLine]:
        if kind == "tensor":
            return [self._row(name, axes)]
        bias = axes[-1:] if kind == "conv1d" else axes[:1]
        return [self._row(f"{name}.weight", axes), self._row(f"{name}.bias", bias)]

    def _row(self, name: str, axes: tuple[str, ...]) -> SpecLine:
        text = (self.prefix + name).replace(".", r"\.").replace("{i}", r"(?P<i>\d+)")
        return SpecLine(re.compile(text), axes, self)


@dataclass(frozen=True)
class Fallback:
    """`group` means `instead` in checkpoints where no name ends with `unless`."""

    group: str
    unless: str
    instead: str


@dataclass(frozen=True)
class Family:
    """An architecture: its towers, and whether positions rotate q and k."""

    name: str
    towers: tuple[Tower, ...]
    rope: bool = False
    fallback: Fallback | None = None

    def find(self, name: str) -> tuple[SpecLine, int | None] | None:
        """The line that covers a tensor, and its layer number."""
        for tower in self.towers:
            for row in tower.rows:
                if match := row.pattern.fullmatch(name):
                    layer = match.groupdict().get("i")
                    return row, None if layer is None else int(layer)
        return None

    def unknown(self, names: list[str]) -> list[str]:
        return [name for name in names if self.find(name) is None]
