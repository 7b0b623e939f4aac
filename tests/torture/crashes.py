"""Writers that are killed, run out of disk or meet rivals: the output is absent or complete, inputs stay as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradfix
from gradfix.checkpoints import safetensors_writer
from gradfix.checkpoints.write import save_tensors, write_text
from gradfix.errors import GradfixError
from tests.reliability.world import hashes
from tests.torture.children import Outcome, Series, finish, start
from tests.torture.faults import Counter, die, disk_full, install
from tests.torture.inputs import small_folder

Work = Callable[[], object]
CHILD_LIMIT = 60.0


def three(home: Path) -> dict[str, Path]:
    """Base and fine-tune in one file, a target in three shards."""
    small_folder(home / "base", 0)
    small_folder(home / "tuned", 1)
    small_folder(home / "target", 2, shards=3)
    return {role: home / role for role in ("base", "tuned", "target")}


def transport_work(roles: dict[str, Path], out: Path, *, overwrite: bool = False, alpha: float = 0.5) -> Work:
    def work() -> None:
        gradfix.transport_checkpoint(**roles, mask="none", alpha=alpha, out=out, overwrite=overwrite)

    return work


def at_operation(number: int, action: Callable[[], None], work: Work) -> Work:
    """The same work, with something happening before its N-th operation on the disk."""

    def disturbed() -> None:
        install(Counter(number, action))
        work()

    return disturbed


def operations(work: Work) -> int:
    """How many operations the work takes; counted in a child of its own."""
    reader, writer = os.pipe()
    counter = Counter(0, lambda: None)

    def counted() -> None:
        install(counter)
        work()
        os.write(writer, str(counter.seen).encode())

    code = finish(start(counted), CHILD_LIMIT)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    if code != 0:
        raise RuntimeError(f"the undisturbed work exits with {code}")
    return int(text)


def relative(folder: Path) -> dict[str, str]:
    return {os.path.relpath(path, folder): digest for path, digest in hashes(folder).items()}


def kills_mid_write(home: Path, count: int) -> Series:
    """SIGKILL before each operation of a transport in turn, into a new folder and over an old one."""
    began = time.time()
    roles = three(home / "writes")
    inputs = hashes(*roles.values())
    place = home / "writes" / "place"
    place.mkdir()
    out = place / "out"
    transport_work(roles, home / "writes" / "new", alpha=0.5)()
    transport_work(roles, home / "writes" / "old", alpha=0.25)()
    new, old = relative(home / "writes" / "new"), relative(home / "writes" / "old")
    plain = operations(transport_work(roles, home / "writes" / "counted"))
    outcomes: list[Outcome] = []
    number = 0
    while len(outcomes) < count:
        number += 1
        over = number % 2 == 0
        shutil.rmtree(place)
        place.mkdir()
        if over:
            shutil.copytree(home / "writes" / "old", out)
        work = transport_work(roles, out, overwrite=over)
        at = (number // 2) % (plain + 3) + 1
        code = finish(start(at_operation(at, die, work)), CHILD_LIMIT)
        if code == 0:
            continue  # it finished before that operation
        outcomes.append(_after_write_kill(code, out, work, (new, old) if over else (new,), new))
        if hashes(*roles.values()) != inputs:
            outcomes.append(Outcome("wrong", "an input changed"))
    return Series.of("kills mid-write", outcomes, began)


def _after_write_kill(
    code: int, out: Path, work: Work, allowed: tuple[dict[str, str], ...], new: dict[str, str]
) -> Outcome:
    if code != -9:
        return Outcome("wrong", f"exit {code} instead of the kill")
    if out.exists():
        if relative(out) not in allowed:
            return Outcome("wrong", "the output is neither the old nor the new one")
        gradfix.verify(out)
        if relative(out) == new:
            return Outcome("same", "it was complete")
    code = finish(start(work), CHILD_LIMIT)
    if code != 0 or relative(out) != new:
        return Outcome("wrong", f"the rerun exits with {code} or gives other bits")
    left = [path.name for path in out.parent.iterdir() if path != out]
    return Outcome("wrong", f"left {left}") if left else Outcome("same")


def failing_writes(home: Path) -> Series:
    """The N-th operation fails with a full disk, N = 1, 2, ... until nothing fails, for every kind of output."""
    began = time.time()
    roles = three(home / "full")
    inputs = hashes(*roles.values())
    place = home / "full" / "place"
    kinds: dict[str, Work] = {
        "transport": transport_work(roles, place / "out"),
        "overwrite": transport_work(roles, place / "out", overwrite=True),
        "flushed on the way": _eager(transport_work(roles, place / "out")),
        "votes": lambda: save_tensors(place / "v.safetensors", {"w": torch.ones(9, dtype=torch.int8)}, {}),
        "text": lambda: write_text(place / "results.json", "{}\n" * 1000),
    }
    outcomes: list[Outcome] = []
    for kind, work in kinds.items():
        _fresh(place, roles, kind)
        total = operations(work)
        whole = relative(place)
        for number in range(1, total + 1):
            before = _fresh(place, roles, kind)
            code = finish(start(at_operation(number, disk_full, work)), CHILD_LIMIT)
            # An operation whose failure does no harm (a folder that is already there) may be survived.
            expected = {8: before, 0: whole}.get(code)
            if expected is None or relative(place) != expected:
                outcomes.append(Outcome("wrong", f"{kind} {number}: exit {code}, left {sorted(relative(place))}"))
            elif hashes(*roles.values()) != inputs:
                outcomes.append(Outcome("wrong", f"{kind} {number}: an input changed"))
            else:
                outcomes.append(Outcome("refused" if code else "same"))
    return Series.of("failing writes", outcomes, began)


def _eager(work: Work) -> Work:
    """The same work, with the disk asked to begin after every piece and not after many megabytes."""

    def eager() -> None:
        safetensors_writer.FLUSH_BYTES = 1
        work()

    return eager


def _fresh(place: Path, roles: dict[str, Path], kind: str) -> dict[str, str]:
    """An empty place, or one with an older output in it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if kind == "overwrite":
        transport_work(roles, place / "out", alpha=0.25)()
    return relative(place)


