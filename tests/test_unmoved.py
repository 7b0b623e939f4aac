"""What is no part of the task is no part of the output: the text tower that a frozen head was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.tasks import TASKS
from tests.tiny import IMAGE_LABELS, save_tiny, toy_images, write_rows

VISION = ("vision_model.", "visual_projection.")


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    """A CLIP whose fine-tune moved both towers a little."""
    from transformers import AutoModel

    save_tiny("clip", tmp_path / "base")
    save_tiny("clip", tmp_path / "target", seed=1)
    save_tiny("clip", tmp_path / "tuned")
    tuned: Any = AutoModel.from_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    tuned.save_pretrained(tmp_path / "tuned")
    for seed, split in enumerate(("train", "validation", "test")):
        write_rows(tmp_path / "data", split, toy_images(12, seed=seed))
    prompts = {"labels": {label: f"a {label} photo" for label in IMAGE_LABELS}}
    (tmp_path / "data" / "task.json").write_text(json.dumps(prompts))
    return tmp_path


def moved(home: Path) -> set[str]:
    out, target = open_checkpoint(home / "out"), open_checkpoint(home / "target")
    return {name for name in target.names() if not torch.equal(out.read(name), target.read(name))}


def manifest(home: Path) -> dict[str, Any]:
    return dict(json.loads((home / "out" / "gradfix.json").read_text()))


@pytest.mark.parametrize(
    "method", [("--method", "naive"), ("--mask", "agree"), ("--mask", "random"), ("--method", "best")]
)
def test_no_transport_moves_the_text_tower(method: tuple[str, ...], towers: Path) -> None:
    trio = [word for role in ("base", "tuned", "target") for word in (f"--{role}", str(towers / role))]
    settled = ("--validation", "none") if "best" in method else ("--alpha", "1")
    words = ["transport", *trio, "--data", str(towers / "data"), "--task", "zero-shot", "--shots", "2"]
    assert run([*words, *method, *settled, "--no-check", "--force", "--out", str(towers / "out")]) == 0
    assert moved(towers) and all(name.startswith(VISION) for name in moved(towers))
    found = manifest(towers)
    still = [
        name for name in found["tensors"] if name.startswith("text_model.") and "position_ids" not in name
    ]
    assert still
    assert all(
        found["tensors"][name] == {"fate": "copied", "reason": "no part of the task"} for name in still
    )
    assert any("no part of the task" in note for note in found["details"]["notes"])
    assert "no part of the task" in (towers / "out" / "README.md").read_text()


def test_no_merge_moves_the_text_tower(towers: Path) -> None:
    vector = {"base": str(towers / "base"), "tuned": str(towers / "tuned"), "data": str(towers / "data")}
    recipe = {"target": str(towers / "target"), "task": "zero-shot", "method": "task_arithmetic", "order": "plain",
              "alpha": 1.0, "shots": 2, "vectors": [vector]}  # fmt: skip
    (towers / "merge.yml").write_text(yaml.safe_dump(recipe))
    assert run(["merge", str(towers / "merge.yml"), "--out", str(towers / "out")]) == 0
    assert moved(towers) and all(name.startswith(VISION) for name in moved(towers))
    assert manifest(towers)["tensors"]["logit_scale"]["reason"] == "no part of the task"


def test_a_fine_tune_of_the_text_tower_alone_is_refused(
    towers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    tuned: Any = AutoModel.from_pretrained(towers / "base")
    with torch.no_grad():
        tuned.text_projection.weight.mul_(1.1)
    tuned.save_pretrained(towers / "tuned")
    trio = [word for role in ("base", "tuned", "target") for word in (f"--{role}", str(towers / role))]
    words = ["transport", *trio, "--data", str(towers / "data"), "--task", "zero-shot", "--shots", "2"]
    assert run([*words, "--method", "naive", "--no-check", "--out", str(towers / "out")]) != 0
    assert "nothing to transport" in capsys.readouterr().err


def test_every_parameter_moves_where_the_score_sees_all(tmp_path: Path) -> None:
    bound = TASKS["zero-shot"]({"negative": "bad", "positive": "good"}).open(save_tiny("bert", tmp_path))
    assert bound.unmoved() == frozenset()
