"""Walk one cell of the table: type the command, load what it wrote with the user's own tool, judge.

Builds are shared by all tests of a run, across worker processes: the first that needs a kind makes it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.journeys.commands import COMMANDS, REFUSALS, Journey, Outcome, reported, typed
from tests.journeys.expected import Refusal
from tests.journeys.kinds import load_all

POINTS = 0.1  # how far reported and measured accuracy may lie apart
SECONDS = 10.0  # "the first seconds" on a busy machine
CHANCE = 100 / 3
SHARE = 7  # one cell in so many by default; JOURNEYS=all walks every one
WRITES = ("transport", "best", "few_shot", "naive", "out-lora", "finetune", "merge")
CARRIES = ("best", "naive", "merge")  # between related releases these must do better than chance


@dataclass(frozen=True)
class Cell:
    """What became of a command on a kind: "works", "refused" or "broken", and why."""

    state: str
    why: str = ""


def cells() -> list[tuple[str, str]]:
    """The cells to walk: all, or a spread of them in which every kind and every command comes."""
    everything = [(kind, command) for kind in load_all() for command in COMMANDS]
    if os.environ.get("JOURNEYS") == "all":
        return everything
    kinds, commands = list(load_all()), list(COMMANDS)
    return [(k, c) for k, c in everything if (kinds.index(k) + commands.index(c)) % SHARE == 0]


def built(name: str, root: Path) -> Path:
    """The kind's folders, made once."""
    root.mkdir(parents=True, exist_ok=True)
    home = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            home.mkdir()  # made where it stays: adapters name their base by its path
            try:
                load_all()[name].make(home)
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)
                raise
    return home


def walk(name: str, command: str, root: Path, outputs: Path) -> Cell:
    """Type the command on the kind and judge what came of it."""
    journey = Journey(load_all()[name], built(name, root), outputs)
    outcome = COMMANDS[command](journey)
    if outcome.code == 0:
        return _worked(journey, command, outcome)
    return _refused(outcome)


def _refused(outcome: Outcome) -> Cell:
    message = outcome.message.removeprefix("gradfix:").strip()
    if outcome.code not in REFUSALS or "Traceback" in outcome.printed:
        return Cell("broken", f"ended with {outcome.code}: {message}")
    if outcome.seconds > SECONDS:
        return Cell("broken", f"refused after {outcome.seconds:.0f} seconds: {message}")
    return Cell("refused", message)


def _worked(journey: Journey, command: str, outcome: Outcome) -> Cell:
    if command == "inspect":
        plan = outcome.report["plan"]
        return Cell("works") if plan and plan["transported"] else Cell("broken", "; ".join(outcome.report["notes"]))
    if command in WRITES and typed("verify", outcome.out).code:
        return Cell("broken", "the written folder does not verify")
    said = reported(command, outcome)
    if said is None:
        return Cell("broken", "no accuracy was reported")
    try:
        untuned = "base" if command in ("evaluate", "finetune") else "target"
        measured = journey.score(_scored(journey, command, outcome), untuned)
    except Exception as error:  # whatever the user's own tool raises: the output does not load
        return Cell("broken", f"{said:.2f} was reported, but the output does not load: {type(error).__name__}: {error}")
    if abs(said - measured) > POINTS:
        return Cell("broken", f"{said:.2f} was reported, but plain code measures {measured:.2f}")
    if command in CARRIES and measured < CHANCE + 10:
        return Cell("broken", f"the fine-tune did not arrive: {measured:.2f} %")
    return Cell("works")


def _scored(journey: Journey, command: str, outcome: Outcome) -> Path:
    """The folder whose accuracy the command reported."""
    if command == "evaluate":
        return journey.tuned
    if command == "compare":  # what ships is what was compared
        shipped = COMMANDS["naive"](journey)
        assert shipped.out is not None, shipped.message
        return shipped.out
    assert outcome.out is not None
    return outcome.out


def disagreement(found: Cell, wanted: Refusal | None) -> str:
    """Why a cell is not as the table says; empty when it is."""
    if wanted is None:
        return "" if found.state == "works" else f"should work, but is {found.state}: {found.why}"
    if found.state != "refused":
        return f"should be refused ({wanted.why}), but {found.state} {found.why}"
    return "" if re.search(wanted.says, found.why) else f"refused for another reason: {found.why}"
