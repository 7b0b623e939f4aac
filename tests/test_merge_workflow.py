"""`gradfix merge` end to end on tiny models: votes once per task, one alpha, every task scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gradfix
import gradfix.commands.merge as workflow
from gradfix.cli import run
from gradfix.commands.configs import MergeConfigOptions
from gradfix.commands.merge import run_merge, run_merge_command
from gradfix.errors import DataError, IncompatibleCheckpoints, OutputError, UsageError
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.merging.recipes import load_recipe
from tiny import save_tiny, toy_texts, write_rows


def _data(folder: Path, seed: int) -> Path:
    for number, (split, count) in enumerate({"train": 12, "validation": 6, "test": 8}.items()):
        write_rows(folder, split, toy_texts(count, 10 * seed + number))
    prompts = {"negative": "a bad poor film", "positive": "a good fine film"}
    (folder / "task.json").write_text(json.dumps({"labels": prompts}))
    return folder


def _tuned(base: Path, out: Path, seed: int) -> Path:
    """A stand-in for a fine-tune: the base and small noise, in the same files."""
    out.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(base / "model.safetensors")
    moved = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    save_file(moved, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("world")
    old = save_tiny("bert", home / "old", 0)
    older = save_tiny("bert", home / "older", 2)
    return {
        "old": old,
        "older": older,
        "target": save_tiny("bert", home / "target", 1),
        "a": _tuned(old, home / "a", 1),
        "b": _tuned(older, home / "b", 2),
        "films": _data(home / "films", 0),
        "books": _data(home / "books", 1),
    }


def _recipe(tmp_path: Path, world: dict[str, Path], **values: Any) -> Path:
    data = values.pop("data", ("films", "books"))
    vectors = [
        {"base": str(world["old"]), "tuned": str(world["a"]), "data": str(world[data[0]])},
        {"base": str(world["older"]), "tuned": str(world["b"]), "data": str(world[data[1]])},
    ]
    content = {"target": str(world["target"]), "vectors": vectors, "task": "zero-shot", "shots": 2, **values}
    path = tmp_path / "merge.yml"
    path.write_text(json.dumps(content))
    return path


def test_several_tasks_one_model_one_alpha(tmp_path: Path, world: dict[str, Path]) -> None:
    path = _recipe(tmp_path, world, out=str(tmp_path / "out"))
    result = run_merge(load_recipe(path))
    assert result.order == "merge_then_mask" and result.curve is not None
    assert set(result.tasks) == {str(world["films"]), str(world["books"])}
    assert all({"test_before", "test_after"} <= set(scores) for scores in result.tasks.values())
    manifest = gradfix.verify(tmp_path / "out")
    assert manifest["details"]["recipe"]["shots"] == 2
    assert "alpha" in result.summary


def test_sources_of_one_task_share_the_votes(
    tmp_path: Path, world: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    collect = workflow.collect_votes
    monkeypatch.setattr(workflow, "collect_votes", lambda *a, **k: asked.append(1) or collect(*a, **k))
    path = _recipe(tmp_path, world, data=("films", "films"), alpha=0.5, method="mean", out=str(tmp_path / "out"))
    result = run_merge(load_recipe(path))
    assert (result.order, result.alpha, len(asked), len(result.tasks)) == ("mask_then_merge", 0.5, 1, 1)


def test_the_scored_model_is_the_written_one(tmp_path: Path, world: dict[str, Path]) -> None:
    path = _recipe(tmp_path, world, out=str(tmp_path / "out"), alpha=1.0, method="task_arithmetic")
    result = run_merge(load_recipe(path))
    from gradfix.commands.configs import EvaluateConfig
    from gradfix.commands.evaluate import run_evaluate

    for data, scores in result.tasks.items():
        again = run_evaluate(
            EvaluateConfig(model=str(tmp_path / "out"), data=data, task="zero-shot", head_from=str(world["target"]))
        )
        assert again["accuracy"] == scores["test_after"]["accuracy"]
        assert again["loss"] == pytest.approx(scores["test_after"]["loss"], rel=1e-5)


def test_a_mergekit_file_merges_plainly(tmp_path: Path, world: dict[str, Path]) -> None:
    old = tmp_path / "old.yml"
    models = [{"model": str(world["a"]), "parameters": {"weight": 0.5, "density": 0.4}}]
    old.write_text(json.dumps({"merge_method": "ties", "base_model": str(world["old"]), "models": models}))
    options = {"from_mergekit": str(old), "out": str(tmp_path / "out")}
    for target in ("old", "target"):
        result = run_merge_command(MergeConfigOptions(**options, target=str(world[target]), overwrite=True))
        assert result["order"] == "plain"
        merge_checkpoints(
            target=world[target], vectors=[Vector(world["old"], world["a"], weight=0.5)], out=tmp_path / "same",
            density=0.4, per_tensor=True, overwrite=True,
        )  # fmt: skip
        files = [tmp_path / name / "model.safetensors" for name in ("out", "same")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_manifest_says_what_became_of_the_vectors(tmp_path: Path, world: dict[str, Path]) -> None:
    path = _recipe(tmp_path, world, out=str(tmp_path / "out"), alpha=-0.5)
    result = run_merge_command(MergeConfigOptions(config=str(path)))
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    assert set(result["notes"]) <= set(manifest["notes"])
    assert 0 < manifest["kept"] < 1 and manifest["norm_ratio"] > 0 and manifest["config"]["alpha"] == -0.5
    assert "A merge of" in (tmp_path / "out" / "README.md").read_text()


def test_a_mixed_up_base_is_refused_and_force_goes_on(tmp_path: Path, world: dict[str, Path]) -> None:
    vector = {"base": str(world["older"]), "tuned": str(world["a"])}
    path = tmp_path / "mixed.yml"
    path.write_text(json.dumps({"target": str(world["target"]), "vectors": [vector], "method": "mean"}))
    options = {"config": str(path), "out": str(tmp_path / "out")}
    with pytest.raises(IncompatibleCheckpoints, match="--force .*goes on all the same"):
        run_merge_command(MergeConfigOptions(**options))
    run_merge_command(MergeConfigOptions(**options, force=True))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_dry_run_writes_nothing(tmp_path: Path, world: dict[str, Path]) -> None:
    path = _recipe(tmp_path, world, out=str(tmp_path / "out"))
    result = run_merge_command(MergeConfigOptions(config=str(path), dry_run=True))
    assert result["summary"].startswith("would write") and not (tmp_path / "out").exists()


def test_what_is_missing_is_named(tmp_path: Path, world: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="one recipe"):
        run_merge_command(MergeConfigOptions())
    for recipe in ({"config": str(_recipe(tmp_path, world))}, {"from_mergekit": "some.yml"}):
        with pytest.raises(UsageError, match="no output folder"):
            run_merge_command(MergeConfigOptions(**recipe))
    (_data(tmp_path / "bare", 3) / "validation.jsonl").unlink()
    path = _recipe(tmp_path, {**world, "bare": tmp_path / "bare"}, data=("films", "bare"), out=str(tmp_path / "o"))
    with pytest.raises(DataError, match="no validation data to choose alpha on"):
        run_merge(load_recipe(path))


@pytest.mark.parametrize("inside", ["votes", "data", "validation", "config", "from_mergekit"])
def test_an_output_that_holds_an_input_is_refused(
    tmp_path: Path, world: dict[str, Path], inside: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """--overwrite replaces the folder whole: whatever the recipe reads from there would be gone."""
    out = tmp_path / "run"
    _data(out, 0)
    gradfix.SignVotes({}, 3).save(out / "votes.safetensors")
    given = {"votes": out / "votes.safetensors", "data": out, "validation": out / "validation.jsonl"}
    vector = {"base": str(world["old"]), "tuned": str(world["a"]), "data": str(world["films"])}
    vector |= {name: str(path) for name, path in given.items() if name == inside}
    recipe = {"target": str(world["target"]), "out": str(out), "task": "zero-shot", "vectors": [vector]}
    words = ["merge", "--overwrite"]
    if inside == "from_mergekit":
        models = [{"model": str(world["a"]), "parameters": {"weight": 1.0}}]
        recipe = {"merge_method": "task_arithmetic", "base_model": str(world["old"]), "models": models}
        words += ["--target", str(world["target"]), "--out", str(out), "--from-mergekit"]
    path = (out if inside in ("config", "from_mergekit") else tmp_path) / "merge.yml"
    path.write_text(json.dumps(recipe))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert run([*words, str(path)]) == OutputError.exit_code
    assert "inputs are never modified" in capfd.readouterr().err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
