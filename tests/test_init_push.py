"""`gradfix init`, `gradfix push`, dry runs, and how the command line behaves at its edges."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from gradfix.cli import run
from gradfix.cli.options import settle
from gradfix.commands.configs import INITIALISED, CompareConfig, InitConfig, InitOptions, PushConfig, TransportConfig
from gradfix.commands.init import COMMANDS, RECIPE, run_init
from tests.stage import setup

TRIO = {"base": ("a",), "tuned": ("b",), "target": "c"}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup("bert-zero-shot", tmp_path)
    return tmp_path


@pytest.fixture
def moved(stage, made):
    """A small transported folder."""
    shutil.copytree(made, "moved")
    return Path("moved")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("moved")
    setup("bert-zero-shot", home)
    with contextlib.chdir(home):
        assert run(["transport", *f"{DRY['transport']} --quiet".replace("--out x", "--out moved").split()]) == 0
    return home / "moved"


def test_transport_file_is_what_config_reads(tmp_path):
    out = tmp_path / "t.yml"
    config = InitConfig(
        command="transport", out=str(out), data=("d: #1",), task="zero-shot", shots=("7",), into="o", **TRIO
    )
    result = run_init(config)
    assert result.missing == ()
    made = settle(TransportConfig, {}, str(out))
    assert (made.base, made.tuned, made.target, made.data, made.shots, made.out) == ("a", "b", "c", "d: #1", 7, "o")
    assert made == TransportConfig(base="a", tuned="b", target="c", data="d: #1", task="zero-shot", shots=7, out="o")


def test_compare_file_holds_lists(tmp_path):
    out = tmp_path / "c.yml"
    run_init(InitConfig(command="compare", out=str(out), data=("d",), task="causal", shots=("5", "50"), **TRIO))
    assert settle(CompareConfig, {}, str(out)).shots == (5, 50)


def test_merge_file_is_a_recipe(tmp_path):
    from gradfix.merging.recipes import MergeRecipe, load_recipe

    out = tmp_path / "m.yml"
    run_init(
        InitConfig(command="merge", out=str(out), base=("a",), tuned=("x", "y"), target="t", data=("d",), task="causal")
    )
    recipe = load_recipe(out)
    assert [(v.base, v.tuned, v.data) for v in recipe.vectors] == [("a", "x", "d"), ("a", "y", "d")]
    assert recipe.out == "merged"
    assert set(RECIPE) == set(MergeRecipe.model_fields) - {"vectors"}, "every key of a recipe is explained"


@pytest.mark.parametrize("command", sorted(INITIALISED))
def test_every_option_stands_in_the_file_with_its_help(command):
    text = run_init(InitConfig(command=command, dry_run=True)).text
    flat = " ".join(text.replace("# ", "").split())
    for field in fields(INITIALISED[command]):
        assert f"\n# {field.name}:" in text or f"\n{field.name}:" in text, field.name
        assert " ".join(field.metadata["help"].split()) in flat
    active = "\n".join(line.removeprefix("# ") if line.startswith("# ") and ": " in line[:30] else line
                       for line in text.splitlines() if not line.startswith("# ") or line[2:].split(":")[0].isidentifier())  # fmt: skip
    assert yaml.safe_load(active)


def test_missing_options_are_named_and_left_open(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    assert "fill in data, task, base, tuned, target, then run `gradfix transport --config transport.yml`" in _flat(
        capsys
    )
    assert run(["transport", "--config", "transport.yml"]) == 2
    assert "--data is missing" in capsys.readouterr().err
    assert run(["init"]) == 8
    assert "transport.yml exists" in capsys.readouterr().err
    assert run(["init", "--overwrite"]) == 0


def test_questions_are_asked_where_there_is_somebody(tmp_path, monkeypatch):
    answers = {"The old base model.": "a", "Folder to write.": "here"}
    asked = []

    def ask(question, default, choices):
        asked.append(question)
        return "transport" if choices else answers.get(question, default or "x")

    result = run_init(InitConfig(dry_run=True, out=str(tmp_path / "f.yml")), ask)
    assert "\nbase: a\n" in result.text and "\nout: here\n" in result.text and result.missing == ()
    assert len(asked) == len(set(asked)) > 6


def test_the_task_is_guessed_from_a_checkpoint(stage):
    result = run_init(InitConfig(command="transport", tuned=("bert-old-reviews",), dry_run=True))
    assert "\ntask: zero-shot\n" in result.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--command", "comparre"], "Did you mean 'compare'?"),
        (["--base", "a", "b"], "--base takes one value here"),
        (["--command", "merge", "--tuned", "x", "y", "z", "--base", "a", "b"], "one for all, or one each"),
        (["--command", "merge", "--out-lora", "8"], "--out-lora means nothing to merge"),
        (["--command", "compare", "--margin", "0.5"], "--margin means nothing to compare"),
    ],
)
def test_init_refuses_what_makes_no_sense(words, message, capsys):
    assert run(["init", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_init_knows_every_option_of_its_commands():
    own = {field.name for field in fields(InitOptions)}
    known = {field.name for field in fields(InitConfig)} - own
    wanted = {field.name for kind in INITIALISED.values() for field in fields(kind)}
    assert known == wanted - own
    assert set(COMMANDS) == {*INITIALISED, "merge"}


class Recorded:
    """Stands in for the hub client: same calls, checked against the real signatures."""

    def __init__(self):
        self.calls = {}

    def create_repo(self, *args, **kwargs):
        return self._record("create_repo", args, kwargs, "hub page")

    def upload_folder(self, *args, **kwargs):
        return self._record("upload_folder", args, kwargs, None)

    def _record(self, name, args, kwargs, answer):
        from huggingface_hub.hf_api import HfApi

        bound = inspect.signature(getattr(HfApi, name)).bind(self, *args, **kwargs)
        self.calls[name] = bound.arguments
        return answer


def test_push_sends_what_the_manifest_lists(moved, monkeypatch, capsys):
    import huggingface_hub

    hub = Recorded()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    (moved / "notes.txt").write_text("not in the manifest")
    assert run(["push", "moved", "--repo", "me/new", "--private"]) == 0
    assert hub.calls["create_repo"]["private"] is True and hub.calls["create_repo"]["exist_ok"] is True
    sent = set(hub.calls["upload_folder"]["allow_patterns"])
    assert {"README.md", "gradfix.json", "model.safetensors", "config.json"} <= sent
    assert "notes.txt" not in sent
    assert "hub page" in capsys.readouterr().out


def test_push_dry_run_contacts_nobody(moved, monkeypatch, capsys):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("contacted"))
    assert run(["push", "moved", "--repo", "me/new", "--dry-run", "--json", "-"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["files"]


def test_push_through_the_real_client_says_what_to_do(moved, capsys):
    assert run(["push", "moved", "--repo", "me/new"]) == 8  # the tests are offline
    assert "hf auth login" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("repo", "code", "message"),
    [("me", 2, "owner/name"), ("a/b/c", 2, "repository name"), ("me/new", 3, "has changed")],
)
def test_push_checks_before_it_sends(moved, repo, code, message, capsys):
    if code == 3:
        (moved / "README.md").write_text("edited")
    assert run(["push", "moved", "--repo", repo, "--dry-run"]) == code
    assert message in capsys.readouterr().err


DATA = "--data reviews --task zero-shot --shots 2"
DRY = {
    "transport": f"--base bert-old --tuned bert-old-reviews --target bert-new {DATA} --alpha 1 --out x",
    "finetune": "--model bert-old --data reviews --task zero-shot --steps 1 --out x",
    "vote": f"--target bert-new {DATA} --out x.safetensors",
    "select": f"{DATA} --out x.jsonl",
    "compare": f"--base bert-old --tuned bert-old-reviews --target bert-new {DATA} --report x.html",
    "merge": "recipe.yml --out x",
    "report": "results.json --out x.html",
    "push": "moved --repo me/new",
    "init": "--out x.yml",
}


@pytest.mark.parametrize("command", sorted(DRY))
def test_a_dry_run_checks_and_writes_nothing(command, moved, capsys):
    from gradfix.methods.results import Results
    from tests.test_results import BASE

    Results.build(BASE, versions={}).save("results.json")
    Path("recipe.yml").write_text("target: bert-new\nvectors: [{base: bert-old, tuned: bert-old-reviews}]\n")
    before = sorted(Path().rglob("*"))
    assert run([command, *DRY[command].split(), "--dry-run"]) == 0, capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    assert "would" in capsys.readouterr().out or command in ("transport",)


@pytest.mark.parametrize("command", ["vote", "select", "compare"])
def test_a_dry_run_finds_what_the_run_would(command, stage, capsys):
    words = DRY[command].replace("--data reviews", "--data reveiws").split()
    assert run([command, *words, "--dry-run"]) == 5
    assert "reveiws" in capsys.readouterr().err


def _flat(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["transprot"], "Did you mean 'transport'?"),
        (["transport", "--bas", "x"], "--base"),
        (["transport", "--shots", "5", "50"], "unexpected extra argument"),
    ],
)
def test_typos_are_answered(words, message, capsys):
    assert run(words) == 2
    assert message in capsys.readouterr().err


def test_piped_tables_are_plain_and_whole(stage):
    done = _command("inspect", "bert-old", "bert-old-reviews", "bert-new", "--names", COLUMNS="40")
    assert "\x1b" not in done.stdout
    assert "encoder.layer.1.attention.output.LayerNorm.weight" in done.stdout
    assert "…" not in done.stdout


def test_narrow_terminals_lose_nothing(monkeypatch, capsys):
    from gradfix.cli import console

    monkeypatch.setattr(console, "out", lambda: console.Console(width=40, force_terminal=True, color_system=None))
    rows = [("bert-old", "1,234,567", "float32", "0.123456789", "99.9 %", "last one")]
    console.table("title", ("name", "weights", "dtype", "norm", "kept", "end"), rows)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in rows[0])
    assert max(map(len, shown.splitlines())) <= 40
    console.table("title", ("name", "n"), [("q" * 60, "1")])
    assert capsys.readouterr().out.count("q") == 60


def test_completion_knows_the_commands():
    done = _command(_GRADFIX_COMPLETE="complete_bash", COMP_WORDS="gradfix tran", COMP_CWORD="1")
    assert "transport" in done.stdout


def _command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradfix", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_ctrl_c_says_how_to_go_on(stage):
    words = ["finetune", *DRY["finetune"].replace("--steps 1", "--steps 100000").split()]
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRADFIX_DEBUG": ""},
    )
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "To go on: gradfix finetune --model bert-old" in said
    assert not Path("x").exists()
    assert "Traceback" not in said


INTERRUPT = f"""
import os, signal, sys, threading
import gradfix.training.finetuning as f
from gradfix.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that on
step = f.finetune
def soon(*args, **kwargs):
    threading.Timer(0.3, os.kill, (os.getpid(), {int(signal.SIGINT)})).start()
    return step(*args, **kwargs)
f.finetune = soon
main(sys.argv[1:])
"""


def test_push_options_are_declared_once():
    assert {field.name for field in fields(PushConfig)} == {"out", "repo", "private", "message", "dry_run"}


def test_the_questions_appear_on_a_terminal(tmp_path):
    """The real prompts, on a pseudo-terminal: an empty answer takes the default."""
    import pty

    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "gradfix", "init"], stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, close_fds=True
    )
    os.close(slave)
    os.write(master, b"transport\nold\ntuned\nnew\ndata\nzero-shot\n\n\n\n")
    said = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux: the other end is gone
            break
        if not part:
            break
        said += part
    assert child.wait(30) == 0, said
    os.close(master)
    assert b"The old base model." in said
    made = settle(TransportConfig, {}, str(tmp_path / "transport.yml"))
    assert made == TransportConfig(
        base="old", tuned="tuned", target="new", data="data", task="zero-shot", out="transported"
    )


def test_demo_and_reproduce_say_what_they_would_do(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "--dry-run", "--report", "page.html"]) == 0
    assert "would write page.html" in capsys.readouterr().out
    assert run(["reproduce", "masks", "--suite", "pocket", "--quick", "--dry-run"]) == 0
    assert "would reproduce masks of the pocket suite" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
