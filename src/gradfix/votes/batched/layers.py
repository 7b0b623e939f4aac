"""Vote rules: what each kind of layer says about its weights, sample by sample.

A rule reads one call (`F.linear(x, weight, bias)`) and later turns its inputs and output gradient into a form
per weight, a pure function of the two. It sees no module and no model, so it works wherever the operation is called
from. An operation without a rule of its own is left to `local`, which replays it one sample at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from gradfix.registry import Registry
from gradfix.votes.batched import kernels
from gradfix.votes.batched.forms import Dense, Form, OneByOne, Product, TableRows
from gradfix.votes.batched.sample_rows import Layout, SampleLayout

_USUAL = SampleLayout(0, 1)
IsWeight = Callable[[Tensor], bool]


@dataclass
class Call:
    """One operation: its weights by role, the tensors its rule needs later, and the rest of its arguments."""

    weights: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def keep(self, inputs: dict[str, Tensor]) -> Call:
        return Call(self.weights, inputs, self.options)


@dataclass(slots=True)
class Samples:
    """How many samples there are and where they lie in the output."""

    count: int
    layout: Layout

    def split(self, tensor: Tensor) -> Tensor:
        return self.layout.split(tensor, self.count)

    def tokens(self, tensor: Tensor, features: int = 1) -> Tensor:
        """(samples, tokens, features), where the last `features` dimensions are the features."""
        layout = self.layout
        if features == 1 and tensor.ndim == 3 and layout.__class__ is SampleLayout and layout.rows == 1 > layout.dim:
            return tensor
        shape = tensor.shape[tensor.ndim - features :]
        return self.split(tensor).reshape(self.count, -1, shape.numel())


class Rule:
    """The contract; subclasses say how to read a call and how its weights' gradients come about."""

    functions: Sequence[Callable[..., Any]] = ()
    names: Sequence[str] = ()  # of operators that other libraries register, whatever their library
    owns_output = True  # the output is not kept for the operation's own backward
    spreads = False  # it gets the gradients of a weight per sample, which its operation runs with, not the output's

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        """The call's parts, or None when this rule does not cover it."""
        raise NotImplementedError

    def prepare(self, call: Call, function: Callable[..., Any]) -> None:
        """Let go of inputs whose values the gradients do not need."""

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        """Whether samples can lie this way in the output."""
        return layout.dim < len(output) - 1

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        """A form per weight role, from the saved inputs and the output gradient."""
        raise NotImplementedError


RULES: Registry[Rule] = Registry("vote rule")


def register(name: str) -> Callable[[type[Rule]], type[Rule]]:
    def add(kind: type[Rule]) -> type[Rule]:
        RULES.register(name)(kind())
        return kind

    return add


def rule_for(function: Callable[..., Any]) -> Rule | None:
    """The rule that covers a torch function, if any."""
    found = _by_function(len(RULES)).get(function)
    if found is None and isinstance(function, (OpOverload, OpOverloadPacket)):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        return next((rule for rule in RULES.values() if packet.__name__ in rule.names), None)
    return found


@functools.cache
def _by_function(_: int) -> dict[Callable[..., Any], Rule]:
    return {function: rule for rule in RULES.values() for function in rule.functions}


def bind(names: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names.split(), args)), **kwargs}


def weights_among(is_weight: IsWeight, **roles: Any) -> dict[str, Tensor]:
    return {role: value for role, value in roles.items() if isinstance(value, Tensor) and is_weight(value)}


def token_sums(tokens: Tensor, weight: Tensor) -> Dense:
    sums = tokens.sum(1)
    return Dense(sums if weight.ndim == 1 else sums.reshape(-1, *weight.shape))


def fused_sums(gradient: Tensor, data: Tensor, samples: Samples, kind: str, eps: float = 0.0) -> dict[str, Form] | None:
    """Per-sample gradients of a weight and a bias along the last dimension, in one pass; None without a kernel."""
    output, tokens = samples.tokens(gradient), samples.tokens(data)
    if not (kernels.sees(output) and kernels.sees(tokens)) or output.shape[2] > kernels.WIDEST:
        return None
    products, sums = kernels.token_sums(output, tokens, kind, eps)
    return {"weight": Dense(products), "bias": Dense(sums)}


@register("linear")
class Linear(Rule):
    """y = x W^T + b."""

    functions = (F.linear,)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        if kwargs or len(args) == 2:
            bound = bind("input weight bias", args, kwargs)
            data, weight, bias = bound["input"], bound["weight"], bound.get("bias")
        else:
            data, weight, bias = args
        if is_weight(data) or weight.ndim != 2:
            return None
        roles = weights_among(is_weight, weight=weight, bias=bias)
        return Call(roles, {"input": data} if "weight" in roles else {})

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        output = samples.tokens(gradient)
        forms: dict[str, Form] = {}
        if "weight" in call.weights:
            forms["weight"] = Product(output, samples.tokens(call.inputs["input"]))
        if "bias" in call.weights:
            forms["bias"] = token_sums(output, call.weights["bias"])
        return forms


