"""Ways to get a majority vote, and one ordinary backward to compare them with.

Each takes (model, loss, batch, tally) and adds its votes to the tally. `retain_graph` is written from the description
of the paper's released code: one graph for the whole batch, one backward per sample through all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.votes.batched.engine import batched
from gradfix.votes.collect import collect_votes
from gradfix.votes.engines.loop import loop
from gradfix.votes.engines.passes import batch_size, take
from gradfix.votes.tally import Tally

VMAP_BYTES = 40e9 if torch.cuda.is_available() else 2e9  # of per-sample gradients at a time


def whole_call(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    """What a user calls: its own tally, its checks, and what votes remember of their model."""
    collect_votes(model, loss, [batch], engine="batched")


def ordinary(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    loss(model, batch).sum().backward()


def retain_graph(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    losses = loss(model, batch)
    for value in losses:
        backward_through_all(value, tally)


def backward_through_all(value: Tensor, tally: Tally) -> None:
    """One sample's backward through the graph of its whole batch."""
    names, parameters = zip(*tally.parameters.items())
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    for name, gradient in zip(names, gradients):
        if gradient is not None:
            tally[name].sub_(gradient.sign().to(torch.int8))


def vmap(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    """Per-sample gradients by torch.func, a few samples at a time so that they fit."""
    parameters = dict(tally.parameters)
    step = max(1, int(VMAP_BYTES // sum(p.numel() * p.element_size() for p in parameters.values())))

    def one(weights: dict[str, Tensor], sample: Any) -> Tensor:
        sample = {name: value.unsqueeze(0) for name, value in sample.items()}

        def call(**inputs: Any) -> Any:
            return torch.func.functional_call(model, weights, (), inputs)

        return loss(call, sample).squeeze(0)

    per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))
    weights = {name: p.detach() for name, p in parameters.items()}
    for start in range(0, batch_size(batch), step):
        for name, gradient in per_sample(weights, take(batch, slice(start, start + step))).items():
            tally[name].sub_(gradient.sign().sum(0).to(torch.int8))


def opacus(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    """Opacus' per-sample gradients; parameters it has no rule for (bare ones) get no vote here."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="sum")  # it looks at nothing else
    try:
        loss(wrapped, batch).sum().backward()
        for name, parameter in tally.parameters.items():
            if getattr(parameter, "grad_sample", None) is not None:
                tally[name].sub_(parameter.grad_sample.sign().sum(0).to(torch.int8))
    finally:
        wrapped.to_standard_module().eval()
        model.zero_grad(set_to_none=True)


SCHEMES: dict[str, Callable[..., None]] = {
    "ordinary": ordinary,
    "batched": batched,
    "launched": functools.partial(batched, record=False),
    "collect_votes": whole_call,
    "loop": loop,
    "vmap": vmap,
    "retain_graph": retain_graph,
    "opacus": opacus,
}
SLOW = {"loop", "vmap", "retain_graph", "opacus"}
