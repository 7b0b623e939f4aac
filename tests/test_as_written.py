"""What is reported is what the files hold: read back where writing rounds, and named as it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from gradfix.checkpoints.write import verify
from gradfix.commands.guard import refuse_risen
from gradfix.errors import UnsafeResult
from tests.journeys.commands import Journey, Outcome, typed
from tests.journeys.encoders import headed
from tests.journeys.kinds import load_all
from tests.journeys.scorers import tokenizer_of
from tests.journeys.toys import TEXT_LABELS, class_numbers, read_rows, tokenised

KEYS = {"config", "counts", "details", "inputs", "kept", "norm_ratio", "notes", "outputs", "survived_rounding",
        "tensors", "versions", "votes"}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    headed(folder)
    return folder


def moved(home: Path, out: Path, *words: str) -> Outcome:
    journey = Journey(load_all()["bert-headed"], home, out.parent)
    given = ("transport", *journey.trio, *journey.task, "--shots", 3, "--force", *words, "--out", out)
    return typed(*given, out=out, report=out.with_suffix(".json"))


def test_a_random_mask_and_its_seed_stand_in_the_manifest(home: Path, tmp_path: Path) -> None:
    found = moved(home, tmp_path / "out", "--mask", "random", "--alpha", "1", "--seed", "4")
    assert found.code == 0, found.message
    manifest = verify(tmp_path / "out")
    assert manifest["config"]["mask"] == "random" and manifest["config"]["seed"] == 4
    assert 0.3 < manifest["kept"] < 0.7 and found.report["kept"] == manifest["kept"]


@pytest.mark.parametrize("words", [(), ("--out-lora", "4"), ("--method", "few_shot")])
def test_all_folders_have_the_same_keys(home: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert moved(home, tmp_path / "out", *words).code == 0
    manifest = verify(tmp_path / "out")
    assert set(manifest) >= KEYS
    counts = manifest["counts"]
    assert counts["total"] == len(manifest["tensors"]) == sum(counts[k] for k in ("transported", "copied", "skipped"))


def plain_loss(folder: Path, data: Path) -> float:
    rows = read_rows(data, "test")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(**tokenised(tokenizer_of(folder), rows), labels=class_numbers(rows, TEXT_LABELS)).loss)


@pytest.mark.parametrize("command", ["transport", "merge"])
def test_where_writing_rounds_the_files_are_measured(home: Path, tmp_path: Path, command: str) -> None:
    """The loss shows it best: bfloat16 changes it in the third digit."""
    told = {}
    for dtype in ("fp32", "bf16"):
        out = tmp_path / dtype
        if command == "transport":
            found = moved(home, out, "--method", "naive", "--alpha", "1", "--out-dtype", dtype)
            entries = [found.report["test_after"], verify(out)["details"]["measured"]["test_after"]]
        else:
            vector = {"base": str(home / "base"), "tuned": str(home / "tuned"), "data": str(home / "data")}
            recipe = {"target": str(home / "target"), "task": "classification", "method": "task_arithmetic",
                      "alpha": 1.0, "order": "plain", "shots": 3, "dtype": dtype, "vectors": [vector]}  # fmt: skip
            (tmp_path / "merge.yml").write_text(json.dumps(recipe), encoding="utf-8")
            found = typed("merge", tmp_path / "merge.yml", "--out", out, out=out, report=out.with_suffix(".json"))
            tasks = [found.report["tasks"], verify(out)["details"]["tasks"]]
            entries = [next(iter(task.values()))["test_after"] for task in tasks]
        assert found.code == 0, found.message
        told[dtype] = entries[0]["loss"]
        assert [entry["loss"] for entry in entries] == pytest.approx([plain_loss(out, home / "data")] * 2, rel=1e-5)
    assert abs(told["fp32"] - told["bf16"]) > 1e-4 * told["fp32"], "the test's own premise"


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_compare_refuses_the_fine_tune_as_its_own_target(home: Path, tmp_path: Path, dry: tuple[str, ...]) -> None:
    journey = Journey(load_all()["bert-headed"], home, tmp_path)
    words = ("compare", *journey.trio[:4], "--target", journey.tuned, *journey.task, "--shots", 3, *dry)
    found = typed(*words, "--methods", "naive", "--no-finetune-target")
    assert found.code == 4 and "is the fine-tune itself" in found.message and found.seconds < 10


def test_a_rising_loss_is_refused_only_where_nothing_held_out_speaks_for_it() -> None:
    assert refuse_risen(1.0, 0.5, False, False) == [] and refuse_risen(None, None, False, False) == []
    for held_out, force in ((True, False), (False, True)):
        (note,) = refuse_risen(1.0, 2.0, held_out, force)
        assert "loss rises from 1 to 2" in note
    with pytest.raises(UnsafeResult, match="loss rises.*--force"):
        refuse_risen(1.0, 2.0, False, False)
