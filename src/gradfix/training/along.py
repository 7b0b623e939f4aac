"""How far along a vector every matrix goes, learned beside its entries.

A vector that leads the right way as a whole goes too far in one matrix and not far enough in the next. A coefficient for
each is moved by the gradient of all its entries at once, so it learns in a few steps what they would take hundreds for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradfix.checkpoints.slices import is_split, own_slice
from gradfix.system.processes import current


class Along:
    """Coefficients of a vector under AdamW, one for every matrix among the parameters that the vector names.

    They are counted in `unit`s, the way that was gone along the whole vector. `share` is their rate beside that of the
    weights. Between a backward pass and the weights' own step `look` takes their gradient; `go` takes their step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        vector: Mapping[str, Tensor],
        unit: float,
        share: float,
        betas: tuple[float, float],
    ) -> None:
        self.unit, self.share = unit, share
        self.ways = [
            (parameter, own_slice(vector[name].detach(), parameter).to(parameter.device))
            for name, parameter in parameters.items()
            if parameter.dim() > 1 and name in vector
        ]
        self.split = any(is_split(parameter) for parameter, _ in self.ways)
        like = self.ways[0][1] if self.ways else torch.zeros(())
        self.coefficients = nn.Parameter(torch.zeros(len(self.ways), device=like.device, dtype=_wide(like)))
        self.gone = torch.zeros_like(self.coefficients)
        self.optimizer = torch.optim.AdamW([self.coefficients], weight_decay=0.0, betas=betas)

    @torch.no_grad()
    def look(self) -> None:
        """The gradient of each coefficient, from that of its matrix; processes that share a model add up theirs."""
        slopes = torch.stack([self._slope(parameter, way) for parameter, way in self.ways])
        if self.split:
            dist.all_reduce(slopes)
        self.coefficients.grad = self.unit * slopes

    def _slope(self, parameter: Any, way: Tensor) -> Tensor:
        if parameter.grad is None:
            return self.gone.new_zeros(())
        gradient = own_slice(parameter.grad, parameter)
        slope = (gradient.to(_wide(gradient)) * way).sum().to(self.gone)
        return slope / current().size if self.split and not is_split(parameter) else slope

    @torch.no_grad()
    def go(self) -> None:
        """Move every matrix by as much as its coefficient."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        steps = self.unit * (self.coefficients - self.gone)
        for (parameter, way), step in zip(self.ways, steps.unbind(), strict=True):
            weight = own_slice(parameter.detach(), parameter)
            weight.copy_(weight.to(_wide(weight)) + step * way)
        self.gone.copy_(self.coefficients)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
