"""A verdict's command makes the model the verdict speaks of."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradfix.cli import run
from gradfix.commands.asked import asked
from gradfix.commands.configs import CompareConfig, TransportConfig
from gradfix.commands.verdict import ship_command
from gradfix.errors import UsageError
from gradfix.methods.search import Search
from tests.stage import setup

INPUTS = {"base": "old-base", "tuned": "my-fine-tune", "target": "new-base", "data": "my-data", "task": "zero-shot"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipping")
    setup("readme", folder)
    return folder


def transport(out: str, *options: str) -> dict[str, torch.Tensor]:
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    code = run(["transport", *words, "--shots", "2", "--alpha", "0.5", "--force", "--out", out, *options, "-q"])
    assert code == 0
    return load_file(f"{out}/model.safetensors")


@pytest.mark.parametrize(("method", "options"), [("naive", ["--mask", "none"]), ("gradfix_mean", ["--vote", "mean"])])
def test_a_method_by_name_is_the_transport_with_its_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: list[str]
) -> None:
    monkeypatch.chdir(folder)
    named, spelled = transport(f"{method}-1", "--method", method), transport(f"{method}-2", *options)
    assert all(torch.equal(named[name], spelled[name]) for name in named)


def test_a_mask_beside_another_method_is_refused() -> None:
    config = TransportConfig(**INPUTS, out="out", method="veto", mask="force")
    with pytest.raises(UsageError, match="--method veto means --mask veto: leave --mask out"):
        asked(config)
    with pytest.raises(UsageError, match="--method few_shot has no --alpha: leave it out"):
        asked(TransportConfig(**INPUTS, out="out", method="few_shot", alpha="2"))
    for name in ("zero_shot", "oracle", "veto_polis"):
        with pytest.raises(UsageError, match=f"no method called '{name}'; there are: mask, best, naive"):
            asked(TransportConfig(**INPUTS, out="out", method=name))


def test_the_verdict_says_how_to_ship_it() -> None:
    config = CompareConfig(**INPUTS, shots=(2, 8), seeds=(0, 1), report="page.html", validation="none")
    verdict = {"method": "veto", "transport": True, "shots": 8}
    command = ship_command(config, verdict)
    assert command is not None
    words = shlex.split(command)
    assert words[:2] == ["gradfix", "transport"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        **{f"--{name}": value for name, value in INPUTS.items()},
        "--shots": "8", "--method": "veto", "--validation": "none", "--out": "OUT",
    }  # fmt: skip
    assert ship_command(config, {**verdict, "transport": False}) is None
    few_shot = ship_command(config, {**verdict, "transport": False, "method": "few_shot"})
    assert few_shot is not None and "--method few_shot" in few_shot


COMPARED = ("naive", "one_step", "few_shot", "gradfix", "veto", "veto_polish", "random_tau", "best")


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, dict[str, Any]]:
    """One comparison of the readme's models; the rows by method."""
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", str(folder / value))]
    words[words.index("--task") + 1] = INPUTS["task"]
    file = str(folder / "results.json")
    assert run(["compare", *words, "--shots", "2", "--methods", *COMPARED, "--json", file, "-q"]) == 0
    return {row["method"]: row for row in json.loads(Path(file).read_text())["rows"]}


