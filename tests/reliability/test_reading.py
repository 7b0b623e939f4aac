"""Inputs while they stream by: whose fault a failed read is, and what the manifest knows of them."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gradfix
from gradfix.checkpoints.hashes import ContentHash, OrderedHash
from gradfix.errors import CorruptInput
from tests.trio import draw_votes, make_trio


@pytest.mark.parametrize("role", ["base", "tuned", "target", "votes.safetensors"])
def test_an_input_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """A disk that fails under an input, in the middle of the stream, is not a failure to write the output."""
    roles = make_trio(tmp_path)
    draw_votes(0).save(tmp_path / "votes.safetensors")
    real = os.preadv

    def failing(descriptor: int, *rest: object) -> int:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)
        if role in file.parts and list(tmp_path.glob(".out.gradfix-*")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CorruptInput, match=rf"{role}.* cannot be read \(input/output error\)") as caught:
        gradfix.transport_checkpoint(**roles, votes=tmp_path / "votes.safetensors", out=tmp_path / "out", force=True)
    assert caught.value.exit_code == 3
    assert not list(tmp_path.glob("*out*"))


def test_pickled_folders_are_known_by_their_content(tmp_path: Path) -> None:
    for number, role in enumerate(("base", "tuned", "target")):
        (tmp_path / role).mkdir()
        torch.save({"w": torch.arange(1.0, 9) + number / 100}, tmp_path / role / "pytorch_model.bin")
    roles = {role: tmp_path / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    inputs = json.loads((tmp_path / "out" / "gradfix.json").read_text())["inputs"]
    known = [inputs[role]["hashes"]["tensors"] for role in roles]
    assert len(set(known)) == 3
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_a_hash_asked_for_while_more_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the hash of so many bytes, whatever another thread adds in the meantime."""
    content = OrderedHash([2])
    content.update(0, b"ab")
    asked, added = threading.Event(), threading.Event()
    real = ContentHash.text

    def slow(self: ContentHash) -> str:
        asked.set()
        added.wait(0.2)
        return real(self)

    def add() -> None:
        asked.wait()
        content.update(2, b"cd")
        added.set()

    expected = ContentHash()
    expected.update(b"ab")
    with monkeypatch.context() as patch:
        patch.setattr(ContentHash, "text", slow)
        other = threading.Thread(target=add)
        other.start()
        found = content.text(2)
        other.join()
    assert found == expected.text()
