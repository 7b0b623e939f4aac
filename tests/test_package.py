"""The package as users get it: wheel and sdist build, pass twine, and work where the repository is not."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
PLUMBING = ("tests/", "scratch/", "benchmarks/", ".venv", "__pycache__")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), built once; the wheel is made from the sdist, as an index would get them."""
    out = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def elsewhere(built, tmp_path_factory):
    """The wheel unpacked where the repository cannot be seen; dependencies come from this environment."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(built[0])], check=True, capture_output=True)
    return site


def _python(site: Path, code: str) -> str:
    """-I: no PYTHONPATH, no current folder, and the paths below instead of the editable install."""
    paths, sources = ([str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")], str(ROOT / "src"))
    start = f"import sys\nsys.path[:] = {paths!r} + [p for p in sys.path if p != {sources!r}]\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code], cwd=site, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_twine_is_content(built):
    pytest.importorskip("twine")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_holds_what_it_needs_and_no_more(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    for folder in ("pocket/data", "report/templates"):
        here = {
            p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src/gradfix" / folder).iterdir() if p.is_file()
        }
        assert here and here <= names
    assert "gradfix/py.typed" in names
    assert not [name for name in names if any(part in name for part in PLUMBING)]
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}


def test_the_sdist_holds_the_sources(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "docs/quickstart.md",
        "tests/test_package.py",
    } <= names
    assert not [name for name in names if name.startswith(("scratch", ".venv", "site"))]


def test_it_runs_without_the_repository(elsewhere):
    code = f"""
import gradfix
assert gradfix.__file__.startswith({str(elsewhere)!r}), gradfix.__file__
from gradfix.cli import run
assert run(["--version"]) == 0
assert run(["demo", "--help"]) == 0
assert run(["demo", "--unpack", "pocket"]) == 0
"""
    said = _python(elsewhere, code)
    assert "Run the whole job on embedded models" in said
    assert (elsewhere / "pocket" / "unrelated" / "base" / "model.safetensors").is_file()


def test_the_metadata_speaks_to_users(elsewhere):
    code = (
        "from importlib.metadata import metadata; m = metadata('gradfix'); print(m['Summary'], m['License-Expression'])"
    )
    assert _python(elsewhere, code).split()[-1] == "Apache-2.0"
    points = next(elsewhere.glob("gradfix-*.dist-info/entry_points.txt")).read_text()
    assert "gradfix = gradfix.cli:main" in points
