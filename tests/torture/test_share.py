"""A share of the fault series in every test run, and proof that the harness notices what it is there to notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradfix.errors import CorruptInput
from tests.torture.__main__ import FULL
from tests.torture.children import BAD, Outcome, Series, finish, run_cases, start
from tests.torture.kills import Ledger

ROOT = Path(__file__).parents[2]
SHARE = 0.01


def test_a_share_of_the_series_is_clean(tmp_path: Path) -> None:
    """In a process of its own: forking wants a parent that has computed nothing yet."""
    path = tmp_path / "torture.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--share", str(SHARE), "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts.pop("bad") == 0
    assert counts == json.loads(path.read_text())["counts"]
    for name, cases in FULL.items():
        assert counts[name]["cases"] >= SHARE * cases // 1
    assert counts["failing writes"]["refused"] > 50
    assert not set().union(*counts.values()) & set(BAD)


def _crash() -> tuple[str, str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return "same", ""


def _sleep() -> tuple[str, str]:
    time.sleep(30)
    return "same", ""


def _raise() -> tuple[str, str]:
    raise KeyError("x")


def _refuse() -> tuple[str, str]:
    raise CorruptInput("file x is damaged.")


def _ramble() -> tuple[str, str]:
    raise CorruptInput("two\nlines")


def _fine() -> tuple[str, str]:
    return "same", ""


def test_every_kind_of_failure_is_told_apart() -> None:
    cases = [_fine, _crash, _refuse, _sleep, _raise, _ramble, _fine]
    found = run_cases(cases, limit=1.0)
    assert [outcome.status for outcome in found] == [
        "same", "signal", "refused", "hang", "traceback", "wrong", "same",
    ]  # fmt: skip
    assert found[1] == Outcome("signal", "SIGKILL")
    assert [outcome.good for outcome in found] == [True, False, True, False, False, False, True]
    series = Series.of("many", found * 10, began=0.0)
    assert series.bad == 40 and len(series.faults) == 20  # all are counted, some are shown


def test_a_writer_that_writes_in_place_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every other tool does: without staging, a kill leaves half an output under the final name."""
    import contextlib
    from collections.abc import Iterator

    import gradfix.stream.checkpoint
    from tests.torture import crashes

    @contextlib.contextmanager
    def in_place(out: Path, **_: object) -> Iterator[Path]:
        out.mkdir(exist_ok=True)
        yield out

    monkeypatch.setattr(gradfix.stream.checkpoint, "staged_folder", in_place)
    series = crashes.kills_mid_write(tmp_path, 12)
    assert series.counts.get("wrong", 0) > 0


def test_children_report_exit_codes() -> None:
    assert finish(start(lambda: None)) == 0
    assert finish(start(_refuse)) == 3
    assert finish(start(_crash)) == -signal.SIGKILL
    assert finish(start(_raise)) == 99


def test_lost_and_changed_units_are_noticed(tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    ledger = Ledger(units, tmp_path / "begun")
    ledger.open()
    (units / "naive.json").write_text("1")
    ledger.begun.write_bytes(b"..")
    assert ledger.settle(allowed=1) == ""
    assert ledger.settle(allowed=0) == "1 units were begun and are not on disk"
    ledger.open()
    (units / "naive.json").write_text("2")
    assert ledger.settle(allowed=1) == "a finished unit is gone or has changed"
