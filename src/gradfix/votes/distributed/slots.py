"""Partial votes of processes that go in step: all of them must go on from the same step, or none.

Every process keeps its last two partial votes in two files by turns. A kill can catch some processes before and
some after a save, but never two saves apart, so one step is in a file of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradfix.checkpoints.safetensors_file import SafetensorsFile
from gradfix.errors import CorruptInput
from gradfix.system.processes import Group, together
from gradfix.votes.tally import Tally
from gradfix.votes.resume import SAVE_EVERY_SECONDS, Shelf, load_partial, stranger


class Slots(Shelf):
    """Two files of this process; when to save and what to go on from is decided by all."""

    def __init__(self, group: Group, paths: Sequence[Path], every: float | None = None) -> None:
        super().__init__(paths[0], SAVE_EVERY_SECONDS if every is None else every)
        self.group, self.paths = group, list(paths)

    def load(self, tally: Tally, key: str, bad: list[str]) -> tuple[int, str]:
        """The latest step that every process has; nothing where there is none."""
        held: dict[int, Path] = {}
        with together(self.group):
            for path in self.paths:
                if path.is_file():
                    held[_steps(path, key)] = path
        common = set.intersection(*map(set, self.group.gather(list(held))))
        found: tuple[int, str] = (0, "")
        with together(self.group):
            if common:
                chosen = held[max(common)]
                found = load_partial(chosen, tally, key, bad)
                self._turn(chosen)
        return found

    def due(self) -> bool:
        leads: bool = self.group.gather(super().due())[0]
        return leads

    def save(self, tally: Tally, key: str, done: int, chain: str, bad: list[str]) -> None:
        super().save(tally, key, done, chain, bad)
        self._turn(self.path)

    def _turn(self, used: Path) -> None:
        """The next save goes to the other file."""
        self.path = next(path for path in self.paths if path != used)


def _steps(path: Path, key: str) -> int:
    """How many steps a partial vote holds; that of another vote is refused."""
    about = SafetensorsFile(path).metadata
    if about.get("format") != "gradfix.partial" or about.get("key") != key:
        raise stranger(path)
    try:
        return int(about["batches"])
    except (KeyError, ValueError):
        raise CorruptInput(f"{path} is a damaged partial vote. Delete it, or pass --no-resume.") from None
