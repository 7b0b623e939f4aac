"""Load a model with the family's own loader, and believe nothing it does not say.

transformers only warns when weights are missing and leaves random numbers in their place; here that is an
error that names the tensor. No code from a checkpoint runs unless `trust_remote_code` is passed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint, resolve
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError

# What the loaders raise on damaged or foreign folders; anything else is a bug and should show as one.
LOADER_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AttributeError,
    ImportError,
    IndexError,
)


def model_folder(source: str | os.PathLike[str]) -> Path:
    """The local folder of a checkpoint with a config in it."""
    path = resolve(source)
    if path.is_dir():
        return path
    raise UsageError(f"{path} is a single file; this task needs the folder with its config and tokenizer.")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptInput(f"{path} is missing or not readable as JSON ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise CorruptInput(f"{path} must hold a JSON object.")
    return content


def load_pretrained(
    auto: Any,
    folder: Path,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    optional: Sequence[str] = (),
    trust_remote_code: bool = False,
    explain_missing: Callable[[str], str] | None = None,
) -> tuple[Any, list[str]]:
    """The model in eval mode and notes on what was left aside.

    `optional` are submodules the task does not use: one whose tensors are missing is taken out of the model,
    so that the model's parameters are the checkpoint's tensors and no random weights."""
    open_checkpoint(
        folder
    )  # refuses shards outside the folder and damaged headers, which the loader would follow
    with quiet_transformers():
        try:
            model, info = auto.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder} does not load ({_first_line(error)}).") from None
    notes = _check_info(model, info, folder, optional, explain_missing)
    for name in {missing.split(".")[0] for missing in info["missing_keys"]}:
        setattr(model, name, None)
    return model.to(device).eval(), notes


def _check_info(
    model: nn.Module,
    info: dict[str, Any],
    folder: Path,
    optional: Sequence[str],
    explain_missing: Callable[[str], str] | None,
) -> list[str]:
    mismatched = sorted(
        str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"]
    )
    if mismatched:
        raise IncompatibleCheckpoints(
            f"{folder}: {len(mismatched)} tensors have another shape than the config says, "
            f"first {mismatched[0]!r}."
        )
    missing = sorted(name for name in info["missing_keys"] if name.split(".")[0] not in optional)
    if missing:
        reason = (
            explain_missing(missing[0]) if explain_missing else "The file is incomplete or of another model."
        )
        raise CorruptInput(f"{folder} lacks {len(missing)} tensors, first {missing[0]!r}. {reason}")
    extra = sorted(info["unexpected_keys"])
    inside = [name for name in extra if not _is_other_head(name, model, folder)]
    if inside:
        raise CorruptInput(
            f"{folder} holds {len(inside)} tensors its model does not know, first {inside[0]!r}. "
            "Is the config of another model?"
        )
    return [f"{len(extra)} tensors of an unused head were left aside, first {extra[0]!r}."] if extra else []


def _is_other_head(name: str, model: nn.Module, folder: Path) -> bool:
    """A pre-training head beside an encoder: the encoder's tensors carry its prefix, the head's do not."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = open_checkpoint(folder).names()
    return prefix != "." and not name.startswith(prefix) and any(other.startswith(prefix) for other in names)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer, padding on the right; a missing pad token borrows the end token."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder} has no usable tokenizer ({_first_line(error)}).") from None
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise CorruptInput(f"{folder}: the tokenizer has neither a pad nor an end token.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_image_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoImageProcessor

    with quiet_transformers():
        try:
            return AutoImageProcessor.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except LOADER_ERRORS as error:
            raise CorruptInput(f"{folder} has no usable image processor ({_first_line(error)}).") from None


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


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
