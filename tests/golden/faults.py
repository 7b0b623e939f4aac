"""Typical mistakes: the exit code, and a phrase of the one line that stderr shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.golden.command import say
from tests.golden.folders import Words
from tests.golden.worlds import copy_of, rewrite, rows, save_texts

DENSE = "bert.encoder.layer.0.output.dense.weight"
Breaks = Callable[[Path], Words]
FAULTS: dict[str, tuple[str, Breaks]] = {}


def fault(name: str, says: str) -> Callable[[Breaks], Breaks]:
    def add(breaks: Breaks) -> Breaks:
        FAULTS[name] = (says, breaks)
        return breaks

    return add


def transport(home: Path, *more: object, **changes: object) -> Words:
    options = {"base": home / "base", "tuned": home / "tuned", "target": home / "target", "data": home / "data",
               "task": "classification", "shots": 2, "mask": "none", "alpha": 0.5, "out": home / "out"}  # fmt: skip
    words = [word for name, value in (options | changes).items() for word in (f"--{name}", value)]
    return ("transport", *words, "--no-check", *more)


def faults(home: Path, place: Path) -> dict[str, Any]:
    """Each fault in a copy of the drawn world. A phrase that is missing is shown as the line that came instead."""
    found = {}
    for number, (name, (phrase, breaks)) in enumerate(FAULTS.items()):
        world = copy_of(home, place / str(number))
        said = say(*breaks(world))
        first = next(iter(said.err.splitlines()), "").replace(str(world), "WORLD")
        flat = " ".join(said.err.split())
        found[name] = {"code": said.code, "says": phrase if phrase in flat else first}
    return found


@fault("fine-tune lacks a tensor", "lacks 1 tensors of its base")
def _(home: Path) -> Words:
    rewrite(home / "tuned", lambda state: state.pop(DENSE))
    return transport(home)


@fault("target lacks a tensor", "lacks 1 tensors of")
def _(home: Path) -> Words:
    rewrite(home / "target", lambda state: state.pop(DENSE))
    return transport(home)


@fault("shapes differ", f"'{DENSE}' is [16, 24]")
def _(home: Path) -> Words:
    rewrite(home / "target", lambda state: state.update({DENSE: torch.zeros(16, 23)}))
    return transport(home)


@fault("fine-tune is its base", "the task vector is zero")
def _(home: Path) -> Words:
    return transport(home, tuned=home / "base")


@fault("a head only the fine-tune has", "--head skip")
def _(home: Path) -> Words:
    rewrite(home / "tuned", lambda state: state.update({"extra.weight": torch.ones(2, 2)}))
    return transport(home)


@fault("truncated weights", "safetensors file")
def _(home: Path) -> Words:
    path = home / "tuned" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return transport(home)


@fault("NaN in the weights", "holds NaN or Inf")
def _(home: Path) -> Words:
    rewrite(home / "tuned", lambda state: state[DENSE].fill_(float("nan")))
    recipe = {"target": str(home / "target"), "method": "task_arithmetic",
              "vectors": [{"base": str(home / "base"), "tuned": str(home / "tuned")}]}  # fmt: skip
    (home / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return ("merge", home / "recipe.yaml", "--out", home / "out")


@fault("no such folder", "nowhere")
def _(home: Path) -> Words:
    return transport(home, base=home / "nowhere")


@fault("unknown mask", "Did you mean 'agree'?")
def _(home: Path) -> Words:
    return transport(home, mask="agre")


@fault("unknown option", "--alpa")
def _(home: Path) -> Words:
    return transport(home, "--alpa", 1)


@fault("value of the wrong kind", "--shots")
def _(home: Path) -> Words:
    return transport(home, shots="few")


@fault("unknown task", "no task called 'classify'")
def _(home: Path) -> Words:
    return transport(home, task="classify")


@fault("unknown method of compare", "no method called 'gradfixx'")
def _(home: Path) -> Words:
    words = dict(zip(transport(home)[1:-1:2], transport(home)[2:-1:2], strict=True))
    kept = [w for key in ("--base", "--tuned", "--target", "--data", "--task") for w in (key, words[key])]
    return ("compare", *kept, "--methods", "gradfixx")


@fault("unknown merge method", "no merge called 'tie'")
def _(home: Path) -> Words:
    recipe = {"target": str(home / "target"), "method": "tie",
              "vectors": [{"base": str(home / "base"), "tuned": str(home / "tuned")}]}  # fmt: skip
    (home / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return ("merge", home / "recipe.yaml", "--out", home / "out")


@fault("output is occupied", "is not empty")
def _(home: Path) -> Words:
    (home / "out").mkdir()
    (home / "out" / "mine.txt").write_text("keep me", encoding="utf-8")
    return transport(home)


@fault("no such column", "sentiment")
def _(home: Path) -> Words:
    return transport(home, "--label-column", "sentiment")


@fault("too few examples of a class", "--allow-fewer")
def _(home: Path) -> Words:
    save_texts(home / "data", train=rows(9, 1))
    return transport(home, shots=8)


@fault("votes of other weights", "Vote again")
def _(home: Path) -> Words:
    votes = home / "votes.safetensors"
    made = say("vote", "--target", home / "older", "--data", home / "data", "--task", "classification",
               "--shots", 1, "--out", votes, "--quiet")  # fmt: skip
    assert made.code == 0, made.err
    return transport(home, mask="agree", votes=votes)


@fault("changed after writing", "has changed since it was written")
def _(home: Path) -> Words:
    made = say(*transport(home), "--quiet")
    assert made.code == 0, made.err
    rewrite(home / "out", lambda state: state[DENSE].fill_(1))
    return ("verify", home / "out")
