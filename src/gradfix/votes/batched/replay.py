"""Vote rules that replay an operation: broadcast arithmetic, repeated weights, and anything unknown.

The operation is run again with a fresh copy of its weight per sample, and autograd gives that copy's gradient.
Broadcasting operations do it for all samples at once; an unknown one is replayed sample by sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradfix.votes.batched.forms import Dense, Form, OneByOne
from gradfix.votes.batched.layers import Call, IsWeight, Rule, Samples, fused_sums, register
from gradfix.votes.batched.sample_rows import Layout, SampleLayout

_IN_PLACE: dict[Any, Callable[..., Any]] = {
    Tensor.add_: torch.add,
    Tensor.__iadd__: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.__isub__: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.__imul__: torch.mul,
    Tensor.div_: torch.div,
    Tensor.__itruediv__: torch.div,
}
_SUMS = {torch.add, torch.sub, torch.rsub, Tensor.add, Tensor.sub}
_SUMS |= {Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__}
_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_NAMES = "add sub mul div true_divide maximum minimum pow where lerp addcmul"
_DUNDERS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__"


class _Replayed(Rule):
    """Reads any call: weights by argument position, other tensors kept, the rest as they are."""

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        leaves, tree = tree_flatten((tuple(args), kwargs))
        weights, inputs, rest = {}, {}, {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                rest[place] = leaf
            elif is_weight(leaf):
                weights[str(place)] = leaf
            else:
                inputs[str(place)] = leaf
        return Call(weights, inputs, {"rest": rest, "tree": tree})


def run(call: Call, function: Callable[..., Any], weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
    """The recorded call again, with these tensors in place of the recorded ones."""
    leaves = {int(place): tensor for place, tensor in {**inputs, **weights}.items()} | call.options["rest"]
    args, kwargs = tree_unflatten([leaves[place] for place in range(len(leaves))], call.options["tree"])
    return function(*args, **kwargs)


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().requires_grad_()


@register("broadcast")
class Broadcast(_Replayed):
    """x * w, x + w and their like: norms written out, position embeddings, layer scales, logit scales."""

    functions = (
        *(getattr(torch, name) for name in _NAMES.split()),
        torch.rsub,
        *(getattr(Tensor, name) for name in f"{_NAMES} {_DUNDERS}".split()),
        *_IN_PLACE,
    )

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        return None if kwargs.get("out") is not None else super().read(args, kwargs, is_weight)

    def prepare(self, call: Call, function: Callable[..., Any]) -> None:
        """A sum's gradient does not depend on the values of its inputs: keep their shapes, not their memory."""
        if out_of_place(function) in _SUMS:
            call.inputs = {p: t.new_zeros(()).expand(t.shape) for p, t in call.inputs.items()}

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        own = {aligned(weight, len(output)).shape[layout.dim] for weight in call.weights.values()}
        return own <= {1} or (isinstance(layout, SampleLayout) and own <= {1, output[layout.dim]})

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        layout, ndim = samples.layout, gradient.ndim
        scaled = self._scaled(call, gradient, samples)
        if scaled is not None:
            return scaled
        leaves = {}
        for role, weight in call.weights.items():
            shape = list(aligned(weight, ndim).shape)
            shape[layout.dim] = gradient.shape[layout.dim]
            leaves[role] = _leaf(aligned(weight, ndim).expand(shape))
        with torch.enable_grad():
            output = run(call, call.options["function"], leaves, call.inputs)
        found = torch.autograd.grad(output, list(leaves.values()), gradient.to(output.dtype))
        return {role: Dense(self._by_sample(g, call.weights[role], samples)) for role, g in zip(leaves, found)}

    def _by_sample(self, gradient: Tensor, weight: Tensor, samples: Samples) -> Tensor:
        layout = samples.layout
        if aligned(weight, gradient.ndim).shape[layout.dim] == 1:
            return samples.split(gradient).sum(layout.dim + 1).reshape(samples.count, *weight.shape)
        apart = gradient.new_zeros(samples.count, *gradient.shape)  # made of weights with a row for every sample
        for sample in range(samples.count):
            layout.take(apart[sample], sample).copy_(layout.take(gradient, sample))
        return apart.reshape(samples.count, *weight.shape)

    def _scaled(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form] | None:
        """x * w along the last dimension: the root-mean-square norms of most language models."""
        (role, weight), *more = call.weights.items()
        data = [t for t in call.inputs.values() if t.shape == gradient.shape]
        plain = call.options["function"] in _PRODUCTS and weight.shape == gradient.shape[-1:]
        if more or len(data) != 1 or not plain or samples.layout.dim == gradient.ndim - 1:
            return None
        found = fused_sums(gradient, data[0], samples, "plain")
        return None if found is None else {role: found["weight"]}


@register("attention")
class Attention(_Replayed):
    """Attention under a mask that is made of weights, the same for every sample: relative position biases."""

    functions = (F.scaled_dot_product_attention,)
    owns_output = False
    spreads = True

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        call = super().read(args, kwargs, is_weight)
        if call is None or set(call.weights) & {"0", "1", "2"} or "0" not in call.inputs:
            return None
        return call

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        weights = call.weights.values()
        return layout == SampleLayout(0, 1) and all(aligned(weight, len(output)).shape[0] == 1 for weight in weights)

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        return {role: Dense(gradient.reshape(samples.count, *weight.shape)) for role, weight in call.weights.items()}


