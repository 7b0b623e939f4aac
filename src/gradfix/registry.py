"""One registry class for every plug point: masks, merges, selectors, tasks, engines.

A plug point is a function (or class) and one decorator. Third-party packages add
entries through the entry-point group `gradfix.<plural>` and are loaded on first use.
A duplicate name fails; an unknown one lists the choices."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from gradfix.errors import UsageError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Named implementations of one plug point."""

    def __init__(self, kind: str, *, group: str | None = None) -> None:
        self.kind = kind
        self.group = group or f"gradfix.{kind}s"
        self._entries: dict[str, T] = {}
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"a {self.kind} called {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return add

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=self.group):
            if point.name not in self._entries:
                self._entries[point.name] = point.load()

    def __getitem__(self, name: str) -> T:
        self._load_plugins()
        try:
            return self._entries[name]
        except KeyError:
            raise UsageError(unknown(self.kind, name, self._entries)) from None

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._entries)

    def __len__(self) -> int:
        self._load_plugins()
        return len(self._entries)


def unknown(kind: str, name: str, choices: Mapping[str, object] | list[str]) -> str:
    """The one wording for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(str(name), list(choices), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no {kind} called {name!r}; there are: {', '.join(choices)}.{hint}"
