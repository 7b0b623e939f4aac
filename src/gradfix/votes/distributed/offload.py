"""Votes of a model larger than memory, on one device: weights come from disk layer by layer.

A weight that is one tensor of a safetensors file stays there and is read under its on-disk name whenever it is
needed; only weights in another form than the file's (stacked experts, pickled files) are written to the offload folder.
Between uses they are placeholders, and a hook on a placeholder never fires. So the fold is hung on the real weight
each time it is brought in, every block is recomputed in the backward pass (otherwise the graph would keep all weights
alive), and a weight that was not folded exactly once is an error."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import offload_weight
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.slices import Rows, check_stored, read_rows
from gradfix.errors import UnsafeResult, UsageError
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes.collect import VoteRun, refuse_nothing
from gradfix.votes.distributed.build import blocks, build_empty, fill_buffers
from gradfix.votes.engines.loop import backward
from gradfix.votes.engines.passes import Batch, Loss, samples
from gradfix.votes.resume import Bad, VoteStep, weights_key
from gradfix.votes.tally import Tally

Place = int | str | torch.device
# Modules that use their submodules' weights without calling the submodules.
PRELOADED = ("MultiheadAttention",)


@dataclass(frozen=True)
class Offloaded:
    """A model whose weights are partly on disk, its tied names and its names on disk (from before it was split)."""

    model: nn.Module
    ties: dict[str, str]
    names: NameMap


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every parameter name -> the first name of the same tensor; ask before the weights are offloaded."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@torch.no_grad()
def load_offloaded(
    make: Callable[[], nn.Module], source: Checkpoint, folder: Path, max_memory: Mapping[int | str, int | str] | None
) -> Offloaded:
    """The model of `make`, filled from `source`; `max_memory` is what its weights may take per device."""
    model = build_empty(make, source)
    names, ties = name_map(model, source.names()), canonical_names(model)
    places = _places(model, max_memory)
    main = _main_device(places, max_memory)
    _refuse_homeless(model, places, main)
    fill_buffers(model, source, {name: buffer.clone() for name, buffer in model.named_buffers()})
    folder.mkdir(parents=True, exist_ok=True)
    index = _fill(model, names, ties, places, source, folder)
    with _silent():
        loaded = dispatch_model(
            model, places, main_device=main, offload_dir=str(folder), offload_index=index or None,
            preload_module_classes=list(PRELOADED), force_hooks=True,
        )  # fmt: skip
    return Offloaded(loaded, ties, names)


@contextmanager
def _silent() -> Iterator[None]:
    """accelerate warns of what was asked for: weights that are not in memory."""
    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _places(model: nn.Module, max_memory: Mapping[int | str, int | str] | None) -> dict[str, Place]:
    """Which part of the model goes where; a module with tensors of its own beside submodules is kept in one piece."""
    whole = [*blocks(model), *(m for m in model.modules() if m is not model and m._parameters)]
    kinds = sorted({type(module).__name__ for module in whole})
    limits = None if max_memory is None else dict(max_memory)
    places: dict[str, Place] = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=kinds)
    main = _main_device(places, max_memory)
    own = {name for name, _ in model.named_parameters(recurse=False)}
    return {name: main if name in own else place for name, place in places.items()}


def _main_device(places: Mapping[str, Place], max_memory: Mapping[int | str, int | str] | None) -> Place:
    """Where the passes run: the first card there is, or the processor."""
    cards = [place for place in (*places.values(), *(max_memory or ())) if place not in ("cpu", "disk")]
    return cards[0] if cards else "cpu"


def _refuse_homeless(model: nn.Module, places: Mapping[str, Place], main: Place) -> None:
    """Examples are sent to where the first weight is, so that one cannot be a placeholder."""
    first = next(name for name, _ in model.named_parameters())
    if _place_of(first, places) == main:
        return
    parts = first.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    owner = next(name for name in above if model.get_submodule(name)._parameters)
    need = _bytes(model.get_submodule(owner)) + max(map(_bytes, blocks(model)), default=0)
    raise UsageError(
        f"--max-memory has no room for {owner!r}, where the model begins, beside its largest layer: together "
        f"{need / 2**20:.1f} MiB. Give more than that."
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _place_of(name: str, places: Mapping[str, Place]) -> Place:
    """The place of the innermost part of the model that is named in the map."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next(places[prefix] for prefix in prefixes if prefix in places)


def _fill(
    model: nn.Module,
    names: NameMap,
    ties: Mapping[str, str],
    places: Mapping[str, Place],
    source: Checkpoint,
    folder: Path,
) -> dict[str, Any]:
    """Read what stays in memory; for the rest, say where it is on disk. Tied weights stay one tensor."""
    held: dict[tuple[str, Place], nn.Parameter] = {}
    index: dict[str, Any] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, first in ties.items():
        like, place = parameters[name], _place_of(name, places)
        if place == "disk":
            index[name] = _on_disk(name, first, like, names, source, folder)
            continue
        if (first, place) not in held:
            tensor = _read(first, like, names, source).to(place)
            held[first, place] = nn.Parameter(tensor, requires_grad=like.requires_grad)
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._parameters[own] = held[first, place]
    return index


def _read(name: str, like: Tensor, names: NameMap, source: Checkpoint) -> Tensor:
    flat = read_rows(name, like, Rows(0, like.numel()), names, source)
    return flat.view(like.shape).to(like.dtype)


def _on_disk(name: str, first: str, like: Tensor, names: NameMap, source: Checkpoint, folder: Path) -> dict[str, Any]:
    """Where accelerate finds the weight: in the checkpoint itself where its form is the model's."""
    if first in names.renamed:
        disk = names.renamed[first]
        check_stored(disk, like.shape, source)
        if found := source.stored(disk):
            file, inside = found
            kind = str(like.dtype).removeprefix("torch.")
            return {"safetensors_file": str(file.path), "weight_name": inside, "dtype": kind}
    written: dict[str, Any] = offload_weight(_read(first, like, names, source), name, str(folder), {})
    return dict(written[name])


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
        undo: list[Callable[[], None]] = []
        for prefix, module in self.model.named_modules():
            deep = type(module).__name__ in PRELOADED
            own = {n: f"{prefix}.{n}" if prefix else n for n, _ in module.named_parameters(recurse=deep)}
            own = {n: full for n, full in own.items() if full in self.names}
            if own:
                before = getattr(module, "_hf_hook", None), module.forward
                add_hook_to_module(module, _Fold(self, own), append=True)
                undo.append(partial(_put_back, module, *before))
        for block in blocks(self.model):
            forward = block.forward
            block.forward = _recomputed(forward)
            undo.append(partial(setattr, block, "forward", forward))
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):  # a cache would grow once more when a block is recomputed
                config.use_cache = False
                undo.append(partial(setattr, config, "use_cache", True))
        try:
            yield
        finally:
            for handle in self.handles:
                handle.remove()
            for step in reversed(undo):
                step()

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
