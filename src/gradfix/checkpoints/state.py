"""Intermediate state on disk: tensors and what they belong to, believed only while every byte is as it was written.

An interrupted run goes on from such a file, and what it ends in would carry a flipped bit along unseen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gradfix.checkpoints.hashes import ContentHash
from gradfix.checkpoints.open import raw_bytes
from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import CorruptInput

CONTENT = "content"


def save_state(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Complete or absent, with the hash of all of it inside."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = _begun(about)
    for name, tensor in held.items():
        _add(content, name, tensor)
    save_tensors(path, held, {**about, CONTENT: content.text()})


class State:
    """A file of `save_state`; `about` is read at once, the tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = SafetensorsFile(path)
        except CorruptInput:
            raise self.damaged() from None
        self.about = {name: text for name, text in self._file.metadata.items() if name != CONTENT}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors; a file that is not as it was written is an error at the end, so come to the end first."""
        content = _begun(self.about)
        for name in self._file.names_in_file_order():
            tensor = self._file.read(name)
            _add(content, name, tensor)
            yield name, tensor
        if content.text() != self._file.metadata.get(CONTENT):
            raise self.damaged()

    def damaged(self) -> CorruptInput:
        return CorruptInput(
            f"{self.path}, kept by an interrupted run, is damaged. Delete it and run the same command again."
        )


def _begun(about: Mapping[str, str]) -> ContentHash:
    content = ContentHash()
    content.update(repr(sorted(about.items())).encode())
    return content


def _add(content: ContentHash, name: str, tensor: Tensor) -> None:
    content.update(f"\n{name}\t{tuple(tensor.shape)}\t{tensor.dtype}\n".encode())
    content.update(raw_bytes(tensor))