@register("matmul")
class Matmul(Rule):
    """y = x W or W x, and b + x W: bare projections and GPT-2's Conv1D."""

    functions = (
        *(torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.mm, Tensor.addmm),
        *(Tensor.__matmul__, Tensor.__rmatmul__),
    )

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        if not all(isinstance(value, Tensor) for value in args) or kwargs:
            return None
        bias, left, right = (None, *args) if len(args) == 2 else args
        if is_weight(left) == is_weight(right):
            return None
        weight, data, side = (left, right, "left") if is_weight(left) else (right, left, "right")
        if weight.ndim != 2 or data.ndim < 2 or (bias is not None and bias.ndim != 1):
            return None
        roles = weights_among(is_weight, weight=weight, bias=bias)
        return Call(roles, {"input": data}, {"side": side})

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim != len(output) - (2 if call.options["side"] == "left" else 1)

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        data = call.inputs["input"]
        if call.options["side"] == "left":
            data, gradient = data.mT, gradient.mT
            if samples.layout.dim == gradient.ndim - 1:
                samples = Samples(samples.count, samples.layout.moved(gradient.ndim - 2))
            return {"weight": Product(samples.tokens(gradient), samples.tokens(data))}
        output = samples.tokens(gradient)
        forms: dict[str, Form] = {"weight": Product(samples.tokens(data), output)}
        if "bias" in call.weights:
            forms["bias"] = token_sums(output, call.weights["bias"])
        return forms


@register("conv")
class Conv(Rule):
    """Convolutions; one that cuts its input into patches is a linear layer over the patches."""

    functions = (F.conv1d, F.conv2d, F.conv3d)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        bound = bind("input weight bias stride padding dilation groups", args, kwargs)
        data, weight = bound["input"], bound["weight"]
        dims = weight.ndim - 2
        if is_weight(data) or data.ndim != weight.ndim or isinstance(bound.get("padding"), str):
            return None
        sizes = {"stride": 1, "padding": 0, "dilation": 1}
        options: dict[str, Any] = {}
        for name, default in sizes.items():
            value = bound.get(name, default)
            options[name] = [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))
        options["groups"] = bound.get("groups", 1)
        roles = weights_among(is_weight, weight=weight, bias=bound.get("bias"))
        return Call(roles, {"input": data} if "weight" in roles else {}, options)

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim == 0

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        output = samples.split(gradient).movedim(2, -1).reshape(samples.count, -1, gradient.shape[1])
        forms: dict[str, Form] = {}
        if "bias" in call.weights:
            forms["bias"] = token_sums(output, call.weights["bias"])
        if "weight" in call.weights:
            weight, data = call.weights["weight"], call.inputs["input"]
            patches = _patches(data, weight, call.options)
            if patches is not None:
                right = samples.split(patches).reshape(samples.count, -1, patches.shape[-1])
                forms["weight"] = Reshaped(Product(output, right), weight.shape)
            else:
                forms["weight"] = _conv_one_by_one(call, gradient, samples)
        return forms


def _patches(data: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor | None:
    """(batch, patches, channels x kernel) when the kernel tiles its input without overlap or padding."""
    kernel = list(weight.shape[2:])
    plain = options["groups"] == 1 and not any(options["padding"]) and set(options["dilation"]) == {1}
    if not plain or options["stride"] != kernel:
        return None
    for dim, size in enumerate(kernel):
        whole = data.shape[2 + dim] // size * size
        data = data.narrow(2 + dim, 0, whole)
    for dim, size in enumerate(kernel):
        data = data.unflatten(2 + 2 * dim, (-1, size))
    dims = len(kernel)
    grid, inside = [2 + 2 * d for d in range(dims)], [3 + 2 * d for d in range(dims)]
    return data.permute(0, *grid, 1, *inside).flatten(1 + dims).flatten(1, dims)


def _conv_one_by_one(call: Call, gradient: Tensor, samples: Samples) -> OneByOne:
    weight, data, options = call.weights["weight"].detach(), call.inputs["input"], call.options
    geometry = (options["stride"], options["padding"], options["dilation"], False, [0] * (weight.ndim - 2))

    def one(sample: int) -> Tensor:
        rows = (samples.layout.take(tensor, sample) for tensor in (gradient, data))
        mask = [False, True, False]
        return torch.ops.aten.convolution_backward(*rows, weight, None, *geometry, options["groups"], mask)[1]

    return OneByOne(one, samples.count, weight)


class Reshaped:
    """A form of another shape with the same entries."""

    def __init__(self, form: Form, shape: torch.Size) -> None:
        self.form, self.shape = form, shape
        self.samples, self.dtype, self.device = form.samples, form.dtype, form.device

    def accumulate(self, sample: int, out: Tensor) -> None:
        self.form.accumulate(sample, out.view(self.form.shape))

    def only(self, rows: slice) -> Reshaped:
        return Reshaped(self.form.only(rows), self.shape)

    def fold(self, votes: Tensor) -> None:
        self.form.fold(votes.view(self.form.shape))


@register("embedding")
class Embedding(Rule):
    """y = W[index]: only the rows that occur vote."""

    functions = (F.embedding,)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        bound = bind("input weight padding_idx", args, kwargs)
        weight = bound["weight"]
        padding = bound.get("padding_idx")
        rows = weight.shape[0]
        options = {"rows": rows, "padding": None if padding is None else padding % rows}
        return Call({"weight": weight}, {"index": bound["input"]}, options)

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        index = samples.split(call.inputs["index"]).reshape(samples.count, -1)
        values = samples.tokens(gradient)
        if call.options["padding"] is not None:
            values = values.masked_fill((index == call.options["padding"])[..., None], 0)
        return {"weight": TableRows(index, values, call.options["rows"])}
