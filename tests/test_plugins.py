"""A third-party package adds a mask, a task, a method and a layer rule: built, installed and used as its users would.

The package is the one that docs/guides/plugins.md shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from gradfix.errors import UsageError
from gradfix.registry import Registry
from tests.stage import setup
from tests.test_docs import DOCS, blocks


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the guide's package installed by pip, without touching this environment."""
    source, site = tmp_path_factory.mktemp("extras"), tmp_path_factory.mktemp("site")
    for block in blocks(DOCS / "guides" / "plugins.md"):
        if block.file is not None:
            (source / block.file).write_text(block.text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    assert (site / "gradfix_extras.py").is_file()
    return site


def _python(site, *words: str, **options) -> subprocess.CompletedProcess[str]:
    """Another Python that sees the package; it sees this project's sources as this one does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, **options
    )


USE = """
import torch
from gradfix import MASKS, TASKS, collect_votes
from gradfix.votes.batched.layers import RULES, rule_for

assert "half_ties" in MASKS and MASKS["half_ties"].sees == "direction"
assert "smoothed" in TASKS and "prelu" in RULES
assert type(rule_for(torch.prelu)).__module__ == "gradfix_extras"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.PReLU(), torch.nn.Linear(8, 3)).double()
batch = torch.randn(16, 4, dtype=torch.float64)
loss = lambda model, batch: model(batch).square().sum(-1)
loop, batched = (collect_votes(model, loss, [batch], engine=engine) for engine in ("loop", "batched"))
assert set(loop) == set(batched) and "1.weight" in loop
assert all(torch.equal(loop[name], batched[name]) for name in loop)
print("same votes")
"""


def test_an_installed_package_is_known_to_python(site):
    done = _python(site, "-c", USE)
    assert "same votes" in done.stdout, done.stderr


def test_an_installed_package_is_known_to_the_command_line(site, tmp_path):
    setup("bert", tmp_path)
    words = "-m gradfix transport --base bert-old --tuned bert-old-reviews --target bert-new --data reviews --head copy"
    words += " --task smoothed --mask half_ties --shots 2 --alpha 0.5 --out moved"
    done = _python(site, *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "moved" / "gradfix.json").is_file()
    assert '"half_ties"' in (tmp_path / "moved" / "gradfix.json").read_text()


def test_an_installed_method_is_compared_judged_drawn_and_shipped(site, tmp_path):
    """One decorator, and every part of the house knows the method: no list of names stands anywhere else."""
    setup("bert-zero-shot", tmp_path)
    where = "--base bert-old --tuned bert-old-reviews --target bert-new --data reviews --task zero-shot --shots 2"
    compared = f"compare {where} --methods half_way random --json r.json --report page.html -q"
    shipped = f"transport {where} --method half_way --out moved --force --report one.html -q"
    both = f"from gradfix.cli import run; raise SystemExit(run({compared.split()}) or run({shipped.split()}))"
    done = _python(site, "-c", both, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "r.json").read_text())
    row = next(row for row in results["rows"] if row["method"] == "half_way")
    assert row["alpha"] == 0.5 and row["flops"] is not None
    assert results["traits"]["half_way"]["transports"] is True
    assert results["verdict"]["method"] in ("half_way", "zero_shot", "random")
    page = (tmp_path / "page.html").read_text()
    assert "Half of the vector" in page and "Half</" in page
    card = (tmp_path / "moved" / "README.md").read_text()
    assert "half of the difference of the first two was added to the third" in card
    assert json.loads((tmp_path / "moved" / "gradfix.json").read_text())["config"]["alpha"] == 0.5
    assert "Transported (half_way)" in (tmp_path / "one.html").read_text()


def test_a_reference_of_a_package_never_wins_a_verdict():
    from gradfix.methods.verdicts import judge

    rows = [
        {"method": name, "accuracy": value, "alpha": 1.0, "validation_score": value, "seconds": 1.0, "seed": 0}
        for name, value in (("zero_shot", 50.0), ("theirs", 99.0), ("naive", 60.0))
    ]
    assert judge(rows, traits={"theirs": {"reference": True}})["method"] == "naive"


def test_without_the_package_the_names_are_unknown(tmp_path, capsys, monkeypatch):
    from gradfix.cli import run

    monkeypatch.chdir(tmp_path)
    setup("bert", tmp_path)
    words = "--base bert-old --tuned bert-old-reviews --target bert-new --data reviews --head copy --task smoothed --out moved"
    assert run(["transport", *words.split()]) == 2
    assert "no task called 'smoothed'" in capsys.readouterr().err


def _registry(monkeypatch, value: str, name: str = "new") -> Registry[object]:
    points = [EntryPoint(name=name, value=value, group="gradfix.things")]
    monkeypatch.setattr("gradfix.registry.entry_points", lambda group: points if group == "gradfix.things" else [])
    things: Registry[object] = Registry("thing")
    things.register("old")(1)
    return things


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        ("no_such_module", "new", "cannot be loaded"),
        ("json:no_such_name", "new", "cannot be loaded"),
        ("json", "new", "does not register it"),
        ("stranger:thing", "old", "exists already"),
    ],
)
def test_a_broken_package_is_named(value, name, message, monkeypatch, tmp_path):
    (tmp_path / "stranger.py").write_text("thing = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=message):
        list(_registry(monkeypatch, value, name))


def test_an_entry_point_may_be_the_entry_itself(monkeypatch):
    import json

    assert _registry(monkeypatch, "json:dumps")["new"] is json.dumps


def test_groups_are_valid_names():
    assert Registry("vote rule").group == "gradfix.vote_rules"
