"""The rules of the house: what may import what, how large it may grow, and how light the front door is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.house import DOORS, FLOORS, ROOT, SOURCE, cycle, floor, imports, modules, packages, run_nodes

IN_THE_ROOT = 6  # modules
IN_ALL = 172  # modules
LONGEST = 400  # lines of a file
WIDE = 8  # parameters; a function with more is wide
WIDE_FUNCTIONS = 5
SAME_MODULES: dict[str, str] = {}  # name: why two modules may share it
SAME_CLASSES: dict[str, str] = {}


def test_every_package_has_its_floor():
    assert set(packages()) == set(FLOORS)


@pytest.mark.parametrize("package", [ROOT, *FLOORS])
def test_no_package_imports_from_above(package):
    order = (ROOT, *FLOORS)
    below = set(order[: order.index(package) + 1])
    upward = [
        f"{module} imports {other}"
        for module, others in imports().items()
        if floor(module) == package and module not in DOORS
        for other in sorted(others)
        if floor(other) not in below
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_by_way_of_others():
    assert cycle() == []


def _plain_modules() -> dict[str, str]:
    """Dotted names and stems of what is not a package."""
    return {name: file.stem for name, file in modules().items() if file.name != "__init__.py"}


def test_the_house_stays_small():
    names = _plain_modules()
    assert len([name for name in names if name.count(".") == 1]) <= IN_THE_ROOT
    assert len(names) <= IN_ALL


@pytest.mark.parametrize("name", modules())
def test_no_file_is_too_long_to_read(name):
    assert len(modules()[name].read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_few_functions_take_many_parameters():
    wide = {
        f"{name}.{node.name}": count
        for name, file in modules().items()
        for node in run_nodes(file)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (count := _parameters(node)) > WIDE
    }
    assert len(wide) <= WIDE_FUNCTIONS, wide


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0  # a kernel takes one pointer, size and stride after the other
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _shared(named: Iterable[tuple[str, str]], allowed: Iterable[str]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = {}
    for name, home in named:
        homes.setdefault(name, []).append(home)
    return {name: found for name, found in homes.items() if len(found) > 1 and name not in allowed}


def test_no_two_modules_share_a_name():
    stems = [(stem, name) for name, stem in _plain_modules().items() if stem != "__main__"]
    assert _shared(stems, SAME_MODULES) == {}


def test_no_two_classes_share_a_name():
    classes = [
        (node.name, name)
        for name, file in modules().items()
        for node in run_nodes(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert _shared(classes, SAME_CLASSES) == {}


def _modules_after(code: str) -> set[str]:
    script = code + "\nimport sys; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_gradfix_imports_nothing_heavy():
    assert not {"torch", "numpy", "transformers", "rich", "typer"} & _modules_after("import gradfix")


def test_help_does_not_import_torch():
    code = "import contextlib, io\nfrom gradfix.cli import run\nwith contextlib.redirect_stdout(io.StringIO()): run(['--help'])"
    assert not {"torch", "numpy", "transformers"} & _modules_after(code)


def test_every_public_name_resolves():
    import gradfix

    for name in gradfix.__all__:
        assert getattr(gradfix, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        gradfix.nonsense  # noqa: B018


def test_editors_know_every_public_name():
    import gradfix

    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    shown = {alias.asname: node.module for node in tree.body for alias in node.names}
    assert shown == {**gradfix._HOMES, "__version__": "gradfix._version"}


def test_public_functions_are_not_hidden_by_modules():
    import gradfix

    doors = {name.split(".")[1] for name in modules() if "." in name}
    assert not doors & set(gradfix.__all__), "importing such a module would hide the function"
    for name in ("transport", "merge", "select", "apply", "evaluate", "compare"):
        assert callable(getattr(gradfix, name)), name


def test_no_print_and_no_star_import_in_the_library():
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print" or "train" in file.name or "pocket" in str(file), file
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), file
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), file
