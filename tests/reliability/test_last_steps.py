"""The end of a write: what is kept until the output stands, what is counted as room, and where it goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradfix
import gradfix.stream.pipeline
from gradfix.checkpoints import write
from gradfix.checkpoints.interrupted import JOURNAL, Journal
from gradfix.errors import OutputError
from tests.scale.interrupting import stop_after
from tests.torture.crashes import relative, three


def interrupted(roles: dict[str, Path], out: Path, **how: Any) -> Path:
    """Begin a transport, stop it, and return the staging folder it leaves."""
    with pytest.raises(KeyboardInterrupt):
        gradfix.transport_checkpoint(**roles, mask="none", out=out, **how)
    (staging,) = out.parent.glob(f".{out.name}.gradfix-*")
    return staging


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def count_moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    moved: list[str] = []
    real = gradfix.stream.pipeline.Pipeline._move
    monkeypatch.setattr(
        gradfix.stream.pipeline.Pipeline, "_move", lambda self, *a: moved.append(a[0]) or real(self, *a)
    )
    return moved


@pytest.mark.parametrize(
    "last", ["gradfix.stream.checkpoint.copy_side_files", "gradfix.checkpoints.write.seal"]
)
def test_a_kill_after_the_last_tensor_computes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Killed before its side files, or when all but the rename is done, a run goes on to the same bits."""
    roles = three(tmp_path)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(last, stop)
        staging = interrupted(roles, tmp_path / "out")
    assert (staging / "gradfix.json").exists() == last.endswith("seal")
    moved = count_moves(monkeypatch)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    assert not moved
    assert relative(tmp_path / "out") == relative(tmp_path / "whole")
    gradfix.verify(tmp_path / "out")


def test_side_files_of_the_killed_run_do_not_stay(tmp_path: Path) -> None:
    """The weights are the same, so the folder is taken up again; what lay beside them is not believed."""
    roles = three(tmp_path)

    def extras(staging: Path) -> None:
        (staging / "head").mkdir()
        for stray in (staging / "head.json", staging / "head" / "config.json"):
            stray.write_text("{}")
        raise KeyboardInterrupt

    interrupted(roles, tmp_path / "out", extras=extras)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "whole")
    assert relative(tmp_path / "out") == relative(tmp_path / "whole")


def test_a_torn_line_does_not_take_later_ones_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills: the first cuts a line of the journal, what is done between them counts all the same."""
    roles = three(tmp_path)
    size = sum(path.stat().st_size for path in roles["target"].glob("*.safetensors"))
    staging = interrupted(roles, tmp_path / "out", progress=stop_after(size // 3, "SIGINT"))
    with open(staging / JOURNAL, "ab") as file:
        file.write(b'0123456789abcdef {"file": "model-0')
    before = len(Journal(staging).tensors("model-00001-of-00003.safetensors"))
    with monkeypatch.context() as patch:
        patch.setattr("gradfix.stream.checkpoint.copy_side_files", stop)
        interrupted(roles, tmp_path / "out")
    moved = count_moves(monkeypatch)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    assert before and not moved


def test_what_is_written_already_needs_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for one output: an interrupted one leaves too little for a second, and enough for its rest."""
    roles = three(tmp_path)
    size = sum(path.stat().st_size for path in roles["target"].glob("*.safetensors"))
    room = size + 2**20

    def usage(_: object) -> SimpleNamespace:
        held = [path for path in tmp_path.glob(".out.gradfix-*/*") if path.is_file()]
        return SimpleNamespace(free=room - sum(path.stat().st_size for path in held))

    monkeypatch.setattr(write.shutil, "disk_usage", usage)
    interrupted(roles, tmp_path / "out", progress=stop_after(size // 3, "SIGINT"))
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    gradfix.verify(tmp_path / "out")


def test_a_linked_output_is_replaced_where_it_is(tmp_path: Path) -> None:
    roles, real, link = three(tmp_path), tmp_path / "disk" / "real", tmp_path / "out"
    real.mkdir(parents=True)
    (real / "old.txt").write_text("old")
    link.symlink_to(real)
    gradfix.transport_checkpoint(**roles, mask="none", out=link, overwrite=True)
    assert os.readlink(link) == str(real)
    gradfix.verify(real)
    assert not (real / "old.txt").exists()
    assert [path.name for path in real.parent.iterdir()] == ["real"]
    assert not list(tmp_path.glob(".out*"))


def test_a_link_into_an_input_is_seen_through(tmp_path: Path) -> None:
    roles, link = three(tmp_path), tmp_path / "out"
    link.symlink_to(roles["base"] / "inside")
    before = relative(tmp_path)
    with pytest.raises(OutputError, match="overlaps the input"):
        gradfix.transport_checkpoint(**roles, mask="none", out=link)
    assert relative(tmp_path) == before


def test_modules_behind_an_encoder_go_along(tmp_path: Path) -> None:
    """sentence-transformers folders: modules.json names subfolders without which nothing loads."""
    roles = three(tmp_path)
    names = ["", "1_Pooling", "2_Dense", "../base", ".hidden", "3_Missing"]
    (roles["target"] / "modules.json").write_text(json.dumps([{"path": name} for name in names]))
    for name in ("1_Pooling", "2_Dense", ".hidden", "unnamed"):
        (roles["target"] / name).mkdir()
        (roles["target"] / name / "config.json").write_text("{}")
    (roles["target"] / "2_Dense" / "model.safetensors").write_bytes(b"small weights")
    (roles["target"] / "2_Dense" / "code.py").write_text("")
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    inside = {path for path in relative(tmp_path / "out") if "/" in path}
    assert inside == {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    gradfix.verify(tmp_path / "out")
    plain = tmp_path / "plain"
    (roles["target"] / "modules.json").write_text("[")
    gradfix.transport_checkpoint(**roles, mask="none", out=plain)
    weights = {path for path in relative(plain) if path.endswith(".safetensors")}
    assert {path: relative(plain)[path] for path in weights} == {
        path: relative(tmp_path / "out")[path] for path in weights
    }
