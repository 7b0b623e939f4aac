"""Votes of a model larger than memory, on one device: weights come from disk layer by layer.

Offloaded weights are placeholders between uses, and a hook on a placeholder never fires. So the fold is hung
on the real weight each time it is brought in, every block is recomputed in the backward pass (otherwise the
graph would keep all weights alive), and a weight that was not folded exactly once is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gradfix.errors import DataError, UnsafeResult
from gradfix.system.modules import left_as_it_was
from gradfix.vectors.signvotes import SignVotes, Tally
from gradfix.votes.collect import BAD_SAMPLE_SHARE, finite_samples
from gradfix.votes.distributed.placing import PRELOADED, canonical_names
from gradfix.votes.distributed.sharded import blocks
from gradfix.votes.engines.loop import Batch, Loss, batch_size, samples
from gradfix.votes.resume import resumable


def collect_offloaded(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    names: Mapping[str, str] | None = None,
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    progress: Callable[[int], None] | None = None,
) -> SignVotes:
    """What the loop engine gives, for a model whose weights are on disk.

    `names` are the `canonical_names` from before it was dispatched, where weights are tied. With `checkpoint`,
    finished batches are saved there and skipped when the same call runs again; `identity` then names the weights
    and what else the votes depend on."""
    folds = _Folds(model, names or canonical_names(model))
    tally, notes = folds.tally, list[str]()
    if checkpoint is not None:
        batches = resumable(checkpoint, tally, batches, key=identity, bad=notes)
    with left_as_it_was(model), folds:
        for batch in batches:
            seen = tally.count + len(notes)
            good, skipped = finite_samples(model, loss, batch, first=seen)
            notes += skipped
            if len(notes) > BAD_SAMPLE_SHARE * (seen + batch_size(batch)):
                raise DataError(f"{len(notes)} samples give a loss that is not finite, first {notes[0]}.")
            for sample in samples(good) if good is not None else ():
                tally.reserve(1)
                with torch.enable_grad():
                    value = loss(model, sample).sum()
                value.backward()
                folds.finish()
            if progress is not None:
                progress(batch_size(batch))
    if tally.count == 0:
        raise DataError("no samples to vote with; check the data and --shots.")
    return SignVotes(tally.votes(), tally.count, notes=tuple(notes))


class _Folds:
    """The hooks of one vote: they fold signs as gradients finish, and count."""

    def __init__(self, model: nn.Module, names: Mapping[str, str]) -> None:
        self.model = model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        voting = {n for n, p in parameters.items() if p.requires_grad and p.is_floating_point()}
        self.names = {name: first for name, first in names.items() if name in voting}
        uses = Counter(self.names.values())
        self.shared = {name for name, number in uses.items() if number > 1}
        self.sums: dict[str, Tensor] = {}  # gradients of tied weights, until all their uses have come in
        self.seen: Counter[str] = Counter()
        one = torch.zeros((), dtype=torch.int8)  # has the shape of any weight, and takes no memory
        self.tally = Tally({name: one.expand(parameters[name].shape) for name in uses})  # type: ignore[misc]
        self.hung: Counter[str] = Counter()
        self.sample = object()  # marks the weights that wait for the gradient of the sample at hand
        self.handles: list[Any] = []
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for prefix, module in self.model.named_modules():
            deep = type(module).__name__ in PRELOADED
            own = {n: f"{prefix}.{n}" if prefix else n for n, _ in module.named_parameters(recurse=deep)}
            own = {n: full for n, full in own.items() if full in self.names}
            if own:
                before = getattr(module, "_hf_hook", None), module.forward
                add_hook_to_module(module, _Fold(self, own), append=True)
                self.undo.append(partial(_put_back, module, *before))
        for block in blocks(self.model):
            forward = block.forward
            block.forward = _recomputed(forward)
            self.undo.append(partial(setattr, block, "forward", forward))
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):  # a cache would grow once more when a block is recomputed
                config.use_cache = False
                self.undo.append(partial(setattr, config, "use_cache", True))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        for undo in reversed(self.undo):
            undo()

    def fold(self, name: str, parameter: Tensor) -> None:
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

    def finish(self) -> None:
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

    def hang(self, name: str, parameter: nn.Parameter) -> None:
        """Wait for the gradient of a weight that was just brought in; tied ones may be one object or several."""
        if getattr(parameter, "_hung_for", None) is self.sample:
            return
        parameter._hung_for = self.sample  # type: ignore[attr-defined]
        parameter.grad = None
        self.hung[self.names[name]] += 1
        self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self.fold, name)))


class _Fold(ModelHook):
    """Runs after the weights of one module were brought in."""

    def __init__(self, folds: _Folds, own: Mapping[str, str]) -> None:
        self.folds, self.own = folds, dict(own)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            for name, full in self.own.items():
                parameter = module.get_parameter(name)
                if parameter.requires_grad and parameter.device.type != "meta":
                    self.folds.hang(full, parameter)
        return args, kwargs


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Reentrant on purpose: the first pass keeps neither activations nor weights.

    All tensors that come in are handed over one by one, wherever they were (a T5 decoder's layers get the
    encoder's output and the position biases besides), so that each gets its gradient back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, inputs = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs: list[Any] = []

        def flat(_: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            own_args, own_kwargs = tree_unflatten(given, inputs)
            found, form = tree_flatten(forward(*own_args, **own_kwargs))
            outputs[:] = [form]
            return tuple(found)

        # Without an input that asks for a gradient nothing would be recomputed, and no weight folded.
        asking = torch.zeros((), requires_grad=True)
        found = checkpoint(flat, asking, *(leaves[place] for place in places), use_reentrant=True)
        return tree_unflatten(found, outputs[0])

    return run


def _put_back(module: nn.Module, hook: Any, forward: Callable[..., Any]) -> None:
    module.forward = forward
    if hook is None:
        del module._hf_hook
        if hasattr(module, "_old_forward"):
            del module._old_forward
    else:
        module._hf_hook = hook
