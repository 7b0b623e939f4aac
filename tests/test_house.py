"""The rules of the house: what may import what, and how light the front door is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gradfix"
UPPER = {"tasks", "data", "comparison", "report", "pocket", "experiments", "cli", "workflows", "results"}
CORE = ["errors.py", "registry.py", "checkpoints", "taskvector.py", "preflight.py", "votes", "masks.py",
        "transported.py", "stream.py", "scale.py", "merging", "selection.py", "align", "diagnostics.py"]  # fmt: skip


def _files(entry: str) -> list[Path]:
    path = SOURCE / entry
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize("entry", CORE)
def test_the_core_never_imports_the_upper_floors(entry):
    for file in _files(entry):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                assert parts[0] != "gradfix" or len(parts) < 2 or parts[1] not in UPPER, (
                    f"{file.name} imports {name}"
                )


def _modules_after(code: str) -> set[str]:
    script = code + "\nimport sys; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
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

    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(
        n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"
    )
    shown = {alias.asname: node.module for node in block.body for alias in node.names}
    assert shown == gradfix._HOMES


def test_public_functions_are_not_hidden_by_modules():
    import gradfix
    import gradfix.merging.memory
    import gradfix.stream.checkpoint
    import gradfix.vectors.transported

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
