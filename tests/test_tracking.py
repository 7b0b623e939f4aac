"""Trackers: TensorBoard reads back what was sent; the others get the calls they expect; a missing one is named."""

from __future__ import annotations

import sys
import types

import pytest

from gradfix.cli import run
from tests.stage import setup
from tests.test_init_push import DRY


def results():
    from gradfix.methods.results import Results
    from tests.test_results import BASE

    curve = {
        "pair": None,
        "method": "gradfix",
        "shots": 5,
        "seed": 0,
        "points": [(0.0, 0.4), (0.25, 0.6)],
        "best": 0.25,
    }
    return Results.build(BASE, versions={"gradfix": "0"}, curves=[curve])


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gradfix.report.tracking import track

    track(results(), f"tensorboard:{tmp_path}")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    accuracy = events.Scalars("accuracy/zero_shot")
    assert [(point.step, point.value) for point in accuracy] == [(5, 40.0)]
    curve = events.Scalars("alpha_curve/gradfix/5/0")
    assert [(point.step, round(point.value, 6)) for point in curve] == [(0, 0.4), (250, 0.6)]
    assert "verdict/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_get_runs_and_steps(name, monkeypatch):
    from gradfix.report import tracking

    log = []
    client = types.SimpleNamespace(
        init=lambda **options: log.append(("init", options["project"])),
        log=lambda values, step: log.append((step, values)),
        finish=lambda: log.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setattr(tracking, "find_spec", lambda package: True)
    tracking.track(results(), f"{name}:project")
    assert log[0] == ("init", "project") and log[-1] == "finish"
    steps = [step for step, _ in log[1:-1]]
    assert steps == sorted(set(steps))
    assert dict(log[1:-1])[5]["accuracy/fine_tuned"] == 90.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tensorbord:x", "Did you mean 'tensorboard'?"),
        ("tensorboard", "needs a folder"),
        ("trackio:x", "pip install trackio"),
    ],
)
def test_a_tracker_is_checked_before_the_work(spec, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup("bert-zero-shot", tmp_path)
    monkeypatch.setattr("gradfix.report.tracking.find_spec", lambda package: None if package == "trackio" else True)
    assert run(["compare", *DRY["compare"].split(), "--track", spec]) == 2
    assert message in capsys.readouterr().err
