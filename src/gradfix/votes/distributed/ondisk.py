"""Votes of a model whose weights are on disk.

A hook on a placeholder never fires. So the fold is hung on the real weight each time it is brought in, and a weight
that was not folded exactly once is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch import Tensor, nn

from gradfix.errors import UnsafeResult
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes.distributed.offload import canonical_names, hooked, own_weights, recomputed
from gradfix.votes.engines.loop import backward
from gradfix.votes.engines.passes import Batch, Loss, samples
from gradfix.votes.resume import Bad, VoteStep, weights_key
from gradfix.votes.runs import VoteRun, refuse_nothing
from gradfix.votes.tally import Tally


class OnDisk(VoteRun[SignVotes]):
    """What the loop engine gives, for a model whose weights are on disk.

    `names` are the `canonical_names` from before it was dispatched, where weights are tied. Hooks fold signs as
    gradients finish, and count."""

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Iterable[Batch], names: Mapping[str, str] | None = None
    ) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        voting = {n for n, p in parameters.items() if p.requires_grad and p.is_floating_point()}
        self.names = {n: first for n, first in (names or canonical_names(model)).items() if n in voting}
        uses = Counter(self.names.values())
        one = torch.zeros((), dtype=torch.int8)  # has the shape of any weight, and takes no memory
        tally = Tally({name: one.expand(parameters[name].shape) for name in uses})  # type: ignore[misc]
        super().__init__(model, loss, batches, tally)
        self.shared = {name for name, number in uses.items() if number > 1}
        self.sums: dict[str, Tensor] = {}  # gradients of tied weights, until all their uses have come in
        self.seen: Counter[str] = Counter()
        self.hung: Counter[str] = Counter()
        self.sample = object()  # marks the weights that wait for the gradient of the sample at hand
        self.handles: list[Any] = []

    def key(self, identity: str) -> str:
        """`identity` names the weights as well: they are not here to be looked at."""
        return weights_key({}, identity)

    def fold(self, step: VoteStep) -> list[Bad]:
        good, bad = self.finite(step)
        for sample in samples(good) if good is not None else ():
            self.tally.reserve(1)
            backward(self.loss, self.model, sample)
            self._finish_sample()
        return bad

    def result(self, bad: list[Bad]) -> SignVotes:
        refuse_nothing(self.tally)
        return SignVotes(self.tally.votes(), self.tally.count, notes=tuple(text for _, text in bad))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for prefix, module in self.model.named_modules():
                own = {n: full for n, full in own_weights(prefix, module).items() if full in self.names}
                if own:
                    stack.enter_context(hooked(module, _Fold(self, own)))
            stack.enter_context(recomputed(self.model))
            try:
                yield
            finally:
                for handle in self.handles:
                    handle.remove()

    def hang(self, name: str, parameter: nn.Parameter) -> None:
        """Wait for the gradient of a weight that was just brought in; tied ones may be one object or several."""
        if getattr(parameter, "_hung_for", None) is self.sample:
            return
        parameter._hung_for = self.sample  # type: ignore[attr-defined]
        parameter.grad = None
        self.hung[self.names[name]] += 1
        self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self._receive, name)))

    def _receive(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        canonical = self.names[name]
        self.seen[canonical] += 1
        if canonical in self.shared:
            held = self.sums.get(canonical)
            self.sums[canonical] = gradient.cpu() if held is None else held + gradient.cpu()
            return
        self._vote(canonical, gradient)

    def _vote(self, name: str, gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self.tally[name].sub_(dense.sign().to("cpu", self.tally[name].dtype))

    def _finish_sample(self) -> None:
        """After one sample's backward pass: sign the sums of tied weights, and count."""
        for name, total in self.sums.items():
            self._vote(name, total)
        if not self.seen:
            raise UnsafeResult(
                "no weight was folded: no gradient reached the offloaded weights. Do they require gradients?"
            )
        for name in self.tally.parameters:
            wanted = self.hung[name] if name in self.shared else 1
            if self.seen[name] != max(wanted, 1):
                raise UnsafeResult(
                    f"weight {name!r} was folded {self.seen[name]} times for one sample instead of {wanted}: it is "
                    "not used by the loss, or its layer is used more than once. Vote on such a model in memory."
                )
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.sums.clear()
        self.seen.clear()
        self.hung.clear()
        self.sample = object()


class _Fold(ModelHook):
    """Runs after the weights of one module were brought in."""

    def __init__(self, run: OnDisk, own: Mapping[str, str]) -> None:
        self.run, self.own = run, dict(own)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            for name, full in self.own.items():
                parameter = module.get_parameter(name)
                if parameter.requires_grad and parameter.device.type != "meta":
                    self.run.hang(full, parameter)
        return args, kwargs