@pytest.mark.parametrize("method", COMPARED)
def test_what_is_shipped_scores_what_was_compared(
    folder: Path, compared: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.chdir(folder)
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    out = f"shipped-{method}"
    rest = ["--shots", "2", "--method", method, "--out", out, "--force", "--json", f"{out}.json", "-q"]
    assert run(["transport", *words, *rest]) == 0
    result, row = json.loads(Path(f"{out}.json").read_text()), compared[method]
    assert result["test_after"]["accuracy"] == pytest.approx(row["accuracy"])
    assert result["fewshot_loss_after"] == pytest.approx(row["loss_after"], rel=1e-4)
    assert run(["verify", out, "-q"]) == 0
    model = ["--model", out, "--head-from", "new-base", "--data", "my-data", "--task", "zero-shot"]
    assert run(["evaluate", *model, "--json", "again.json", "-q"]) == 0
    assert json.loads(Path("again.json").read_text())["accuracy"] == pytest.approx(row["accuracy"])


BOTH_WAYS = (
    "naive", "gradfix", "gradfix_mean", "force", "magnitude", "random", "veto", "veto_polish", "few_shot", "transfusion",
)  # fmt: skip
SEEDS = (3, 4)


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("validation", ["own", "none"])
def test_alpha_and_margin_are_those_of_the_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch, validation: str
) -> None:
    monkeypatch.chdir(folder)
    for user in ("trial", "comparison"):  # fewer points, the same rules
        monkeypatch.setattr(f"gradfix.methods.{user}.Search", Search.quick)
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    words += ["--shots", "4", "-q"] + (["--validation", "none"] if validation == "none" else [])
    file = f"both-{validation}.json"
    seeds = ["--seeds", *map(str, SEEDS)]
    assert run(["compare", *words, *seeds, "--methods", *BOTH_WAYS, "--json", file]) == 0
    results = json.loads(Path(file).read_text())
    rows = {(row["method"], row["seed"]): row for row in results["rows"]}
    for (method, seed), row in rows.items():
        if method == "zero_shot":
            continue
        rest = ["--method", method, "--seed", str(seed), "--out", "unwritten", "--force", "--dry-run", "--no-check"]
        assert run(["transport", *words, *rest, "--json", "shipped.json"]) == 0
        shipped = json.loads(Path("shipped.json").read_text())
        found = (shipped["alpha"], shipped["margin"], shipped["test_after"]["accuracy"])
        assert found == pytest.approx((row["alpha"], row["margin"], row["accuracy"])), (method, seed)
        said = [note for note in shipped["notes"] if note.startswith("alpha 0 scored best")]
        assert not said or shipped["alpha"] == 0 or method == "veto_polish"
    assert not Path("unwritten").exists()


def judged(folder: Path, **changes: Any) -> str:
    """The results with a verdict of the test's own making."""
    content = json.loads((folder / "results.json").read_text())
    for verdict in content["verdicts"]:
        verdict.update(changes)
    file = folder / f"judged-{changes.get('method', 'other')}.json"
    file.write_text(json.dumps(content))
    return str(file)


def by_verdict(file: str, out: str, *options: str) -> int:
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    return run(["transport", *words, "--force", "--verdict", file, "--out", out, *options, "-q"])


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("method", ["few_shot", "veto"])
def test_best_with_a_verdict_ships_the_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(folder)
    file = judged(folder, method=method, transport=method != "few_shot")
    assert by_verdict(file, f"verdict-{method}", "--method", "best", "--shots", "2") == 0
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    rest = ["--shots", "2", "--method", method, "--out", f"named-{method}", "--force", "-q"]
    assert run(["transport", *words, *rest]) == 0
    told, named = (load_file(f"{kind}-{method}/model.safetensors") for kind in ("verdict", "named"))
    assert all(torch.equal(told[name], named[name]) for name in named)
    manifest = json.loads(Path(f"verdict-{method}/gradfix.json").read_text())
    assert any(f"{method} is the verdict" in note for note in manifest["details"]["notes"])
    card = Path(f"verdict-{method}/README.md").read_text()
    assert ("nothing of my-fine-tune is in it" in card) == (method == "few_shot")
    assert "--verdict" not in card


@pytest.mark.usefixtures("compared")
def test_a_verdict_that_does_not_fit_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    keep = judged(folder, method="zero_shot", transport=False, advice="Do not transport: keep the target as it is.")
    cases = [
        (keep, ["--shots", "2"], 6, "Do not transport: keep the target as it is. Nothing was written."),
        ("results.json", ["--shots", "5"], 2, "has verdicts for 2 examples per class, not for 5; choose one by --shots"),
        ("results.json", ["--shots", "2", "--mask", "force"], 2, "leave --method and --mask out"),
        ("results.json", ["--shots", "2", "--target", "old-base"], 4, "on other weights than these (--target)"),
        ("results.json", ["--shots", "2", "--validation", "none"], 2, "this transport chooses by folds"),
        ("nowhere.json", ["--shots", "2"], 3, "does not exist; write one with `gradfix compare --json`"),
    ]  # fmt: skip
    for file, options, code, text in cases:
        assert by_verdict(file, "refused", *options) == code
        assert text in " ".join(capsys.readouterr().err.split())
    content = json.loads(Path("results.json").read_text())
    del content["verdicts"][0]["regime"]
    Path("damaged.json").write_text(json.dumps(content))
    assert by_verdict("damaged.json", "refused", "--shots", "2") == 3
    assert not Path("refused").exists()


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("provenance", 0, "inputs"), "?"), (("provenance", 0, "data"), []), (("provenance", 0, "config"), None),
        (("verdicts", 0, "regime"), []), (("verdicts",), []),
    ],
)  # fmt: skip
def test_damaged_results_are_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...], value: Any
) -> None:
    monkeypatch.chdir(folder)
    content = json.loads(Path(judged(folder, method="veto", transport=True)).read_text())
    part = content
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    Path("damaged.json").write_text(json.dumps(content))
    assert by_verdict("damaged.json", "damaged", "--shots", "2") == 3


