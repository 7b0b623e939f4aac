"""A model larger than memory, on one device: weights come from disk layer by layer.

A weight that is one tensor of a safetensors file stays there and is read under its on-disk name whenever it is
needed; only weights in another form than the file's (stacked experts, pickled files, what an adapter changes) are written
to the offload folder. Between uses they are placeholders. Every block is recomputed in the backward pass: otherwise the
graph would keep all weights alive."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.open import Checkpoint
from gradfix.checkpoints.slices import Rows, check_stored, read_rows
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import UsageError
from gradfix.system.modules import ON_DISK, LeftOnDisk
from gradfix.vectors.scale import dialled
from gradfix.vectors.transported import add_scaled
from gradfix.votes.distributed.build import blocks, build_empty, fill_buffers

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
    ON_DISK[loaded] = LeftOnDisk(ties, repr(source.identity() or source.fingerprint()))
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
    kinds = sorted({type(module).__name__ for module in _kept_whole(model)})
    limits = None if max_memory is None else dict(max_memory)
    places: dict[str, Place] = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=kinds)
    main = _main_device(places, max_memory)
    own = {name for name, _ in model.named_parameters(recurse=False)}
    return {name: main if name in own else place for name, place in places.items()}


def _kept_whole(model: nn.Module) -> list[nn.Module]:
    return [*blocks(model), *(module for module in model.modules() if module is not model and module._parameters)]


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
    need = _bytes(model.get_submodule(owner)) + max(map(_bytes, _kept_whole(model)))
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
    path, inside = folder / f"{name}.safetensors", name
    found = None
    if first in names.renamed:
        check_stored(names.renamed[first], like.shape, source)
        found = source.stored(names.renamed[first])
    if found is not None:
        path, inside = found[0].path, found[1]
    else:
        save_tensors(path, {name: _read(first, like, names, source)}, {})
    return {"safetensors_file": str(path), "weight_name": inside, "dtype": str(like.dtype).removeprefix("torch.")}


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


@contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Every block is computed again in the backward pass; without a cache, which would grow once more then."""
    inner = blocks(model)
    forwards = [block.forward for block in inner]
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    try:
        for block, forward in zip(inner, forwards, strict=True):
            block.forward = _recomputed(forward)
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for block, forward in zip(inner, forwards, strict=True):
            block.forward = forward


class _Moved(ModelHook):
    """Adds to the weights of one module, each time after they were brought in, what they are to be moved by."""

    def __init__(self, own: Mapping[str, str], update: Mapping[str, Tensor], alpha: float) -> None:
        self.own, self.update, self.alpha = dict(own), update, alpha

    @torch.no_grad()
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for name, full in self.own.items():
            weight = module.get_parameter(name)
            moved = weight.detach().clone()  # what was brought in may be the file itself
            add_scaled(moved, self.update[full], self.alpha)
            place, _, last = name.rpartition(".")
            module.get_submodule(place)._parameters[last] = nn.Parameter(moved, requires_grad=weight.requires_grad)
        return args, kwargs


@contextmanager
def moved_on_disk(model: nn.Module, update: Mapping[str, Tensor], alpha: float) -> Iterator[None]:
    """An offloaded model plus `alpha * update`: weights on disk are moved whenever they are brought in."""
    ties = ON_DISK[model].ties
    here = {name: not p.is_meta for name, p in model.named_parameters(remove_duplicate=False)}
    with ExitStack() as stack:
        dial = stack.enter_context(dialled(model, {n: update[n] for n in update if here[n]}))
        dial.turn(alpha)
        for prefix, module in model.named_modules():
            own = {n: full for n, full in own_weights(prefix, module).items() if not here[full]}
            own = {n: full if full in update else ties[full] for n, full in own.items()}
            own = {n: full for n, full in own.items() if full in update}
            if own and alpha:
                stack.enter_context(hooked(module, _Moved(own, update, alpha)))
        yield


def own_weights(prefix: str, module: nn.Module) -> dict[str, str]:
    """The weights that are brought in when this module is called, by their names in it: their names in the model."""
    deep = type(module).__name__ in PRELOADED
    return {n: f"{prefix}.{n}" if prefix else n for n, _ in module.named_parameters(recurse=deep)}


@contextmanager
def hooked(module: nn.Module, hook: ModelHook) -> Iterator[None]:
    """A hook that runs after those there are; they are all there is afterwards."""
    before, forward = getattr(module, "_hf_hook", None), module.forward
    add_hook_to_module(module, hook, append=True)
    try:
        yield
    finally:
        module.forward = forward
        if before is not None:
            module._hf_hook = before
        else:
            del module._hf_hook
            if hasattr(module, "_old_forward"):
                del module._old_forward
