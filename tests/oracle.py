"""The naive reference: one sample at a time, plain autograd, no cleverness."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfix.votes.engines.passes import samples


def naive_votes(model: nn.Module, loss, batches) -> dict[str, Tensor]:
    """sum_n sign(-g_n) per parameter, computed with torch.autograd.grad."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    votes = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in parameters.items()}
    model.eval()
    for batch in batches:
        for sample in samples(batch):
            value = loss(model, sample).sum()
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients):
                if gradient is not None:
                    votes[name] -= gradient.to_dense().sign().to(torch.int64)
    return votes