@pytest.mark.usefixtures("compared")
def test_a_verdict_on_other_data_or_another_task_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    file = judged(folder, method="veto", transport=True)
    shutil.copytree("my-data", "other-data")
    table = next(path for path in Path("other-data").iterdir() if path.stem == "test")
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    cases = [
        (["--data", "other-data"], 5, "on other test examples than those of"),
        (["--max-length", "7"], 2, "with another max_length of the task"),
    ]
    for options, code, text in cases:
        assert by_verdict(file, "refused", "--shots", "2", *options) == code
        assert text in " ".join(capsys.readouterr().err.split())


STRAYS = [
    ("--mask veto --margin 1.5", "must lie between 0 and 1"),
    ("--mask agree --margin 0.4", "--mask agree reads no --margin (veto would)"),
    ("--mask none --votes v.safetensors", "--mask none reads no --votes"),
    ("--mask none --vote rubbish", "no --vote called 'rubbish'"),
    ("--mask magnitude --vote mean", "--mask magnitude reads no --vote"),
    ("--votes v.safetensors --vote mean", "leave --vote out"),
    ("--mask agree --unlabelled u.jsonl", "--unlabelled is for --method best"),
    ("--method veto --unlabelled u.jsonl", "has no --unlabelled"),
    ("--method gradfix --vote mean", "means --vote majority"),
    ("--method rebasin --align transfusion", "means --align rebasin"),
    ("--head cpoy", "Did you mean 'copy'?"),
]


@pytest.mark.parametrize(("options", "text"), STRAYS)
def test_an_option_that_nothing_reads_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, text: str
) -> None:
    monkeypatch.chdir(folder)
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    assert run(["transport", *words, "--out", "stray", *options.split(), "-q"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_given_margin_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    named = transport("margin-1", "--method", "veto", "--margin", "0.4")
    spelled = transport("margin-2", "--mask", "veto", "--margin", "0.4")
    assert all(torch.equal(named[name], spelled[name]) for name in named)
    assert json.loads(Path("margin-1/gradfix.json").read_text())["config"]["margin"] == 0.4


def test_the_command_takes_the_first_seed_of_the_comparison() -> None:
    config = CompareConfig(**INPUTS, seeds=(4, 5), unlabelled="more.jsonl")
    verdict = {"method": "veto", "transport": True, "shots": 8}
    command = str(ship_command(config, verdict))
    assert "--seed 4" in command and "--unlabelled" not in command


def test_votes_from_a_file_need_no_gradients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    asked = words[4:]
    assert run(["vote", *asked, "--shots", "2", "--out", "v.safetensors", "-q"]) == 0

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gradients were computed")

    for user in ("methods.support.collect_votes", "methods.support.collect_gradient"):
        monkeypatch.setattr(f"gradfix.{user}", refuse)
    rest = ["--votes", "v.safetensors", "--shots", "2", "--validation", "none", "--force", "--out", "voted"]
    assert run(["transport", *words, *rest, "--json", "voted.json", "-q"]) == 0
    content = json.loads(Path("voted.json").read_text())
    assert any("none was held out" in note for note in content["notes"])


def test_a_page_is_refused_before_the_weights_and_never_written_dry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = [word for name, value in INPUTS.items() for word in (f"--{name}", value)]
    rest = ["--shots", "2", "--alpha", "0.5", "--force", "--report", "page.html", "-q"]
    assert run(["transport", *words, *rest, "--out", "dry", "--dry-run"]) == 0
    assert not Path("page.html").exists()
    shutil.copytree("my-data", "no-test")
    next(path for path in Path("no-test").iterdir() if path.stem == "test").unlink()
    words[words.index("my-data")] = "no-test"
    assert run(["transport", *words, *rest, "--out", "untested"]) == 5
    assert not Path("untested").exists()