def aligned(weight: Tensor, ndim: int) -> Tensor:
    return weight.reshape((1,) * (ndim - weight.ndim) + tuple(weight.shape))


def out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that computes the same without overwriting its input."""
    return _IN_PLACE.get(function, function)


def overwrites(function: Callable[..., Any]) -> bool:
    return function in _IN_PLACE


COPIES = {torch.broadcast_to, torch.tile, Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, Tensor.repeat}


class Repeat(_Replayed):
    """A weight copied once per sample, before any sample is seen: class tokens and prompts."""

    owns_output = False

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return True

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        (role, weight), *more = call.weights.items()
        shape = aligned(weight, gradient.ndim).shape
        by_sample = samples.split(gradient)
        broadcast = shape[samples.layout.dim] == 1 and all(
            small in (1, large) for small, large in zip(shape, by_sample.shape[1:])
        )
        if call.options["function"] in COPIES and broadcast and not more:
            summed = [dim + 1 for dim, size in enumerate(shape) if size == 1]
            return {role: Dense(by_sample.sum(summed).reshape(samples.count, *weight.shape))}
        return one_by_one(call, lambda n: self._masked(call, gradient, samples.layout, n), samples.count)

    def _masked(self, call: Call, gradient: Tensor, layout: Layout, sample: int) -> dict[str, Tensor]:
        alone = torch.zeros_like(gradient)
        layout.take(alone, sample).copy_(layout.take(gradient, sample))
        return _vjp(call, call.inputs, alone)


class Local(_Replayed):
    """Any other operation: replayed on one sample's rows at a time."""

    owns_output = False

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return True

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        def one(sample: int) -> dict[str, Tensor]:
            return _vjp(call, self.rows(call, samples, sample), samples.layout.take(gradient, sample))

        return one_by_one(call, one, samples.count)

    def rows(self, call: Call, samples: Samples, sample: int) -> dict[str, Tensor]:
        """One sample's part of every input that is not the same for all."""
        shared = call.options.get("shared")
        shared = self.shared(call, samples) if shared is None else shared
        kept = {}
        for place, tensor in call.inputs.items():
            layout = samples.layout if samples.layout.fits(tensor.shape, samples.count) else SampleLayout(0, 1)
            kept[place] = tensor if place in shared else layout.take(tensor, sample)
        return kept

    def shared(self, call: Call, samples: Samples) -> frozenset[str]:
        """Inputs without a dimension for samples. Asked while planning: in a later batch the sizes may be equal by chance."""
        layouts = (samples.layout, SampleLayout(0, 1))
        fits = {p: any(x.fits(t.shape, samples.count) for x in layouts) for p, t in call.inputs.items()}
        return frozenset(place for place, fit in fits.items() if not fit)

    def agrees(self, call: Call, output: Tensor, samples: Samples) -> bool:
        """Whether replaying two samples alone gives their rows of the output; the test that it may be used."""
        with torch.no_grad():
            for sample in (0, samples.count - 1):
                try:
                    alone = run(call, call.options["function"], call.weights, self.rows(call, samples, sample))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    return False
                expected = samples.layout.take(output, sample)
                if alone.shape != expected.shape or not torch.allclose(alone, expected, rtol=1e-2, atol=1e-3):
                    return False
        return True


REPEAT, LOCAL = Repeat(), Local()


def _vjp(call: Call, inputs: dict[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    leaves = {role: _leaf(weight) for role, weight in call.weights.items()}
    with torch.enable_grad():
        output = run(call, call.options["function"], leaves, inputs)
    if not output.requires_grad:  # it asked the weights for no values
        return {role: torch.zeros_like(leaf) for role, leaf in leaves.items()}
    found = torch.autograd.grad(output, list(leaves.values()), gradient, allow_unused=True)
    return {role: torch.zeros_like(leaf) if g is None else g for (role, leaf), g in zip(leaves.items(), found)}


def pulled_back(output: Tensor, inputs: Sequence[Tensor], gradients: Tensor) -> list[Tensor | None]:
    """Every sample's gradient of `output` sent back to the inputs; None for an input that it was not made of."""
    reached: list[int] = []

    def one(gradient: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(output, inputs, gradient, retain_graph=True, allow_unused=True)
        reached[:] = [place for place, g in enumerate(found) if g is not None]
        return [g for g in found if g is not None]

    # autograd's own `is_grads_batched` knows few operations, and sends the samples through an embedding one by one.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            found = torch.func.vmap(one)(gradients)
        except RuntimeError:  # a backward that looks at values, or that vmap does not know
            found = [torch.stack(parts) for parts in zip(*map(one, gradients))]
    stacked = dict(zip(reached, found))
    return [stacked.get(place) for place in range(len(inputs))]


def one_by_one(call: Call, gradients: Callable[[int], dict[str, Tensor]], count: int) -> dict[str, Form]:
    if len(call.weights) == 1:
        (role, weight), *_ = call.weights.items()
        return {role: OneByOne(lambda n: gradients(n)[role], count, weight)}
    found = [gradients(n) for n in range(count)]
    return {role: Dense(torch.stack([g[role] for g in found])) for role in call.weights}
