"""Read an operation again without asking its rule: where its tensors stand among the arguments, found once.

A batched pass is launched call by call, and on a fast device the launching is what takes time. A recipe is kept for
each operation of a proven plan; a call that does not look the same again is read by its rule as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradfix.votes.batched.layers import Call

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Places count the positional arguments first, then the named ones in the order they are given."""

    function: Callable[..., Any]
    positional: int
    names: tuple[str, ...]
    weights: tuple[tuple[str, int, tuple[str, ...], Any], ...]  # role, place, names of the parameters, shape
    inputs: tuple[tuple[str, int, int], ...]  # role, place, dimensions
    rest: tuple[tuple[int, Any], ...]  # values that must be the same again
    options: dict[str, Any]

    def read(self, values: list[Any], tracked: Mapping[int, Any]) -> Call | None:
        """The call's parts, its weights detached among `values`; None unless all stands where it stood."""
        for place, value in self.rest:
            again = values[place]
            if again is not value and (again.__class__ is not value.__class__ or again != value):
                return None
        inputs = {}
        for role, place, dimensions in self.inputs:
            tensor = values[place]
            if not isinstance(tensor, Tensor) or tensor.ndim != dimensions or id(tensor) in tracked:
                return None
            inputs[role] = tensor
        weights = {}
        for role, place, roots, shape in self.weights:
            found = tracked.get(id(values[place]))
            if found is None or not found.live or found.roots != roots or found.tensor.shape != shape:
                return None
            weights[role] = found.tensor
            values[place] = found.without_grad()
        return Call(weights, inputs, self.options)


def write_down(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Call,
    tracked: Mapping[int, Any],
) -> Recipe | None:
    """A recipe for this call, if its tensors are arguments themselves and the other arguments plain values."""
    values = [*args, *kwargs.values()]
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        if places.setdefault(id(value), place) != place and isinstance(value, Tensor):
            return None
    tensors = [*call.weights.values(), *call.inputs.values()]
    used = {places.get(id(tensor)) for tensor in tensors}
    rest = [(place, value) for place, value in enumerate(values) if place not in used]
    if None in used or len(used) < len(tensors) or not all(_is_plain(value) for _, value in rest):
        return None
    return Recipe(
        function,
        len(args),
        tuple(kwargs),
        tuple((role, places[id(t)], tracked[id(t)].roots, t.shape) for role, t in call.weights.items()),
        tuple((role, places[id(tensor)], tensor.ndim) for role, tensor in call.inputs.items()),
        tuple(rest),
        call.options,
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)
