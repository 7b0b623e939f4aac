"""Writers: locks, full disks, leftovers of the dead, and memory that runs out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gradfix
from gradfix.checkpoints import write
from gradfix.errors import Locked, OutputError
from gradfix.vectors.signvotes import SignVotes
from tests.reliability.world import World, hashes, left_behind, say
from tests.torture.crashes import relative, three

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


@contextlib.contextmanager
def held_elsewhere(out: Path) -> Iterator[None]:
    """The lock of this output as another process would hold it."""
    lock = out.parent / f".{out.name}.gradfix.lock"
    with open(lock, "w", encoding="ascii") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
    lock.unlink()


WRITERS: dict[str, dict[str, object]] = {
    "transport": {},
    "transport --overwrite": {"overwrite": True},
    "vote": {},
    "finetune": {"target": None, "shots": None, "steps": 1},
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_held_lock_is_code_seven(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The second writer is told before it opens a model, so it loses neither a vote nor a training."""
    monkeypatch.setattr("gradfix.commands.setting.Prepared.open", lambda *_, **__: pytest.fail("worked"))
    command = name.split(maxsplit=1)[0]
    options = {**WRITERS[name], **({"model": world.base} if command == "finetune" else {})}
    before = hashes(world.home)
    with held_elsewhere(world.out):
        said = say(world.arguments(command, **options))
    assert said.code == Locked.exit_code == 7
    assert len(said.err.splitlines()) == 1
    assert f"another gradfix process is writing {world.out}" in said.err and "choose another --out" in said.err
    assert left_behind(world.home, before) == []


def test_merge_is_told_of_another_writer_too(world: World) -> None:
    recipe = world.home / "recipe.yaml"
    vectors = [{"base": str(world.base), "tuned": str(world.tuned)}]
    content = {"target": str(world.target), "vectors": vectors, "method": "task_arithmetic"}
    recipe.write_text(json.dumps(content))
    before = hashes(world.home)
    with held_elsewhere(world.out):
        said = say(["merge", str(recipe), "--out", str(world.out)])
    assert said.code == 7 and "another gradfix process is writing" in said.err
    assert left_behind(world.home, before) == []


def test_a_lock_is_taken_once_by_its_holder_and_never_by_another_thread(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def rival() -> str:
        with pytest.raises(Locked), write.locked(out):
            pass
        return "refused"

    with write.locked(out), ThreadPoolExecutor(1) as other:
        with write.locked(tmp_path / "x" / ".." / "out"):
            assert other.submit(rival).result() == "refused"
        assert other.submit(rival).result() == "refused"
    with write.locked(out):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_known_before_the_first_byte(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hashes(world.home)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    recipe = world.home / "recipe.yaml"
    vectors = [{"base": str(world.base), "tuned": str(world.tuned)}]
    recipe.write_text(json.dumps({"target": str(world.target), "vectors": vectors, "method": "task_arithmetic"}))
    said = say(["merge", str(recipe), "--out", str(world.out)])
    assert said.code == 8 and "10 bytes free" in said.err and "1.1 MiB are needed" in said.err
    assert set(left_behind(world.home, before)) == {str(recipe)}


def test_a_writer_killed_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    """The old output is put back by the next run, whether or not it may overwrite."""
    roles = three(tmp_path)
    out = tmp_path / "place" / "out"
    gradfix.transport_checkpoint(**roles, mask="none", alpha=0.25, out=out)
    old = relative(out)
    out.rename(tmp_path / "place" / ".out.gradfix-old-0123")
    with pytest.raises(OutputError, match="--overwrite"):
        gradfix.transport_checkpoint(**roles, mask="none", out=out)
    assert relative(out) == old
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_stale_staging_is_cleaned_and_other_outputs_are_not(tmp_path: Path) -> None:
    roles = three(tmp_path)
    place = tmp_path / "place"
    for name in (".o[1].gradfix-123-ab", ".other.gradfix-123-ab"):
        (place / name).mkdir(parents=True)
    gradfix.transport_checkpoint(**roles, mask="none", out=place / "o[1]")
    assert sorted(path.name for path in place.iterdir()) == [".other.gradfix-123-ab", "o[1]"]
    (place / ".v.safetensors.gradfix-1-a").write_bytes(b"half")
    SignVotes({"w": torch.ones(3, dtype=torch.int8)}, 1).save(place / "v.safetensors")
    assert not (place / ".v.safetensors.gradfix-1-a").exists()


def _small_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    from gradfix.tasks.zero_shot import ZeroShotBound

    real = ZeroShotBound.logits

    def logits(self, model, batch):
        if len(batch["labels"]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, batch)

    monkeypatch.setattr(ZeroShotBound, "logits", logits)


def test_out_of_memory_is_an_error_unless_the_batch_may_shrink(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_memory(monkeypatch, 2)
    before = hashes(world.home)
    words = {"out": world.home / "votes.safetensors", "batch_size": 16}
    said = say(world.arguments("vote", **words))
    assert said.code == 8
    assert "out of memory" in said.err and "--auto-batch" in said.err
    assert left_behind(world.home, before) == []


def test_the_batch_halves_only_when_allowed_and_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    small = world.home / "small.safetensors"
    assert say(world.arguments("vote", out=small, batch_size=2)).code == 0
    _small_memory(monkeypatch, 2)
    out = world.home / "votes.safetensors"
    said = say(world.arguments("vote", out=out, batch_size=16, auto_batch=True))
    assert said.code == 0 and "batch size 16 ran out of memory; 2 was used" in said.err
    assert SignVotes.load(out).origin["settings"]["batch_size"] == 2
    assert out.read_bytes() == small.read_bytes()


def test_a_flush_that_fails_on_the_way_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of a failed write once; the flush at the end would say that all is well."""
    answers = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def flush(_: int) -> None:
        error = next(answers, None)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "fdatasync", flush)
    monkeypatch.setattr("gradfix.checkpoints.safetensors_writer.FLUSH_BYTES", 1)
    tensors = {f"w{number}": torch.ones(9) for number in range(5)}
    real = write.SafetensorsWriter.write
    monkeypatch.setattr(write.SafetensorsWriter, "write", lambda self, piece: (real(self, piece), time.sleep(0.02))[0])
    with pytest.raises(OutputError, match="input/output error. Choose another place"):
        write.save_tensors(tmp_path / "w.safetensors", tensors, {})
    assert list(tmp_path.iterdir()) == []
