"""The first hour of a user: the README's own commands in a clean folder, and every wrong turn on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradfix.cli import run
from tests.stage import setup
from tests.test_docs import ROOT, SHELL, blocks

TRIO = "--base old-base --tuned my-fine-tune --target new-base --data my-data"
TRANSPORT = f"{TRIO} --task zero-shot --shots 2 --alpha 0.5 --out moved"


@pytest.fixture
def clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup("readme", tmp_path)
    return tmp_path


def readme_commands() -> list[list[str]]:
    """The commands of the README's block that ends in a transport."""
    for block in blocks(ROOT / "README.md"):
        words = block.commands() if block.language in SHELL else []
        if any(command[:2] == ["gradfix", "transport"] for command in words):
            return words
    raise AssertionError("the README transports nothing")


def test_the_readme_alone_is_enough(clean, capsys):
    commands = readme_commands()
    assert len(commands) <= 3
    for words in commands:
        assert run(words[1:]) == 0, capsys.readouterr().err
    named = {words[words.index("--report") + 1] for words in commands if "--report" in words}
    assert named
    for report in named:
        page = Path(report).read_text(encoding="utf-8")
        assert "<html" in page and 'class="verdict"' in page and "<script" not in page
    assert run(["verify", "moved"]) == 0
    from transformers import AutoModel

    AutoModel.from_pretrained("moved")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (("old-base", "old-bse"), 3, ["old-bse does not exist", "folder, a weights file or a hub id"]),
        (("my-data", "my-dta"), 5, ["my-dta", "spelling"]),
        (("my-data", "my-data.csv"), 5, ["my-data.csv does not exist", "data file, a folder or a hub dataset"]),
        (("zero-shot", "zeroshot"), 2, ["no task called 'zeroshot'", "Did you mean 'zero-shot'?"]),
        (("zero-shot", "classification"), 4, ["head", "--head copy"]),
        (("zero-shot", "seq2seq"), 4, ["is a bert model", "Choose the --task", "zero-shot for encoders"]),
        (("zero-shot", "causal"), 3, ["BertLMHeadModel", "Choose the --task", "zero-shot for encoders"]),
        (("--shots 2", "--shots 2 --label-column stars"), 5, ["no column 'stars'", "'label'", "Name the label column"]),
        (("--shots 2", "--shots 2 --label-column text"), 5, ["Name the", "column"]),
        (("--shots 2", "--shots 2 --text-column txt"), 5, ["no column 'txt'", "Did you mean 'text'?"]),
        (("--shots 2", "--shots 1000"), 5, ["1000 were asked for", "allow"]),
        (("--base old-base --tuned my-fine-tune", "--base my-fine-tune --tuned old-base"), 4, ["swapped", "--force"]),
        (("--tuned my-fine-tune", "--tuned old-base"), 6, ["equals", "task vector is zero"]),
        (("--mask", "--mask"), 0, []),
        (("--alpha 0.5", "--alpha 0.5 --mask agre"), 2, ["Did you mean 'agree'?"]),
        (("--alpha 0.5", "--alpha half"), 2, ["--alpha must be a finite number or 'auto'"]),
        (("--out moved", "--out new-base"), 8, ["input", "Choose another"]),
        (("--target new-base ", ""), 2, ["--target is missing: The new base model."]),
    ],
    ids=lambda value: value[1].strip()[-40:] if isinstance(value, tuple) else None,
)
def test_every_wrong_turn_says_what_to_do(change, code, says, clean, capsys):
    words = TRANSPORT.replace(*change)
    before = sorted(clean.rglob("*"))
    assert run(["transport", *words.split()]) == code, capsys.readouterr().err
    said = " ".join(capsys.readouterr().err.split())
    for part in says:
        assert part in said, said
    if code:
        assert "Traceback" not in said and "internal error" not in said
        assert said.count("gradfix:") == 1, "one line"
        assert [path for path in clean.rglob("*") if path not in before] == [], "nothing is left behind"


def test_an_output_that_is_there_is_not_overwritten_by_accident(clean, capsys):
    Path("moved").mkdir()
    Path("moved/thesis.txt").write_text("mine")
    assert run(["transport", *TRANSPORT.split()]) == 8
    assert "--overwrite" in capsys.readouterr().err
    assert Path("moved/thesis.txt").read_text() == "mine"


def test_objects_show_themselves_in_a_notebook(clean):
    """Tables with everything from outside escaped."""
    import torch

    import gradfix
    from gradfix.methods.results import Results
    from gradfix.vectors.scale import ScaleCurve
    from tests.test_results import BASE, row

    evil = "<script>alert(1)</script>"
    tau = gradfix.TaskVector({evil: torch.tensor([1.0, -1.0])})
    votes = gradfix.SignVotes({evil: torch.tensor([1, 1], dtype=torch.int8)}, 1)
    curve = ScaleCurve(0.5, [(0.0, 0.1), (0.5, 0.2)])
    results = Results.build([*BASE, row(evil, 50.0, 50.0)], versions={}, titles={})
    for thing in (tau, votes, gradfix.transport(tau, votes), curve, results):
        page = thing._repr_html_()
        assert page.count("<table>") == 1 and page.count("<tr>") > 1
        assert "<script" not in page
    assert "&lt;script&gt;" in gradfix.transport(tau, votes)._repr_html_()


def test_json_for_programs(clean, capsys):
    assert run(["transport", *TRANSPORT.split(), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["alpha"] == 0.5 and result["test_after"]["samples"] == 12
