"""Options as people type them: lists, outputs, splits, and what a dry run must say before the run does."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest

from gradfix.cli import run
from gradfix.cli.commands import COMMANDS
from gradfix.cli.options import expand_lists
from gradfix.commands.configs import CompareConfig, help_text
from tests.stage import setup

TRIO = ["--base", "bert-old", "--tuned", "bert-old-reviews", "--target", "bert-new"]
DATA = ["--data", "reviews", "--task", "zero-shot"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    setup("bert-zero-shot", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(argv: list[str], capsys) -> tuple[int, str]:
    code = run(argv)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("typed", [["--methods", "--shots", "5"], ["--shots", "5", "--methods"], ["--seeds", "-q"]])
def test_a_list_without_values_is_a_usage_error(typed, capsys):
    code, said = refusal(["compare", *TRIO, *DATA, *typed], capsys)
    assert code == 2
    assert "needs at least one value" in said


def test_a_short_flag_ends_a_list_and_a_negative_number_does_not():
    assert expand_lists(["compare", "--seeds", "0", "1", "-q"], CompareConfig) == [
        "compare", "--seeds", "0", "--seeds", "1", "-q"
    ]  # fmt: skip
    assert expand_lists(["--seeds", "-1", "2"], CompareConfig) == ["--seeds", "-1", "--seeds", "2"]


FINETUNE = ["finetune", "--model", "bert-new", "--task", "zero-shot", "--steps", "1", "--out", "tuned"]


def test_finetune_does_not_train_on_test_rows(here, capsys):
    code, said = refusal([*FINETUNE, "--data", "reviews/test.jsonl"], capsys)
    assert code == 5
    assert "only a test split" in said
    shutil.copy("reviews/test.jsonl", "reviews/train.jsonl")
    code, said = refusal([*FINETUNE, "--data", "reviews"], capsys)
    assert code == 5
    assert "the same example is in train" in said and "12 in all" in said and "--drop-duplicates train" in said
    assert not Path("tuned").exists()


def test_evaluate_names_the_splits_there_are(here, capsys):
    command = ["evaluate", "--model", "bert-new", "--task", "zero-shot", "--data", "reviews/train.jsonl"]
    code, said = refusal([*command, "--split", "rubbish"], capsys)
    assert code == 5
    assert "there are: train" in said
    for split in ([], ["--split", "train"]):
        assert run([*command, *split]) == 0
        assert "48 examples of train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["vote", "--target", "bert-new", *DATA, "--out", "same", "--json", "./same"],
        ["compare", *TRIO, *DATA, "--json", "same", "--report", "same"],
        ["compare", *TRIO, *DATA, "--json", "page.md", "--report", "page.html"],
    ],
)
def test_two_outputs_are_never_one_file(command, here, capsys):
    code, said = refusal(command, capsys)
    assert code == 2
    assert "two outputs would be written to" in said


def under_a_prefix(folder: Path, prefix: str) -> None:
    """The same model, saved as a part of a larger one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {f"{prefix}.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def test_a_dry_compare_refuses_what_the_comparison_would(here, capsys):
    command = ["compare", *TRIO, "--task", "zero-shot", "--dry-run", "--shots", "2"]
    Path("no-train").mkdir()
    shutil.copy("reviews/test.jsonl", "no-train/test.jsonl")
    code, said = refusal([*command, "--data", "no-train"], capsys)
    assert code == 5
    assert "has no train split" in said
    shutil.copy("reviews/test.jsonl", "more.jsonl")
    code, said = refusal([*command, "--data", "reviews", "--unlabelled", "more.jsonl"], capsys)
    assert code == 5
    assert "the same example is in unlabelled" in said
    under_a_prefix(here / "bert-new", "bert")
    assert run([*command, "--data", "reviews"]) == 0


def test_a_dry_compare_refuses_a_zero_vector_and_a_missing_head_as_the_comparison_does(here, capsys):
    for trio, task, more in (
        (["--base", "bert-old", "--tuned", "bert-old", "--target", "bert-new"], "zero-shot", []),
        (TRIO, "classification", []),
    ):
        command = ["compare", *trio, "--task", task, "--data", "reviews", "--shots", "2", "--methods", "naive", *more]
        dry = refusal([*command, "--dry-run"], capsys)
        assert dry[0] != 0
        assert dry == refusal(command, capsys)


def test_inspect_sees_through_a_prefix(here, capsys):
    under_a_prefix(here / "bert-new", "bert")
    assert run(["inspect", "bert-old", "bert-old-reviews", "bert-new", "--json", "seen.json"]) == 0
    notes = " ".join(json.loads(Path("seen.json").read_text())["notes"])
    assert "cannot be combined" not in notes
    assert "are equal" not in notes
    assert "cosine of base and target" in notes


def test_inspect_does_not_call_strangers_equal(here, capsys):
    from safetensors.torch import load_file, save_file

    file = here / "bert-new" / "model.safetensors"
    save_file({f"{name}.other": t for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    assert run(["inspect", "bert-old", "bert-old-reviews", "bert-new", "--json", "seen.json"]) == 0
    notes = " ".join(json.loads(Path("seen.json").read_text())["notes"])
    assert "nothing was measured" in notes
    assert "are equal" not in notes and "cosine" not in notes


def recipe(here: Path, **more: object) -> str:
    vector = {"base": "bert-old", "tuned": "bert-old-reviews", "data": "reviews"}
    vectors = [vector, vector | {"label_column": "mood"}] if more.pop("moods", False) else [vector]
    content = {"target": "bert-new", "task": "zero-shot", "shots": 2, "out": "merged", "vectors": vectors, **more}
    (here / "recipe.yml").write_text(json.dumps(content))  # JSON is YAML
    return "recipe.yml"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_merge_sees_an_occupied_output_before_it_works(dry, here, capsys, monkeypatch):
    from gradfix.commands import merge as merging

    monkeypatch.setattr(merging, "setting", lambda *_: pytest.fail("data was read first"))
    Path("merged").mkdir()
    Path("merged", "mine.txt").touch()
    assert run(["merge", recipe(here), *dry]) == 8
    assert "merged" in capsys.readouterr().err


def test_two_labels_of_one_file_are_scored_apart(here):
    for file in Path("reviews").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        flipped = dict(zip(sorted({row["label"] for row in rows}), ("up", "down")))
        file.write_text("".join(json.dumps(row | {"mood": flipped[row["label"]]}) + "\n" for row in rows))
    assert run(["merge", recipe(here, moods=True), "--dry-run", "--json", "m.json"]) == 0
    tasks = json.loads(Path("m.json").read_text())["tasks"]
    assert set(tasks) == {"reviews", "reviews (label_column mood)"}


WITH_CHOICES = [
    (command, field) for command, (kind, _) in COMMANDS.items() for field in fields(kind) if field.metadata["choices"]
]


@pytest.mark.parametrize(("command", "field"), WITH_CHOICES, ids=lambda one: getattr(one, "name", one))
def test_help_lists_the_names_of_the_registry(command, field):
    registry = resolve_name(field.metadata["choices"])
    shown = help_text(field)
    assert all(re.search(rf"\b{re.escape(name)}\b", shown) for name in registry)


def test_no_help_text_spells_a_registry_out():
    """A list typed into a help text is one that a new plug-in is missing from; a pair of names may be meant."""
    registries = {field.metadata["choices"]: None for _, field in WITH_CHOICES}
    for kind, _ in COMMANDS.values():
        for field in fields(kind):
            words = set(re.findall(r"[\w-]+", field.metadata["help"]))
            for home in registries:
                assert len(words & set(resolve_name(home))) < 3, (field.name, home)
