"""Load a model with the family's own loader, and believe nothing it does not say.

transformers only warns when weights are missing and leaves random numbers in their place; here that is an
error that names the tensor. No code from a checkpoint runs unless `trust_remote_code` is passed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.kinds import HEADS
from gradfix.checkpoints.lora import LoraCheckpoint
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, open_checkpoint, resolve
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from gradfix.system.processes import Group, sharing

ADAPTER_CONFIG = "adapter_config.json"
# A damaged config makes the loaders raise almost anything, their own validation errors included; whatever it
# is, the folder does not load.
LOADER_ERRORS = (Exception,)


WRONG_TASK = (
    "cannot be loaded. Choose the --task by the model: zero-shot for encoders and CLIP, classification for models "
    "with a head, seq2seq for T5, causal for language models."
)


@dataclass(frozen=True)
class Builder:
    """Makes a model of its config's empty one and a checkpoint; `wears`: also of one that an adapter or a file is put on."""

    build: Callable[[Callable[[], nn.Module], Checkpoint], nn.Module]
    wears: bool = False


# Set while a model is to be put together in another way than whole, in one process.
BUILDER: ContextVar[Builder | None] = ContextVar("builder", default=None)


@dataclass(frozen=True)
class Home:
    """Where a model's config, tokenizer and weights are, and how they are loaded.

    An adapter, or a weights file without a config of its own, is put on the model of the folder."""

    folder: Path
    adapter: Path | None = None
    file: Path | None = None
    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    trust_remote_code: bool = False

    def __str__(self) -> str:
        return str(self.source)

    @property
    def source(self) -> Path:
        """What the user would call this model."""
        return self.adapter or self.file or self.folder

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: an adapter's own where it brings one."""
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.adapter if own and self.adapter is not None else self.folder


def locate(source: str | os.PathLike[str], base: str | os.PathLike[str] | None = None, **how: Any) -> Home:
    """The local folder of a checkpoint; for a LoRA adapter that of `base`, or of the base it names.

    A bare weights file takes config and tokenizer from `base`. `how` are the other fields of `Home`."""
    path = resolve(source)
    if base is not None and resolve(base) == path:
        base = None
    if not path.is_dir():
        if base is None:
            raise UsageError(
                f"{path} is a single file: weights without the config.json, and the tokenizer or image transform, that say "
                "what model they are. Give the folder it was saved with, or put the file into that of its base."
            )
        return Home(_full_model(resolve(base), path), file=path, **how)
    if not (path / ADAPTER_CONFIG).is_file():
        return Home(path, **how)
    return Home(_full_model(resolve(base) if base is not None else _named_base(path), path), path, **how)


def _full_model(folder: Path, wearer: Path) -> Path:
    if not folder.is_dir() or (folder / ADAPTER_CONFIG).is_file():
        raise UsageError(f"{folder} cannot be the base of {wearer}; give the folder of a full model.")
    return folder


