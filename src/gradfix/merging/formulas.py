"""Which tensors a mergekit file asks for, and what each is made of: layers stacked, tensors named, parameters settled.

Tensors go by the names in the files: what stands in a numbered stack is a layer, and of the rest embeddings go with the
first slice and everything else (the last norm, the head) with the last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradfix.checkpoints.adapter import base_config
from gradfix.checkpoints.kinds import is_buffer
from gradfix.checkpoints.matched import LAYER, TOKEN_TABLE, depths
from gradfix.checkpoints.weights import Checkpoint
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging.grammar import Document, ModelRef, OutputModule, OutputSlice
from gradfix.registry import unknown

IN_FRONT = re.compile(r"(emb|wte|wpe|shared|patch|cls_token)(?!.*embed_out)")


@dataclass(frozen=True)
class Formula:
    """One tensor of the output: where the file speaks of it, and what it is called in every input."""

    name: str
    module: OutputModule
    part: OutputSlice
    t: float  # 0 for the first layer of a slice, 1 for its last; 0 outside the layers
    tensors: Mapping[ModelRef, str]
    copied: bool = False  # a buffer, or no floating tensor: the first input's, as it is

    @property
    def first(self) -> ModelRef:
        return self.part.sources[0].model


@dataclass
class Blueprint:
    """Every tensor of the output, and for every stack the layers it is made of (of the first inputs)."""

    formulas: dict[str, Formula] = field(default_factory=dict)
    stacks: dict[str, list[tuple[ModelRef, int]]] = field(default_factory=dict)


def draw_up(document: Document, models: Mapping[ModelRef, Checkpoint]) -> Blueprint:
    """What the document's output consists of; every tensor must be in every input it is to be made of."""
    found = Blueprint()
    for module in document.modules:
        _Module(document, module, models).draw(found)
    return found


class _Module:
    def __init__(self, document: Document, module: OutputModule, models: Mapping[ModelRef, Checkpoint]) -> None:
        self.document, self.module, self.models = document, module, models
        self.reference = models[module.slices[0].sources[0].model]
        stacks = depths(self.reference.names())
        self.stacks = [stack for stack in stacks if module.name is None or self._mine(stack)]
        if module.name is not None and len(document.modules) > 1 and not self._names():
            parts = sorted({name.split(".")[0] for name in self.reference.names()})
            raise UsageError(f"{document.where}: {unknown('module', module.name, parts)}")
        if not module.name or len(stacks) < 2:
            self.stacks = list(stacks)
        stacked = len(module.slices) > 1 or any(part.depth != max(stacks.values(), default=0) for part in module.slices)
        if len(self.stacks) > 1 and stacked and module.slices[0].depth is not None:
            raise UsageError(
                f"{document.where}: {self.reference} has several stacks of layers ({', '.join(self.stacks)}); "
                "say which with `modules`."
            )

    def _mine(self, name: str) -> bool:
        """A module of several has the tensors with its name in theirs; the first also has what nobody names."""
        names = [str(module.name) for module in self.document.modules]
        if len(names) == 1:
            return True
        owner = next((one for one in names if one in name), names[0])
        return owner == self.module.name

    def _names(self) -> list[str]:
        return [name for name in self.reference.names() if self._mine(name)]

    def draw(self, found: Blueprint) -> None:
        slices = self.module.slices
        for name in self._outside(slices[0], front=True):
            self._add(found, name, slices[0])
        for stack in self.stacks:
            self._stack(found, stack)
        for name in self._outside(slices[-1], front=False):
            self._add(found, name, slices[-1])

    def _outside(self, part: OutputSlice, front: bool) -> list[str]:
        """Tensors of the slice's first input that stand in no layer, before or after the layers."""
        first = self.models[part.sources[0].model]
        names = [name for name in first.names() if not LAYER.match(name) and self._mine(name)]
        return [name for name in names if bool(IN_FRONT.search(name)) == front]

    def _stack(self, found: Blueprint, stack: str) -> None:
        layers = found.stacks.setdefault(stack, [])
        for part in self.module.slices:
            ranges = {source.model: source.layers or self._whole(source.model, stack) for source in part.sources}
            lengths = {end - first for first, end in ranges.values()}
            if len(lengths) > 1:
                raise IncompatibleCheckpoints(
                    f"{self.document.where}: the models have different numbers of layers under {stack!r}: "
                    + ", ".join(f"{model} {end - first}" for model, (first, end) in ranges.items())
                )
            depth = lengths.pop()
            for offset in range(depth):
                here = {model: first + offset for model, (first, _) in ranges.items()}
                t = offset / (depth - 1) if depth > 1 else 1.0
                self._layer(found, stack, len(layers), here, part, t)
                layers.append((part.sources[0].model, here[part.sources[0].model]))

    def _whole(self, model: ModelRef, stack: str) -> tuple[int, int]:
        return 0, depths(self.models[model].names()).get(stack, 0)

    def _layer(
        self, found: Blueprint, stack: str, number: int, here: Mapping[ModelRef, int], part: OutputSlice, t: float
    ) -> None:
        first = part.sources[0].model
        insides = [name for name in self.models[first].names() if name.startswith(f"{stack}.{here[first]}.")]
        if not insides:
            raise UsageError(f"{self.document.where}: {first} has no layer {here[first]} under {stack!r}.")
        for name in insides:
            inside = name.removeprefix(f"{stack}.{here[first]}.")
            tensors = {model: f"{stack}.{layer}.{inside}" for model, layer in here.items()}
            self._add(found, f"{stack}.{number}.{inside}", part, tensors, t)

    def _add(
        self,
        found: Blueprint,
        name: str,
        part: OutputSlice,
        tensors: Mapping[ModelRef, str] | None = None,
        t: float = 0.0,
    ) -> None:
        asked = dict(tensors or {source.model: name for source in part.sources})
        first = part.sources[0].model
        about = self.models[first].info(asked[first])
        if is_buffer(asked[first], about) or not about.dtype.is_floating_point:
            found.formulas[name] = Formula(name, self.module, part, t, {first: asked[first]}, copied=True)
            return
        stored = {model: _stored(self.models[model], tensor) for model, tensor in asked.items()}
        lacking = next((model for model, tensor in stored.items() if tensor is None), None)
        if lacking is not None:
            raise IncompatibleCheckpoints(
                f"{self.document.where}: {lacking} has no tensor {asked[lacking]!r}, which {first} has."
            )
        named = {model: tensor for model, tensor in stored.items() if tensor is not None}
        found.formulas[name] = Formula(name, self.module, part, t, named)


def _stored(model: Checkpoint, name: str) -> str | None:
    """The tensor's name in this file; a head that is tied to the embedding is not stored twice."""
    if name in model:
        return name
    if TOKEN_TABLE.search(name) and base_config(model).get("tie_word_embeddings", False):
        tables = [other for other in model.names() if TOKEN_TABLE.search(other) and other.endswith(".weight")]
        return tables[0] if len(tables) == 1 else None
    return None
