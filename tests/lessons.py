"""Lessons made short, for tests that ask what is written and said, not how well it was learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradfix.training.asking import Asking
from gradfix.training.distil import Teaching
from gradfix.training.imitating import Imitation
from gradfix.training.relations import Relating

FEWER: dict[type[Any], dict[str, int]] = {
    Teaching: {"steps": 8, "pool": 120, "unlabelled": 20, "probes": 24, "mapped": 48},
    Imitation: {"steps": 12, "batch": 8, "labelled": 4, "kept": 2, "probes": 8, "keepsakes": 16,
                "keepsake_tokens": 24, "mapped": 16},
    Relating: {"steps": 8},
    Asking: {"pool": 32},
}  # fmt: skip


def shorten(put: Callable[[dict[str, Any], str, Any], None] = dict.__setitem__) -> None:
    """In this process, for good unless `put` knows how to undo it: the defaults of every recipe."""
    for recipe, numbers in FEWER.items():
        for name, number in numbers.items():
            put(recipe.__init__.__kwdefaults__, name, number)  # type: ignore[misc]
