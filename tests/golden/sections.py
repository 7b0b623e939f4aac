"""The sections of golden.json: how each is made, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.golden import comparing, faults, folders, library
from tests.golden.worlds import make_drawn, make_trained

FILE = Path(__file__).with_name("golden.json")
WORLDS = {"drawn": make_drawn, "trained": make_trained}
SECTIONS: dict[str, tuple[str, Callable[[Path, Path], dict[str, Any]]]] = {
    "transports": ("drawn", folders.transports),
    "merges": ("drawn", folders.merges),
    "votes": ("drawn", library.votes),
    "streamed": ("drawn", library.streamed),
    "in memory": ("drawn", library.in_memory),
    "faults": ("drawn", faults.faults),
    "compared": ("trained", comparing.compared),
    "by method": ("trained", comparing.by_method),
    "embedded": ("drawn", comparing.embedded),
}
# One example of the small test and validation splits, either way. Everything else that is no whole number
# or text is the same to a relative 1e-4, for singular values and sums that CPUs add up in their own order.
POINTS = {"accuracy": 1.2, "validation_score": 1.8}
RELATIVE = 1e-4


def make_section(name: str, home: Path, place: Path) -> dict[str, Any]:
    place.mkdir(parents=True)
    return SECTIONS[name][1](home, place)


def differences(frozen: Any, fresh: Any, where: str = "") -> Iterator[str]:
    """Every place where the two differ by more than they may."""
    if isinstance(frozen, dict) and isinstance(fresh, dict):
        for key in sorted(frozen.keys() | fresh.keys()):
            here = f"{where} > {key}" if where else key
            if key not in fresh or key not in frozen:
                yield f"{here}: {'gone' if key in frozen else 'new'}"
            else:
                yield from differences(frozen[key], fresh[key], here)
    elif isinstance(frozen, float) and isinstance(fresh, (int, float)) and not isinstance(fresh, bool):
        allowed = POINTS.get(where.rsplit(" > ", 1)[-1], RELATIVE * abs(frozen))
        if abs(frozen - fresh) > allowed:
            yield f"{where}: {frozen} became {fresh}"
    elif frozen != fresh:
        yield f"{where}: {frozen} became {fresh}"