def _named_base(adapter: Path) -> Path:
    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UsageError(f"{adapter} is a LoRA adapter that does not name its base model; give the base too.")
    try:
        return resolve(named)
    except CorruptInput as error:
        raise CorruptInput(
            f"the adapter {adapter} names a base that is not here. Give the base too (--base; to evaluate, "
            f"--head-from). {error}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptInput(
            f"{path} is missing or not readable as JSON ({type(error).__name__}); copy it from the model again."
        ) from None
    if not isinstance(content, dict):
        raise CorruptInput(f"{path} must hold a JSON object.")
    return content


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, the tensors its checkpoint lacked, and notes on what was left aside.

    `misfits` are tensors that the checkpoint has in another shape than its config says, with that shape. Like the
    missing ones they are random now: the caller must fill or refuse them."""

    model: Any
    missing: list[str]
    notes: list[str]
    misfits: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def refuse_misfits(self, home: Home) -> None:
        for name, shape in self.misfits.items():
            raise IncompatibleCheckpoints(
                f"{home}: {len(self.misfits)} tensors have another shape than the config says, first {name!r}, which "
                f"is {shape}."
            )


def load_pretrained(auto: Any, home: Home, optional: Sequence[str] = ()) -> Loaded:
    """Load with nothing missing.

    `optional` are submodules the task does not use: one whose tensors are missing is taken out of the model,
    so that the model's parameters are the checkpoint's tensors and no random weights."""
    loaded = load_partly(auto, home)
    loaded.refuse_misfits(home)
    needed = [name for name in loaded.missing if name.split(".")[0] not in optional]
    if needed:
        # Where it is the head that is missing, the file is whole and another task is meant.
        prefix = f"{loaded.model.base_model_prefix}."
        headless = prefix != "." and not any(name.startswith(prefix) for name in needed)
        kind = type(loaded.model).__name__
        why = f"As {kind} it {WRONG_TASK}" if headless else "The file is incomplete or of another model."
        raise CorruptInput(f"{home} lacks {len(needed)} tensors, first {needed[0]!r}. {why}")
    for name in {name.split(".")[0] for name in loaded.missing}:
        setattr(loaded.model, name, None)
    return loaded


def load_partly(auto: Any, home: Home, **config: Any) -> Loaded:
    """Load and say what is missing or of another shape; the caller must fill or refuse it, because it is random now."""
    folder = home.folder
    builder = BUILDER.get()
    config = _untied(home) | config
    if builder is not None:
        return _built(builder, auto, home, config)
    # Refuses damaged headers, and shards outside the folder that the loader would follow.
    open_checkpoint(folder)
    with quiet_transformers():
        try:
            model, info = auto.from_pretrained(
                folder,
                dtype=home.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=home.trust_remote_code,
                local_files_only=True,
                **config,
            )
        except LOADER_ERRORS as error:
            if "Unrecognized configuration class" in str(error):
                kind = read_json(folder / "config.json").get("model_type", "?")
                raise IncompatibleCheckpoints(f"{folder} is a {kind} model: {auto.__name__} {WRONG_TASK}") from None
            raise CorruptInput(_why(folder, error)) from None
    extra = sorted(info["unexpected_keys"])
    inside = [name for name in extra if not _is_other_head(name, model, folder)]
    if inside:
        raise CorruptInput(
            f"{folder} holds {len(inside)} tensors its model does not know, first {inside[0]!r}. "
            f"Is the config of another model? As {type(model).__name__} it {WRONG_TASK}"
        )
    notes = [f"{len(extra)} tensors of an unused head were left aside, first {extra[0]!r}."] if extra else []
    _plain_experts(model, home.dtype)
    misfits = {str(name): tuple(stored) for name, stored, _ in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(misfits)
    if home.adapter is not None or home.file is not None:
        filled, odd = _wear(model, home)
        if home.file is not None:  # what is not in the file is nobody's
            missing, misfits = {name for name, _ in model.named_parameters()}, {}
        missing -= filled | odd.keys()
        misfits = {name: shape for name, shape in misfits.items() if name not in filled} | odd
    return Loaded(model.to(home.device).eval(), sorted(missing), notes, dict(sorted(misfits.items())))


def _untied(home: Home) -> dict[str, Any]:
    """What the config must say where an adapter gave the two token tables of a tied base changes of their own."""
    worn = open_checkpoint(home.source, base=home.folder) if home.adapter is not None else None
    return {"tie_word_embeddings": False} if isinstance(worn, LoraCheckpoint) and worn.unties() else {}


def _plain_experts(model: Any, dtype: torch.dtype) -> None:
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fast expert kernels know no float64


def _built(builder: Builder, auto: Any, home: Home, config: dict[str, Any]) -> Loaded:
    """The config's model from `builder`, which fills it itself and refuses what is missing."""
    from transformers import AutoConfig

    if home.source != home.folder and not builder.wears:
        raise UsageError(f"{home} is an adapter or a bare file; a sharded model is read from the folder of a full one.")

    trust = home.trust_remote_code

    def make() -> nn.Module:
        with quiet_transformers():
            try:
                found = AutoConfig.from_pretrained(
                    home.folder, trust_remote_code=trust, local_files_only=True, **config
                )
                model = auto.from_config(found, dtype=home.dtype, trust_remote_code=trust)
            except LOADER_ERRORS as error:
                raise CorruptInput(_why(home.folder, error)) from None
        _plain_experts(model, home.dtype)
        return model

    return Loaded(builder.build(make, open_checkpoint(home.source, base=home.folder)), [], [])


