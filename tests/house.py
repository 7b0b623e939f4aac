"""The source tree as data: its modules, who imports whom, and in which order the packages stand.

Imports are read from the source, those inside functions included; what only the type checker sees does not count."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "gradfix"
ROOT = "gradfix"
FLOORS = (
    "system", "checkpoints", "vectors", "votes", "align", "stream", "merging", "data", "tasks", "training",
    "methods", "report", "pocket", "experiments", "commands", "cli",
)  # fmt: skip
"""The packages from the ground up, on the modules of the root: each may import itself and those before it."""
DOORS = ("gradfix", "gradfix.__main__")  # the front doors open onto every floor


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package stands for its `__init__`."""
    return {_dotted(file): file for file in sorted(SOURCE.rglob("*.py"))}


def _dotted(file: Path) -> str:
    parts = (ROOT, *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def run_nodes(file: Path) -> list[ast.AST]:
    """All nodes of a file but those under `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree(file)]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Which of our modules each module imports."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, file in known.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        found = set()
        for node in run_nodes(file):
            if isinstance(node, ast.ImportFrom):
                above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                home = ".".join(filter(None, (above if node.level else "", node.module)))
                for alias in node.names:
                    whole = f"{home}.{alias.name}"
                    found.add(whole if whole in known else home)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = {other for other in found if other in known and other != name}
    return graph


def floor(module: str) -> str:
    """The package a module belongs to; the modules of the root are the ground."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in packages() else ROOT


@cache
def packages() -> tuple[str, ...]:
    return tuple(sorted(file.parent.name for file in SOURCE.glob("*/__init__.py")))


def package_imports() -> dict[str, set[str]]:
    """Which other packages each package imports, the front doors left out."""
    graph: dict[str, set[str]] = {name: set() for name in (ROOT, *FLOORS)}
    for module, others in imports().items():
        if module not in DOORS:
            graph.setdefault(floor(module), set()).update(floor(other) for other in others)
    return {name: others - {name} for name, others in graph.items()}


def cycle() -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def first_line(path: Path) -> str:
    """What a module says it is for."""
    doc = ast.get_docstring(tree(path))
    assert doc, f"{path} has no docstring"
    return doc.splitlines()[0].rstrip(".:")


PITCH, NAMES, TOP = (26, 112, 104)  # pixels: a row's height, the width of the names, the height of the column heads


def picture() -> str:
    """Who imports whom, as SVG: a row for every package, the ground below, a dot in the column of what it imports."""
    order = (ROOT, *FLOORS)
    graph = package_imports()
    wide, high = NAMES + PITCH * len(order) + 60, TOP + PITCH * len(order) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        'aria-label="Packages of gradfix, the upper ones importing the lower ones" '
        'font-family="sans-serif" font-size="13">',
        f'  <rect width="{wide}" height="{high}" fill="#ffffff"/>',
    ]
    for row, name in enumerate(reversed(order)):
        y = TOP + PITCH * row
        x = NAMES + PITCH * (len(order) - 1 - row)
        shade = "#f4f8fb" if row % 2 else "#eaf2f8"
        parts.append(f'  <rect x="0" y="{y}" width="{NAMES + PITCH * len(order)}" height="{PITCH}" fill="{shade}"/>')
        parts.append(f'  <rect x="{x}" y="{y}" width="{PITCH}" height="{PITCH}" fill="#aed6f1"/>')
        parts.append(f'  <text x="{NAMES - 10}" y="{y + 18}" text-anchor="end">{name}</text>')
    for column, name in enumerate(order):
        x = NAMES + PITCH * column + PITCH // 2
        head = f'x="{x + 4}" y="{TOP - 8}" transform="rotate(-60 {x + 4} {TOP - 8})"'
        parts.append(f"  <text {head}>{name}</text>")
        for row, other in enumerate(reversed(order)):
            if name in graph[other]:
                parts.append(f'  <circle cx="{x}" cy="{TOP + PITCH * row + PITCH // 2}" r="5" fill="#1f618d"/>')
    caption = "A dot: the package of this row imports that of this column. All dots are left of the diagonal."
    parts.append(f'  <text x="10" y="{high - 12}" font-size="12" fill="#5d6d7e">{caption}</text>')
    return "\n".join([*parts, "</svg>", ""])


def package_lines() -> str:
    """One line per package, from the ground up, in its own words."""
    ground = ", ".join(f"`{file.name}`" for file in sorted(SOURCE.glob("*.py")) if file.stem != "__init__")
    lines = [f"- the root: {ground}"]
    for name in FLOORS:
        lines.append(f"- `{name}/`: {escaped(first_line(SOURCE / name / '__init__.py'))}")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Outside code, Markdown's own signs stand for themselves."""
    pieces = text.split("`")
    return "`".join(re.sub(r"([*_<>])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(pieces))
