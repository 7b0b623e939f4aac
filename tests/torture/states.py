"""What an interrupted run left behind, damaged: it is refused, or the run ends in the bits of an undisturbed one."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.reliability.world import World, hashes
from tests.torture.children import Outcome, Series, finish, judged, run_cases, start
from tests.torture.commands import compare_words, finetune_words, hasten, hastened, vote_words
from tests.torture.crashes import CHILD_LIMIT, Work, at_operation, operations, relative, three, transport_work
from tests.torture.faults import die
from tests.torture.inputs import through_the_cli
from tests.torture.mutations import mutated

MOMENTS = (0.3, 0.5, 0.7, 0.9)  # shares of the operations on the disk


@dataclass(frozen=True)
class Kind:
    """A run to interrupt (`work`) and to take up again (`again`, which tells how it went)."""

    name: str
    out: Path
    work: Work
    again: Callable[[], tuple[str, str]]

    @property
    def final(self) -> dict[str, str]:
        """Every file under the output's own name."""
        return relative(self.out) if self.out.is_dir() else hashes(self.out) if self.out.exists() else {}


def damaged_states(home: Path, count: int, world: World) -> Series:
    began = time.time()
    left: list[tuple[Kind, dict[str, str], Path]] = []
    kinds = _kinds(home / "states", world)[:count]
    for kind in kinds:
        whole = _undisturbed(kind)
        if whole is None:
            return Series.of("damaged states", [Outcome("wrong", f"{kind.name} itself fails")], began)
        left += [(kind, whole, place) for place in _interrupted(kind, math.ceil(count / len(kinds)))]
    cases = [partial(_case, number, *left[number % len(left)]) for number in range(count)]
    return Series.of("damaged states", run_cases(cases), began)


def _kinds(home: Path, world: World) -> list[Kind]:
    def commanded(name: str, out: Path, words: list[str]) -> Kind:
        def again() -> tuple[str, str]:
            hasten()
            return through_the_cli(words)

        return Kind(name, out, hastened(words), again)

    votes = {rule: home / rule / "votes.safetensors" for rule in ("majority", "mean")}
    tuned, results, moved = (home / "finetune" / "out", home / "compare" / "results.json", home / "move" / "out")
    transport = transport_work(three(home / "roles"), moved)
    return [
        *(commanded(rule, out, vote_words(world, out, rule)) for rule, out in votes.items()),
        commanded("finetune", tuned, finetune_words(world, tuned)),
        commanded("compare", results, compare_words(world, results)),
        Kind("transport", moved, transport, lambda: judged(lambda: (transport(), ("same", ""))[1])),
    ]  # fmt: skip


def _undisturbed(kind: Kind) -> dict[str, str] | None:
    code = finish(start(kind.work), CHILD_LIMIT)
    return kind.final if code == 0 else None


def _interrupted(kind: Kind, most: int) -> list[Path]:
    """Folders as kills at several moments leave them, where they leave anything and the work was not done.

    No more than are damaged: a small share of the series goes through the kinds, not the moments of the first."""
    places = []
    shutil.rmtree(kind.out.parent)
    total = operations(kind.work)
    for moment in MOMENTS:
        if len(places) == most:
            break
        shutil.rmtree(kind.out.parent)
        finish(start(at_operation(max(1, round(moment * total)), die, kind.work)), CHILD_LIMIT)
        if relative(kind.out.parent) and not kind.out.exists():
            place = kind.out.parent.with_name(f"{kind.out.parent.name}-{moment}")
            shutil.copytree(kind.out.parent, place, symlinks=True)
            places.append(place)
    return places


def _case(number: int, kind: Kind, whole: dict[str, str], place: Path) -> tuple[str, str]:
    draw = random.Random(f"damaged states:{number}")
    home = kind.out.parent
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(place, home, symlinks=True)
    path = draw.choice(sorted(p for p in home.rglob("*") if p.is_file() and p.stat().st_size))
    path.write_bytes(mutated(path.read_bytes(), draw))
    status, detail = kind.again()
    told = f"{kind.name}, {path.relative_to(home)} damaged: {detail}"
    if status == "refused" and kind.final:
        return "wrong", f"{told}, and there is an output"
    if status == "same" and kind.final != whole:
        return "wrong", f"{told}, and the output is another one"
    return status, told
