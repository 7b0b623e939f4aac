"""Write outputs so that they are either absent or complete.

Everything is written into a staging folder beside the output, flushed to disk, described by a manifest
that is written last, and renamed into place in one step. A lock keeps two writers apart. Inputs are never
touched."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import hash_file, holds
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.errors import CorruptInput, GradfixError, Locked, OutputError, UsageError
from gradfix.registry import unknown

MANIFEST = "gradfix.json"
JOURNAL = ".journal.jsonl"  # in a staging folder: how far an output got
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")
UMASK_MODE = 0o666
_HELD: ContextVar[frozenset[Path]] = ContextVar("locks held here", default=frozenset())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def staged_folder(out: Path, *, overwrite: bool = False, need_bytes: int = 0, key: str | None = None) -> Iterator[Path]:
    """A folder to write into; it becomes `out` when the block ends well and vanishes when it does not.

    With a `key`, an interrupted (not failed) run leaves the staging folder, and the next run with the same
    key gets it back to go on from."""
    out = _place(out)
    refuse_occupied(out, overwrite)
    make_parent(out)
    with locked(out):
        _finish_swap(out)
        refuse_occupied(out, overwrite)
        staging = _staging_path(out, key)
        _remove_stale(out, keep=staging)
        check_space(out.parent, need_bytes - _bytes_in(staging))
        try:
            staging.mkdir(exist_ok=True)
            yield staging
            for path in staging.rglob("*"):
                if path.is_file():
                    seal(path)
                elif path.is_dir():
                    _fsync_folder(path)
            (staging / JOURNAL).unlink(missing_ok=True)  # until here a killed run loses nothing
            _fsync_folder(staging)
            _swap(staging, out)
        except KeyboardInterrupt:
            if key is None:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, GradfixError):
                raise OutputError(f"cannot write {out}: {reason(error)}. Nothing was left behind.") from error
            raise


def _place(out: Path) -> Path:
    """Where a folder really is: what stands under a link is replaced there, and the link goes on to show it."""
    return Path(os.path.realpath(out))


def make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create {out.parent}: {reason(error)}. Choose another place.") from None


def reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return (error.strerror or str(error)).lower()


def refuse_occupied(out: Path, overwrite: bool) -> None:
    """Also asked at the start of a long run, so that it is not refused at its end."""
    if out.is_file():
        raise OutputError(f"{out} is a file; give a folder as --out.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise OutputError(f"{out} exists and is not empty. Choose another --out, or pass --overwrite to replace it.")


def refuse_odd_file(out: Path) -> None:
    """A file may be written anew or replace a file; renamed over a folder, a pipe or a device it would do harm."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give the name of a file.")
    if out.exists() and not out.is_file():
        raise OutputError(f"{out} is no regular file, and gradfix replaces files whole; give another name.")


def refuse_inside(out: Path, inputs: Iterable[object]) -> None:
    """An output that is, contains or lies in an input is refused; compared by inode, so links do not fool it.

    An input that is no path, such as votes in memory, is in nobody's way."""
    target, real = Path(os.path.abspath(out)), _place(out)
    ancestors = {_identity(place) for place in (target, *target.parents, *real.parents)} - {None}
    for path in (Path(given) for given in inputs if isinstance(given, str | os.PathLike)):
        if not os.path.exists(path):
            continue
        home = path if path.is_dir() else path.parent
        own = {_identity(path)} if path.is_file() else {_identity(home)}
        inside_out = _identity(target) is not None and _identity(target) in {
            _identity(parent) for parent in Path(os.path.realpath(path)).parents
        }
        if own & ancestors or inside_out:
            raise OutputError(
                f"output {out} is or overlaps the input {path}; inputs are never modified. Choose another --out."
            )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One writer at a time; the kernel drops the lock of a process that dies.

    A long run takes it before its first computation, and the write at its end finds it already held."""
    out = _place(out)
    lock = out.parent / f".{out.name}.gradfix.lock"
    if lock in _HELD.get():
        yield
        return
    descriptor = _take_lock(out, lock)
    token = _HELD.set(_HELD.get() | {lock})
    try:
        yield
    finally:
        _HELD.reset(token)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take_lock(out: Path, lock: Path) -> int:
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, UMASK_MODE)
        except OSError as error:
            raise OutputError(f"cannot write beside {out}: {reason(error)}. Choose another place.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise Locked(f"another gradfix process is writing {out}. Wait for it, or choose another --out.") from None
        # The last holder may have removed the file between our open and our lock: then it guards nothing.
        status = os.fstat(descriptor)
        if _identity(lock) == (status.st_dev, status.st_ino):
            return descriptor
        os.close(descriptor)


def _staging_path(out: Path, key: str | None) -> Path:
    label = hashlib.sha256(key.encode()).hexdigest()[:16] if key else f"{os.getpid()}-{os.urandom(4).hex()}"
    return out.parent / f".{out.name}.gradfix-{label}"


def _remove_stale(out: Path, keep: Path) -> None:
    """The lock is held, so any other staging folder of this output belongs to a dead process."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.gradfix-*"):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    """What an interrupted run has written already and needs no more room for."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_space(folder: Path, need: int) -> None:
    """Raise where the disk of a folder, made or not, has no room for so many bytes."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise OutputError(
            f"the disk of {folder} has {_size(free)} free, {_size(need)} are needed. Free some, or give an --out elsewhere."
        )


