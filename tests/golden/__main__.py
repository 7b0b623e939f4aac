"""python -m tests.golden [SECTION ...]

Rewrites golden.json, or the named sections of it, from the code as it is. Do this only for a change of
results that is meant, and say so in the changelog."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401  offline and one thread, as in the tests
from tests.golden.sections import FILE, SECTIONS, WORLDS, make_section


def main(names: list[str]) -> None:
    content = json.loads(FILE.read_text(encoding="utf-8")) if names and FILE.exists() else {}
    with tempfile.TemporaryDirectory(prefix="gradfix-golden-") as folder:
        homes: dict[str, Path] = {}
        for name in names or SECTIONS:
            world = SECTIONS[name][0]
            if world not in homes:
                homes[world] = WORLDS[world](Path(folder, world))
            content[name] = make_section(name, homes[world], Path(folder, "out", name))
    FILE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
