"""One registry class for every plug point: masks, merges, selectors, tasks, engines.

A plug point is a function (or class) and one decorator. Third-party packages add
entries through the entry-point group `gradfix.<plural>` and are loaded on first use.
A duplicate name fails, an unknown one lists the choices, a broken package is named."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Generic, TypeVar

from gradfix.errors import UsageError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Named implementations of one plug point."""

    def __init__(self, kind: str, *, group: str | None = None) -> None:
        self.kind = kind
        self.group = group or f"gradfix.{kind.replace(' ', '_')}s"
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
            self._add_plugin(point)

    def _add_plugin(self, point: EntryPoint) -> None:
        """Loading may register the entry by its decorator; an object that did not is the entry itself.

        A module that serves several groups registers everything when the first of them is loaded."""
        package = point.dist.name if point.dist else point.value
        taken, seen = point.name in self._entries, point.module in sys.modules
        try:
            found = point.load()
        except Exception as error:  # whatever a stranger's module raises on import, duplicate names included
            raise UsageError(
                f"the {self.kind} {point.name!r} of the package {package} cannot be loaded "
                f"({type(error).__name__}: {error}). Repair or uninstall that package."
            ) from error
        if isinstance(found, ModuleType):
            if point.name not in self._entries:
                raise UsageError(
                    f"the package {package} promises a {self.kind} called {point.name!r}, "
                    f"but importing {point.value} does not register it."
                )
        elif taken and not seen:
            raise UsageError(
                f"the package {package} adds a {self.kind} called {point.name!r}, which exists already. "
                "Uninstall it or ask its authors to rename the entry."
            )
        else:
            self._entries.setdefault(point.name, found)

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