def rival_writers(home: Path, rounds: int) -> Series:
    """Three processes write one output at once: one wins, the others are told so, and the output is whole."""
    began = time.time()
    roles = three(home / "rivals")
    out = home / "rivals" / "place" / "out"
    outcomes: list[Outcome] = []
    for number in range(rounds):
        over = number % 2 == 1
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        children = [start(transport_work(roles, out, overwrite=over)) for _ in range(3)]
        codes = sorted(finish(child, CHILD_LIMIT) for child in children)
        try:
            gradfix.verify(out)
            whole = True
        except GradfixError:
            whole = False
        allowed = {0, 7} if over else {0, 7, 8}
        winners = codes.count(0) >= 1 if over else codes.count(0) == 1
        left = [path.name for path in out.parent.iterdir() if path != out]
        good = whole and winners and set(codes) <= allowed and not left
        outcomes.append(Outcome("same" if good else "wrong", f"exits {codes}, whole {whole}, left {left}"))
    return Series.of("rival writers", outcomes, began)


def full_disk(home: Path) -> Series:
    """A real file system that is too small, grown until the output fits; with and without the check for space."""
    began = time.time()
    roles = three(home / "tiny")
    mount = home / "tiny" / "disk"
    mount.mkdir()
    outcomes: list[Outcome] = []
    for blind in (False, True):
        for kib in [*range(4, 44, 4), 2048]:
            options = ["-o", f"size={kib}k,mode=755"]
            done = subprocess.run(
                ["mount", "-t", "tmpfs", *options, "none", str(mount)], capture_output=True, check=False
            )
            if done.returncode:
                note = "skipped: this user may not mount a tmpfs"
                return Series("full disk", {"cases": 0}, [], round(time.time() - began, 2), note)
            try:
                outcomes.append(_on_disk(mount, roles, blind))
            finally:
                subprocess.run(["umount", str(mount)], check=True)
    return Series.of("full disk", outcomes, began)


def _on_disk(mount: Path, roles: dict[str, Path], blind: bool) -> Outcome:
    work = transport_work(roles, mount / "out")

    def unaware() -> None:
        shutil.disk_usage = lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)  # type: ignore[assignment, attr-defined]
        work()

    code = finish(start(unaware if blind else work), CHILD_LIMIT)
    if code == 0:
        gradfix.verify(mount / "out")
        return Outcome("same")
    left = sorted(path.name for path in mount.iterdir())
    return Outcome("refused", "8") if code == 8 and not left else Outcome("wrong", f"exit {code}, left {left}")
