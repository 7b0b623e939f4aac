"""The writer of safetensors files: any cut into pieces, any way past the page cache, the same bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradfix.checkpoints import safetensors_writer
from gradfix.checkpoints.hashes import hash_file
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.errors import UnsafeResult

TENSORS = {"a": torch.arange(5000.0), "b": torch.arange(999, dtype=torch.int16), "c": torch.empty(0)}
INFOS = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def write(path: Path, marks: list[tuple[int, str]] | None = None) -> str:
    with SafetensorsWriter(path, INFOS, {"format": "pt"}) as writer:
        for tensor in TENSORS.values():
            for piece in tensor.split(700):
                writer.write(piece)
            if marks is not None:
                marks.append(writer.reached())
        return writer.close()


def check(path: Path, digest: str) -> None:
    assert digest == hash_file(path)
    found = load_file(path)
    assert set(found) == set(TENSORS) and all(torch.equal(found[n], t) for n, t in TENSORS.items())


def test_a_file_in_pieces(tmp_path: Path) -> None:
    check(tmp_path / "f", write(tmp_path / "f"))


@pytest.mark.parametrize("answer", ["taken", errno.EOPNOTSUPP, errno.EINVAL, "no flags"])
def test_large_files_go_past_the_page_cache_where_the_system_can(tmp_path, monkeypatch, answer) -> None:
    real, calls = os.pwritev, []

    def pwritev(descriptor, buffers, offset, flags):
        calls.append(flags)
        if answer == "no flags":
            raise NotImplementedError
        if answer != "taken" and len(calls) > 3:  # as if the file system changed its mind
            raise OSError(answer, os.strerror(answer))
        return real(descriptor, buffers, offset, 0)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(safetensors_writer, "LARGE", 1)
    monkeypatch.setattr("sys.platform", "linux")
    check(tmp_path / "f", write(tmp_path / "f"))
    assert len(calls) == {"taken": 11, "no flags": 1}.get(answer, 4)


def test_other_failures_past_the_page_cache_are_failures(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(safetensors_writer, "LARGE", 1)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "f")


def test_marks_tell_what_is_on_disk(tmp_path: Path) -> None:
    marks: list[tuple[int, str]] = []
    write(tmp_path / "f", marks)
    whole = (tmp_path / "f").read_bytes()
    assert marks[-1] == (len(whole), hash_file(tmp_path / "f"))
    size, digest = marks[0]
    (tmp_path / "g").write_bytes(whole[:size] + b"what was being written at the kill")
    with SafetensorsWriter(tmp_path / "g", INFOS, {"format": "pt"}, (size, digest)) as writer:
        assert writer.resumed
        writer.write(TENSORS["b"])
        check(tmp_path / "g", writer.close())
    with SafetensorsWriter(tmp_path / "g", INFOS, {"format": "pt"}, (size, "blake3:00")) as writer:
        assert not writer.resumed
        for tensor in TENSORS.values():
            writer.write(tensor)
        check(tmp_path / "g", writer.close())


def test_a_missing_piece_is_noticed(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "f", INFOS) as writer:
        writer.write(TENSORS["a"])
        with pytest.raises(UnsafeResult, match="this is a bug"):
            writer.close()
