"""Vote rules for norms: a scale and a shift per feature or channel, behind statistics that no weight takes part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfix.votes.batched.forms import Dense, Form
from gradfix.votes.batched.layers import (
    Call,
    IsWeight,
    Rule,
    Samples,
    bind,
    fused_sums,
    register,
    token_sums,
    weights_among,
)
from gradfix.votes.batched.sample_rows import Layout


class _Norm(Rule):
    """y = normalised(x) * weight + bias; subclasses say how x is normalised."""

    arguments = ""

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        bound = bind(self.arguments, args, kwargs)
        roles = weights_among(is_weight, weight=bound.get("weight"), bias=bound.get("bias"))
        if is_weight(bound["input"]):
            return None
        options = {name: bound[name] for name in self.arguments.split()[1:] if name in bound and name not in roles}
        options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
        return Call(roles, {"input": bound["input"]} if "weight" in roles else {}, options)

    def normalised(self, call: Call) -> Tensor:
        raise NotImplementedError

    def fused(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form] | None:
        """Both sums in one pass over the activations, where there is a kernel for it."""
        return None

    def sums(self, values: Tensor, weight: Tensor, samples: Samples) -> Dense:
        return token_sums(samples.tokens(values, weight.ndim), weight)

    def gradients(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form]:
        fused = self.fused(call, gradient, samples)
        if fused is not None:
            return {role: fused[role] for role in call.weights}
        forms: dict[str, Form] = {}
        if "weight" in call.weights:
            forms["weight"] = self.sums(gradient * self.normalised(call), call.weights["weight"], samples)
        if "bias" in call.weights:
            forms["bias"] = self.sums(gradient, call.weights["bias"], samples)
        return forms


@register("layer_norm")
class LayerNorm(_Norm):
    functions: Sequence[Callable[..., Any]] = (F.layer_norm, torch.layer_norm)
    arguments = "input normalized_shape weight bias eps"
    kind = "layer"

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim < len(output) - len(call.options["normalized_shape"])

    def fused(self, call: Call, gradient: Tensor, samples: Samples) -> dict[str, Form] | None:
        eps = call.options.get("eps", 1e-5)
        data = call.inputs.get("input")
        if data is None or eps is None or len(call.options["normalized_shape"]) != 1:
            return None
        return fused_sums(gradient, data, samples, self.kind, eps)

    def normalised(self, call: Call) -> Tensor:
        eps = call.options.get("eps", 1e-5)
        return F.layer_norm(call.inputs["input"], call.options["normalized_shape"], None, None, eps)


@register("rms_norm")
class RMSNorm(LayerNorm):
    functions: Sequence[Callable[..., Any]] = (F.rms_norm, torch.rms_norm)
    arguments = "input normalized_shape weight eps"
    kind = "rms"

    def normalised(self, call: Call) -> Tensor:
        return F.rms_norm(call.inputs["input"], call.options["normalized_shape"], None, call.options.get("eps"))


@register("batch_norm")
class BatchNorm(_Norm):
    """With fixed statistics, which belong to no sample however many channels there are."""

    functions = (F.batch_norm, torch.batch_norm)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any], is_weight: IsWeight) -> Call | None:
        if len(args) == 9 or "cudnn_enabled" in kwargs:
            arguments = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
        else:
            arguments = "input running_mean running_var weight bias training momentum eps"
        bound = bind(arguments, args, kwargs)
        mean, variance = bound.get("running_mean"), bound.get("running_var")
        if is_weight(bound["input"]) or mean is None or variance is None or bound.get("training"):
            return None
        roles = weights_among(is_weight, weight=bound.get("weight"), bias=bound.get("bias"))
        inputs = {"input": bound["input"], "mean": mean, "variance": variance} if "weight" in roles else {}
        return Call(roles, inputs, {"eps": bound.get("eps", 1e-5)})

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim == 0

    def normalised(self, call: Call) -> Tensor:
        kept = call.inputs
        return F.batch_norm(kept["input"], kept["mean"], kept["variance"], None, None, False, 0.0, call.options["eps"])

    def sums(self, values: Tensor, weight: Tensor, samples: Samples) -> Dense:
        return _channel_sums(values, samples)


@register("group_norm")
class GroupNorm(_Norm):
    functions = (F.group_norm, torch.group_norm)
    arguments = "input num_groups weight bias eps"

    def allows(self, call: Call, layout: Layout, output: torch.Size) -> bool:
        return layout.dim == 0

    def normalised(self, call: Call) -> Tensor:
        eps = call.options.get("eps", 1e-5)
        return F.group_norm(call.inputs["input"], call.options["num_groups"], None, None, eps)

    def sums(self, values: Tensor, weight: Tensor, samples: Samples) -> Dense:
        return _channel_sums(values, samples)


def _channel_sums(values: Tensor, samples: Samples) -> Dense:
    by_sample = samples.split(values)  # samples, rows, channels, ...
    return Dense(by_sample.sum([dim for dim in range(1, by_sample.ndim) if dim != 2]))
