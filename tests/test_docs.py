"""The documentation is true: its commands run, its options exist, its links lead somewhere, its picture is the tree.

Pages are run top to bottom in a folder of their own. `<!-- setup: NAME -->` on the first line fills it with
tiny models; `<!-- needs: hub -->` before a block means that it is only checked for known options;
`<!-- file: NAME -->` before a block writes it to a file. `python -m tests.test_docs --write` refreshes the
picture and the list of packages of docs/architecture.md and adds new pages to the navigation."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house import SOURCE, package_lines, picture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(?:<!-- (needs|file): ([^>]+?) -->\n\1)?```(\w+)[^\n]*\n(.*?)^\1```", re.M | re.S)
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
PICTURE = DOCS / "assets" / "house.svg"
STOPS = 10  # of a walk through the house
SHELL, OTHER_TOOLS = ("bash", "console"), ("pip", "make", "git", "cd", "hf", "python", "pytest")
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.is_file())]
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    needs: str | None
    file: str | None

    def commands(self) -> list[list[str]]:
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        _, mark, value, language, text = match.groups()
        found.append(Block(language, text, value if mark == "needs" else None, value if mark == "file" else None))
    return found


def setup_of(page: Path) -> str:
    match = re.match(r"<!-- setup: ([\w-]+) -->", page.read_text(encoding="utf-8"))
    return match.group(1) if match else "readme" if page.name == "README.md" else "nothing"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable(page: Path) -> bool:
    return any(b.needs is None and b.language in (*SHELL, "python") for b in blocks(page))


def options_of(command: str) -> set[str]:
    from gradfix.cli.commands import COMMANDS
    from gradfix.cli.options import fields_of, flag

    known = {"--config", "--json", "--quiet", "-q", "--help", "-h"}
    for field in fields_of(COMMANDS[command][0]).values():
        known |= {flag(field.name), flag("no_" + field.name)}
    return known


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_has_known_options(page):
    from gradfix.cli.commands import COMMANDS

    for block in blocks(page):
        for line in block.commands() if block.language in SHELL else ():
            words = line[line.index("-m") + 1 :] if "-m" in line else line  # torchrun ... -m gradfix vote
            if words[0] != "gradfix":
                assert words[0] in OTHER_TOOLS, f"what is {words[0]!r}?"
                continue
            if words[1].startswith("--"):
                assert words[1] in ("--help", "--version", "--install-completion", "--show-completion")
                continue
            assert words[1] in COMMANDS, words
            unknown = {word.split("=")[0] for word in words[2:] if word.startswith("--")} - options_of(words[1])
            assert not unknown, (words, unknown)


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name)
def test_every_page_runs(page, tmp_path, monkeypatch, capsys):
    from tests.stage import names_of, setup

    monkeypatch.chdir(tmp_path)
    setup(setup_of(page), tmp_path)
    space: dict[str, object] = {"__name__": "docs", **names_of(setup_of(page))}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.needs is None and block.language == "python":
            exec(compile(block.text, name(page), "exec"), space)
        elif block.needs is None and block.language in SHELL:
            for words in block.commands():
                _run(words, capsys)


def _run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from gradfix.cli import run

    if words[0] != "gradfix":
        return
    code = run(words[1:])
    shown = capsys.readouterr()
    assert code == 0, f"{shlex.join(words)} ended with {code}: {shown.err}"
    if "--unpack" in words:
        _thin(Path(words[words.index("--unpack") + 1]))


def _thin(folder: Path, rows: int = 120) -> None:
    """The first examples of every split are enough for pages that ask whether a command runs."""
    from pyarrow import parquet

    for path in folder.rglob("*.parquet"):
        parquet.write_table(parquet.read_table(path).slice(0, rows), path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert not target.startswith("/"), target
        if not target.startswith(("http://", "https://", "mailto:", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_remote_is_loaded(page):
    assert not re.search(r"!\[[^]]*\]\(https?:|<(?:img|script|link)\b", page.read_text(encoding="utf-8"))


def test_every_public_name_is_in_the_reference():
    import gradfix

    text = (DOCS / "api.md").read_text(encoding="utf-8") + (SOURCE / "errors.py").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert set(gradfix.__all__) - {"__version__"} <= words


def test_everything_in_the_reference_is_imported_from_gradfix():
    import gradfix

    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(named) > 25
    missing = [name for name in named if name != "gradfix.errors" and not hasattr(gradfix, name.rpartition(".")[2])]
    assert not missing
    errors = re.findall(r"^class (\w+)", (SOURCE / "errors.py").read_text(encoding="utf-8"), re.M)
    assert all(hasattr(gradfix, name) for name in errors)


def unlisted() -> set[str]:
    """Pages that the navigation lacks, and names it has without a page."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    return listed ^ {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_every_page_is_in_the_navigation():
    assert unlisted() == set(), "run `python -m tests.test_docs --write`"


def architecture() -> tuple[str, str, str]:
    before, rest = (DOCS / "architecture.md").read_text(encoding="utf-8").split(BEGIN)
    listed, after = rest.split(END)
    return before, listed.strip(), after


def test_architecture_lists_the_packages():
    assert architecture()[1] == package_lines(), "run `python -m tests.test_docs --write`"


def test_the_picture_shows_the_imports():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run `python -m tests.test_docs --write`"


def test_architecture_names_files_that_exist():
    named = re.findall(r"`([\w/]+\.py)`", architecture()[0])
    homes = {"tests": ROOT, "scripts": ROOT}  # everything else is below the source
    missing = [path for path in named if not (homes.get(path.split("/")[0], SOURCE) / path).is_file()]
    assert len(named) > 40 and not missing


def test_the_walks_are_short():
    walks = re.findall(r"^### A (\w+)\n(.*?)(?=^##)", architecture()[0], re.M | re.S)
    assert [name for name, _ in walks] == ["transport", "vote"]
    for _, text in walks:
        stops = re.findall(r"^(\d+)\. `[\w/]+\.py`", text, re.M)
        assert stops == [str(number + 1) for number in range(len(stops))]
        assert 5 <= len(stops) <= STOPS


def list_pages() -> None:
    """Put pages that are new into the navigation, before the log."""
    path, last = ROOT / "mkdocs.yml", "      - Log: log.md\n"
    text = path.read_text(encoding="utf-8")
    for page in sorted(unlisted()):
        title = re.search(r"^# (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.M)
        assert title, f"{page} has no title"
        text = text.replace(last, f"      - {title.group(1)}: {page}\n{last}")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    list_pages()
    before, _, after = architecture()
    (DOCS / "architecture.md").write_text(f"{before}{BEGIN}\n{package_lines()}\n{END}{after}", encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
