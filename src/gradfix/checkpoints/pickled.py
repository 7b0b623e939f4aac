"""Weights in torch's own pickled format, read without running a line of it.

torch's weights-only reader refuses code; what is left to refuse are records and views that claim more than
the file holds."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradfix.errors import CorruptInput


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors only: anything that would run code is refused by torch's weights-only reader."""
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_records(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CorruptInput:
        raise
    except pickle.UnpicklingError as error:
        told = re.search(r"Unpickler error: (.*?)(?:\.\s|\n|$)", str(error))
        reason = " ".join((told[1] if told else str(error)).split())[:160]
        raise CorruptInput(
            f"{path} cannot be read as plain weights ({reason}). gradfix never runs code from a checkpoint; "
            "save it as safetensors in the program that made it."
        ) from None
    except Exception as error:  # damaged bytes make the readers raise almost anything
        raise CorruptInput(f"{path} is damaged or not a torch file ({type(error).__name__}).") from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise CorruptInput(f"{path} holds no state dict; found {type(loaded).__name__}.")
    loaded = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    for name, value in loaded.items():
        _refuse_hollow(path, name, value)
    if loaded and all(name.startswith("module.") for name in loaded):
        loaded = {name.removeprefix("module."): value for name, value in loaded.items()}
    if not loaded:
        raise CorruptInput(f"{path} holds no tensors.")
    return loaded


def _check_records(path: Path) -> None:
    """torch stores its records as they are; a compressed one can claim any size.

    The checksums are read here because torch does not look at them in files that it maps."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > path.stat().st_size:
                raise CorruptInput(
                    f"{path}: record {record.filename!r} is compressed or larger than the file; torch writes no "
                    "such files. Save it again as safetensors."
                )
        damaged = archive.testzip()
    if damaged is not None:
        raise CorruptInput(
            f"{path}: record {damaged!r} has another checksum than was written. Copy it again."
        )


def _refuse_hollow(path: Path, name: str, value: Tensor) -> None:
    """A view can claim more entries than the file holds (stride 0), or none of them (meta)."""
    if value.layout is not torch.strided or value.is_quantized:
        return  # refused by name with the other entries
    if value.is_meta or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise CorruptInput(
            f"{path}: tensor {name!r} claims {value.numel():,} entries that the file does not hold."
        )