@contextmanager
def split_over(group: Group, device: str) -> Iterator[None]:
    """Every model that is opened inside lies in slices over the group (FSDP2), which scores and trains it in step.

    Models are built without weights, and each process reads its own slices from the files."""
    from torch.distributed.device_mesh import init_device_mesh

    from gradfix.votes.distributed.build import build_for_lessons

    mesh = init_device_mesh(torch.device(device).type, (group.size,), mesh_dim_names=("shard",))
    builder = Builder(lambda make, source: build_for_lessons(make, source, mesh, device))
    with building(builder), sharing(replace(group, in_step=True)):
        yield


@contextmanager
def building(builder: Builder) -> Iterator[None]:
    token = BUILDER.set(builder)
    try:
        yield
    finally:
        BUILDER.reset(token)


def _wear(model: nn.Module, home: Home) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    """Put an adapter's merged weights, or a file's, into the model; the names it filled, and those that do not fit."""
    worn = open_checkpoint(home.source, base=home.folder)
    names = name_map(model, worn.names())
    if isinstance(worn, LoraCheckpoint) and not names.fused:  # the rest is in the model already
        state = names.to_module({name: worn.read(name) for name in worn.changed()})
    else:
        state = names.to_module(worn.state())
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    filled: set[str] = set()
    odd: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for name in places.keys() & state.keys():
            if state[name].shape == places[name].shape:
                places[name].copy_(state[name])
                filled.add(name)
            else:
                odd[name] = tuple(state[name].shape)
    return filled, odd


def _why(folder: Path, error: BaseException) -> str:
    if "CONVERSION" in str(error):
        # transformers fuses some tensors (experts) and points to a report that nobody saw.
        return f"{folder}: tensors that the model fuses, such as experts, are missing or of another shape."
    return f"{folder} does not load ({first_line(error)})."


def _is_other_head(name: str, model: nn.Module, folder: Path) -> bool:
    """What stands beside the encoder and the task does not use: a pooler, or a head of pre-training.

    The encoder's tensors carry its prefix where the file was saved with a head, and then a head's do not; in the
    file of a bare encoder the module's name tells."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if name.removeprefix(prefix).split(".")[0] in HEADS:
        return True
    names = open_checkpoint(folder).names()
    return prefix != "." and not name.startswith(prefix) and any(other.startswith(prefix) for other in names)


def load_exactly(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Put a checkpoint's tensors into a freshly built model; every name and shape must match."""
    wanted = model.state_dict()
    odd = sorted(set(state) ^ set(wanted))
    if odd:
        verb = "lacks" if odd[0] in wanted else "holds a tensor its model does not know:"
        raise CorruptInput(f"{folder} {verb} {odd[0]!r} ({len(odd)} names differ). Is the config of another model?")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise IncompatibleCheckpoints(
                f"{folder}: tensor {name!r} is {tuple(tensor.shape)}, but the config says {tuple(wanted[name].shape)}."
            )
    model.load_state_dict(state)


def load_tokenizer(home: Home) -> Any:
    """The model's tokenizer, padding on the right; a missing pad token borrows the end token."""
    from transformers import AutoTokenizer

    folder = home.tokenizer
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=home.trust_remote_code, local_files_only=True
            )
            min(tokenizer.model_max_length, len(tokenizer("a")["input_ids"]))  # a damaged config shows here
            if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # made up where the files are missing
                raise ValueError("it has no vocabulary; are its files missing?")
            if "input_ids" not in tokenizer.model_input_names:
                raise ValueError("model_input_names lacks input_ids")
        except LOADER_ERRORS as error:
            raise CorruptInput(
                f"{folder} has no usable tokenizer ({first_line(error)}). Put the model's own tokenizer files there."
            ) from None
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise CorruptInput(f"{folder}: the tokenizer has neither a pad nor an end token.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_image_processor(home: Home) -> Any:
    from transformers import AutoImageProcessor

    with quiet_transformers():
        try:
            return AutoImageProcessor.from_pretrained(
                home.folder, trust_remote_code=home.trust_remote_code, local_files_only=True
            )
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{home.folder} has no usable image processor ({first_line(error)}).") from None


def freeze_all_but(model: nn.Module, names: Sequence[str]) -> None:
    """Only the named parameters ask for gradients: the rest neither votes nor learns."""
    wanted = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted and parameter.is_floating_point())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report and no progress bar: what matters of them is checked, not printed."""
    heal_torchvision()
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