def _size(count: int) -> str:
    """Bytes for people, small numbers too."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _swap(staging: Path, out: Path) -> None:
    os.chmod(staging, 0o777 & ~_umask())
    if out.exists():
        old = out.parent / f".{out.name}.gradfix-old-{os.urandom(4).hex()}"
        os.rename(out, old)
        try:
            os.rename(staging, out)
        except OSError:
            os.rename(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(staging, out)
    _settle(out.parent)


def _finish_swap(out: Path) -> None:
    """A writer that died between the two renames of an overwrite left the old folder aside: put it back."""
    aside = sorted(out.parent.glob(f".{glob.escape(out.name)}.gradfix-old-*"))
    if aside and not out.exists():
        os.rename(aside[0], out)


def seal(path: Path) -> None:
    """Ordinary permissions, and on disk before the rename: safetensors does neither."""
    os.chmod(path, UMASK_MODE & ~_umask())
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """Make a finished rename durable; the output is complete by then, so a refusal is no failure."""
    with contextlib.suppress(OSError):
        _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, complete or absent."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with _staged_file(Path(path)) as staging, SafetensorsWriter(staging, infos, metadata) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
        writer.close()


def write_text(path: Path, text: str) -> None:
    """A small file, complete or absent."""
    with _staged_file(Path(path)) as staging:
        staging.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _staged_file(path: Path) -> Iterator[Path]:
    """A file to write; it becomes `path` when the block ends well and vanishes when it does not."""
    refuse_odd_file(path)
    make_parent(path)
    staging = path.with_name(f".{path.name}.gradfix-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with open(staging, "xb") as held:
            fcntl.flock(held.fileno(), fcntl.LOCK_EX)
            _remove_dead_files(path)
            yield staging
            seal(staging)
            os.replace(staging, path)
            _settle(path.parent)
    except OSError as error:
        if isinstance(error, GradfixError):
            raise
        raise OutputError(f"cannot write {path}: {reason(error)}. Choose another place.") from error
    finally:
        staging.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a file of intermediate state and what killed writers of it left."""
    path.unlink(missing_ok=True)
    _remove_dead_files(path)


def _remove_dead_files(path: Path) -> None:
    """Staging files whose writer was killed: a living writer holds a lock on its own."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.gradfix-*-*"):
        try:
            with open(stale, "rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink()
        except OSError:
            continue  # somebody else's, or already gone


def write_manifest(folder: Path, content: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """The last file of a folder: what it holds, with the hash of every other file."""
    outputs = dict(hashes)
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative not in outputs and relative not in (MANIFEST, JOURNAL):
            outputs[relative] = hash_file(path)
    text = json.dumps({**content, "outputs": dict(sorted(outputs.items()))}, indent=1, default=str)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CorruptInput(f"{folder} has no {MANIFEST}: it was not written by gradfix, or not completely.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content["outputs"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptInput(f"{path} is not a readable manifest.") from None
    return dict(content)


def verify(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Check the manifest and every hash; raises CorruptInput naming the first file that does not hold."""
    home = Path(folder)
    content = read_manifest(home)
    for relative, expected in content["outputs"].items():
        path = home / relative
        if os.path.isabs(relative) or ".." in Path(relative).parts:
            raise CorruptInput(f"{home / MANIFEST} names a file outside the folder ({relative!r}); refused.")
        if not os.path.isfile(path):  # unlike Path.is_file it also answers for names no system can hold
            raise CorruptInput(f"{path} is missing; the manifest lists it.")
        if not holds(path, str(expected)):
            raise CorruptInput(f"{path} has changed since it was written: its hash does not match the manifest.")
    for path in sorted(home.rglob("*")):
        relative = path.relative_to(home).as_posix()
        if path.is_file() and path.name.endswith(WEIGHT_SUFFIXES) and relative not in content["outputs"]:
            raise CorruptInput(f"{path} is not in the manifest: weights were added after the folder was written.")
    return content


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by the name users write: fp32, bf16, float16 ..."""
    names = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
             "fp16": torch.float16, "float16": torch.float16, "fp64": torch.float64, "float64": torch.float64}  # fmt: skip
    if name not in names:
        raise UsageError(unknown("dtype", name, list(names)))
    return names[name]
