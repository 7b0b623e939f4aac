"""The catalogue through the command line: one line, the right exit code, inputs untouched, nothing written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reliability.oddities import FAULTS
from tests.reliability.world import World, hashes, left_behind, say


@pytest.mark.parametrize("name", FAULTS)
def test_fault(world: World, name: str) -> None:
    fault = FAULTS[name]
    words = fault.breaks(world)
    before = hashes(world.home)
    said = say(words)
    lines = [line for line in said.err.splitlines() if not line.startswith("note:")]
    assert said.code == fault.code, said
    assert len(lines) == 1 and lines[0].startswith("gradfix: "), said.err
    assert re.search(fault.says, lines[0]), lines[0]
    assert "Traceback" not in said.err + said.out
    assert {path: digest for path, digest in hashes(world.home).items() if path in before} == before
    assert left_behind(world.home, before) == []


def test_the_same_commands_work_when_nothing_is_wrong(world: World) -> None:
    """A fault test proves nothing when its command fails anyway."""
    before = hashes(world.home)
    assert say(world.arguments()).code == 0
    assert say(world.arguments("vote", out=world.home / "votes.safetensors")).code == 0
    assert say(world.arguments("select", target=None, out=world.home / "ids.json")).code == 0
    assert say(["verify", str(world.out)]).code == 0
    assert {path: digest for path, digest in hashes(world.home).items() if path in before} == before
    top = {Path(path).relative_to(world.home).parts[0] for path in left_behind(world.home, before)}
    assert top == {"out", "votes.safetensors", "ids.json"}


@pytest.mark.parametrize(
    "name", ["x\\[/red]", "[bold]x", "\x1b[31mred", "line\nbreak", b"\xff".decode("utf-8", "surrogateescape")]
)
def test_names_are_shown_as_text(tmp_path: Path, name: str) -> None:
    """A file's name is no markup, no escape sequence and no second line."""
    said = say(["verify", str(tmp_path / name)])
    assert said.code == 3
    assert len(said.err.splitlines()) == 1 and "\x1b" not in said.err
    assert "was not written by gradfix" in said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["transprot"], "No such command 'transprot'"),
        (["vote", "--shotz", "3"], "No such option: --shotz"),
        (["vote"], "is missing"),
        (["vote", "--data", "x", "--task", "zero-shot", "--target", "y", "--out", "z", "--shots", "many"], "--shots"),
    ],
)
def test_usage_errors_are_one_line_with_code_two(words: list[str], says: str) -> None:
    said = say(words)
    assert said.code == 2
    assert len(said.err.splitlines()) == 1 and says in said.err
