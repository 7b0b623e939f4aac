"""The first hour of a user: the README's own commands in a clean folder, and every wrong turn on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradfix.cli import run
from gradfix.cli.options import flag
from tests.stage import setup
from tests.test_docs import ROOT, SHELL, blocks

pytestmark = pytest.mark.usefixtures("short_lessons")
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


def rewritten(name: str, text: str, encoding: str = "utf-8") -> None:
    """The data with another train file: rows of (text, label) as somebody's spreadsheet wrote them."""
    Path("my-data/train.jsonl").unlink()
    Path("my-data", name).write_bytes(text.encode(encoding))


def spreadsheet(separator: str = ",", quote: str = "", extra: str = "") -> str:
    rows = [(f"{word} {number}{extra}", word) for number in range(6) for word in ("positive", "negative")]
    lines = [separator.join(("text", "label")), *(separator.join((f"{quote}{t}{quote}", lb)) for t, lb in rows)]
    return "\n".join(lines) + "\n"


SPREADSHEETS = [
    ("semicolons", spreadsheet(";"), "utf-8", [], ["has no ',' and a ';'", "--separator ';'"]),
    ("quoted semicolons", spreadsheet(";", '"'), "utf-8", [], ["--separator ';'"]),
    ("semicolons, said", spreadsheet(";", '"'), "utf-8", ["--separator", ";"], []),
    ("windows", spreadsheet(extra=" caf\u00e9"), "cp1252", [], ["not UTF-8", "--encoding cp1252"]),
    ("windows, said", spreadsheet(extra=" caf\u00e9"), "cp1252", ["--encoding", "cp1252"], []),
    ("no such encoding", spreadsheet(), "utf-8", ["--encoding", "cp9999"], ["no encoding called 'cp9999'", "cp1252"]),
    ("utf-16", spreadsheet(), "utf-16", [], ["not UTF-8", "--encoding"]),
    ("numbers", spreadsheet().replace(",positive", ",1").replace(",negative", ",0"), "utf-8", [],
     ["label '1' is not in the label set", "--label-names"]),
    ("numbers, named", spreadsheet().replace(",positive", ",1").replace(",negative", ",0"), "utf-8",
     ["--label-names", "negative", "positive"], []),
    ("numbers beyond the names", spreadsheet().replace(",positive", ",2"), "utf-8",
     ["--label-names", "negative", "positive"], ["label 2 is outside the 2 named classes; the first is 0"]),
    ("no text column", spreadsheet().replace("text,label", "review,label"), "utf-8", [],
     ["no column 'text'", "'review'", "Name the text column (--text-column)"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "encoding", "options", "says"), [c[1:] for c in SPREADSHEETS], ids=[c[0] for c in SPREADSHEETS]
)
def test_a_spreadsheet_is_read_or_the_option_is_named(data, encoding, options, says, clean, capsys):
    Path("my-data/task.json").write_text(json.dumps({"labels": {"negative": "negative", "positive": "positive"}}))
    rewritten("train.csv", data, encoding)
    for name in ("validation", "test"):
        Path(f"my-data/{name}.jsonl").unlink()
    code = run(["transport", *TRANSPORT.split(), "--dry-run", "--force", *options])
    said = " ".join(capsys.readouterr().err.split())
    assert (code != 0) == bool(says), said
    for part in says:
        assert part in said, said
    if says:
        assert said.count("gradfix:") == 1 and "internal error" not in said


def shared_rows(count: int) -> None:
    """The first rows of train stand in test, too."""
    train, test = (Path(f"my-data/{name}.jsonl") for name in ("train", "test"))
    test.write_text(test.read_text() + "".join(train.read_text().splitlines(keepends=True)[:count]))


def test_duplicates_are_all_named_at_once_and_can_be_dropped(clean, capsys):
    shared_rows(8)
    words = ["transport", *TRANSPORT.replace("--shots 2 ", "").split()]
    assert run(words) == 5
    said = capsys.readouterr().err
    assert "8 in all" in said and said.count(" = ") == 7 and "--drop-duplicates train (or test)" in said
    assert run([*words, "--drop-duplicates", "trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    for side, samples, used in (("train", 20, "using 40 of 40"), ("test", 12, "using 48 of 48")):
        assert run([*words, "--drop-duplicates", side, "--overwrite", "--json", "found.json"]) == 0
        found = json.loads(Path("found.json").read_text())
        assert found["test_after"]["samples"] == samples
        assert any(note.startswith(used) for note in found["notes"])
    assert run(["compare", *TRIO.split(), "--task", "zero-shot", "--methods", "naive", "--json", "r.json"]) == 5
    assert run([*("compare", *TRIO.split(), "--task", "zero-shot", "--methods", "naive"), "--drop-duplicates", "test", "--json", "r.json"]) == 0  # fmt: skip
    assert json.loads(Path("r.json").read_text())["rows"][0]["shots"] == 24


def test_a_full_disk_is_known_before_the_work(clean, capsys, monkeypatch):
    from types import SimpleNamespace

    from gradfix.checkpoints import write

    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    monkeypatch.setattr("gradfix.commands.transport.setting", lambda config: pytest.fail("no example was read yet"))
    assert run(["transport", *TRANSPORT.split()]) == 8
    said = capsys.readouterr().err
    assert "4.9 KiB free" in said and "KiB are needed" in said and "--out elsewhere" in said


def test_a_single_file_of_weights_is_not_asked_for_a_tokenizer_alone(clean, capsys):
    import torch
    from safetensors.torch import load_file

    torch.save(load_file("new-base/model.safetensors"), "new.pt")
    assert run(["evaluate", "--model", "new.pt", "--data", "my-data", "--task", "classification"]) == 2
    said = capsys.readouterr().err
    assert "single file" in said and "config.json" in said and "image transform" in said and "Give the folder" in said


def test_without_options_all_labels_and_the_best_recipe_are_used(clean, capsys):
    assert run(["transport", *TRIO.split(), "--task", "zero-shot", "--out", "moved", "--json", "found.json"]) == 0
    shown = capsys.readouterr()
    assert "using 48 of 48 labelled examples" in shown.err and "what you had" in shown.out
    assert "alpha" not in shown.out.split("lessons began at")[0]
    manifest = json.loads(Path("moved/gradfix.json").read_text())
    assert manifest["details"]["method"]["name"] == "best" and manifest["details"]["command"]["shots"] == 24
    assert json.loads(Path("found.json").read_text())["had"]["samples"] == 12
    assert "what you had" in Path("moved/README.md").read_text()


def test_the_papers_way_is_a_method_and_its_options_mean_it(clean):
    common = ["transport", *TRIO.split(), "--task", "zero-shot", "--shots", "2", "-q"]
    assert run([*common, "--method", "gradfix", "--alpha", "0.5", "--out", "named"]) == 0
    assert run([*common, "--alpha", "0.5", "--out", "meant"]) == 0
    named, meant = (json.loads(Path(out, "gradfix.json").read_text())["outputs"] for out in ("named", "meant"))
    assert named["model.safetensors"] == meant["model.safetensors"]


def test_help_is_in_groups_with_examples(capsys):
    from gradfix.cli.commands import COMMANDS
    from gradfix.cli.helping import EXAMPLES, GROUPS
    from gradfix.cli.options import fields_of

    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    for command, (kind, _) in COMMANDS.items():
        loose = {name for name, field in fields_of(kind).items() if not field.metadata["positional"]} - set(listed)
        assert not loose, f"{command}: no group for {loose}"
    assert run(["transport", "--help"]) == 0
    page = capsys.readouterr().out
    places = [page.index(f"\n{group}:\n") for group in (*GROUPS, "Examples")]
    assert places == sorted(places)
    assert page.index("--base") < page.index("--head ") and page.index("--method") < page.index("--mask")
    for lines in EXAMPLES.values():
        for line in lines:
            words = line.split()
            known = {flag(name) for name in fields_of(COMMANDS[words[1]][0])} | {"--json"}
            assert {word for word in words if word.startswith("--")} <= known, line


def test_a_log_has_a_line_for_every_finished_step(capsys):
    from gradfix.cli.console import Printer, StepLog

    now = [0.0]
    log = StepLog(lambda: now[0])
    for step, took in (("reading", 1.0), ("voting", 30.0), ("writing", 2.0)):
        log(step)
        now[0] += took / 2
        log.update(f"{step}, half done")
        now[0] += took / 2
    log.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["reading: 1.0 s", "voting, half done", "voting: 30.0 s", "writing: 2.0 s"]
    quick = StepLog(lambda: 0.0)
    quick("reading")
    quick.finish()
    with Printer(None, quiet=True).stages() as stage:
        stage("nothing")
    assert capsys.readouterr().err == ""


def test_units_are_counted_down():
    from gradfix.system.meter import Countdown, span

    now, said = [0.0], []
    count = Countdown(said.append, lambda: now[0])
    for done in range(4):
        count("GradFix", done, 4)
        now[0] += 60.0
    assert said == ["GradFix (0/4)", "GradFix (1/4, about 3 min left)", "GradFix (2/4, about 2 min left)",
                    "GradFix (3/4, about 60 s left)"]  # fmt: skip
    assert [span(value) for value in (3.2, 99, 150, 9000)] == ["4 s", "99 s", "3 min", "2.5 h"]


def test_a_long_training_says_where_it_is():
    from gradfix.system.meter import step_taken, steps_told

    now, said = [0.0], []
    step_taken(1, 4)  # nobody listens
    with steps_told(said.append, lambda: now[0]):
        for total in (4, None):
            for done in range(1, 5):
                step_taken(done, total)
                now[0] += 60.0
        step_taken(1, 9)  # another training: what it takes is not known yet
        now[0] += 1.0
        step_taken(2, 9)
    step_taken(3, 9)
    assert said == ["training step (2/4, about 2 min left)", "training step (3/4, about 60 s left)", "training step (4/4)",
                    "training step 2", "training step 3", "training step 4"]  # fmt: skip


@pytest.mark.parametrize("method", ["best", "few_shot"])
def test_a_transport_tells_how_long_its_training_takes(method, clean, monkeypatch):
    from gradfix.commands.configs import TransportConfig
    from gradfix.commands.transport import run_transport
    from gradfix.system import meter

    for name in ("SOON_SECONDS", "EVERY_SECONDS"):
        monkeypatch.setattr(meter, name, 0.0)
    said = []
    words = TRANSPORT.split()
    given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2]) if name != "--alpha"}
    given |= {"shots": 2, "method": method, "validation": "none"}
    run_transport(TransportConfig(**given), said.append)
    steps = [line for line in said if line.startswith("training step")]
    assert any("left)" in line for line in steps), said
    assert steps[-1].split("(")[1].split("/")[0].isdigit()


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
