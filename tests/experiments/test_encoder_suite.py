"""The encoders suite on tiny encoders, in a folder laid out as the real one: models/, packed/ and tasks/."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradfix.cli import run
from gradfix.errors import CorruptInput, UsageError
from gradfix.experiments import Reproduction, paper, plan_reproduce
from gradfix.experiments.encoder_suite import EncoderSuite, unpack
from gradfix.experiments.suite import Grid
from gradfix.methods.methods import METHODS
from gradfix.methods.search import Search
from gradfix.training.finetuning import Recipe
from tests.lessons import shorten
from tiny import TEXT_LABELS, save_tiny, toy_texts, write_rows

GRID = Grid(
    budgets=(1, 2), main=(1,), selection=(1,), curve=1, seeds=(0,),
    search=Search(alphas=(0.5, 1.0), wider=(), rates=(1e-3,), steps=(1,)),
)  # fmt: skip
OTHER = {"negative": "cash", "positive": "card"}


def pack(folder: Path, out: Path, tokenizer: str) -> Path:
    """A model folder as one file with its matrices in 8 bits, a scale per row."""
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 2:
            scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            weights |= {f"{name}|q": (tensor / scale).round().to(torch.int8), f"{name}|s": scale.half()}
        else:
            weights[name] = tensor.half()
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, out, metadata={"config": (folder / "config.json").read_text(), "tokenizer": tokenizer})
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("encoders")
    for seed, name in enumerate(("minilm-l6", "gte-l6", "e5-l12", "gte-l12")):
        folder = save_tiny("bert", home / "models" / name, seed)
        if name.endswith("l12"):
            pack(folder, home / "packed" / f"{name}.safetensors", "minilm-l6")
            shutil.rmtree(folder)
    for split, count, seed in (("train", 40, 1), ("validation", 12, 2), ("test", 12, 3)):
        rows = toy_texts(count, seed)
        write_rows(home / "tasks" / "movie", split, rows)
        write_rows(home / "tasks" / "banking", split, [{**row, "label": OTHER[row["label"]]} for row in rows])
    for task, labels in (("movie", TEXT_LABELS), ("banking", OTHER.values())):
        prompts = {"labels": {label: f"a {label} text" for label in labels}}
        (home / "tasks" / task / "task.json").write_text(json.dumps(prompts))
    return home


class ShortSuite(EncoderSuite):
    """Whoever gets it sent, as the processes that measure do, gives short lessons."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        shorten()
        self.__dict__.update(state)


def suite_of(home: Path, steps: int = 3) -> EncoderSuite:
    suite = ShortSuite(local={"encoders": str(home)}, recipe=Recipe(steps=steps, batch_size=8, lr=1e-3, warmup=0))
    suite.names, suite.grid = ("movie", "banking"), GRID
    return suite


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture(scope="module")
def made(home: Path, out: Path) -> Reproduction:
    return plan_reproduce(suite=suite_of(home), out=out, jobs=2).run()


def test_every_table_is_measured_by_two_processes(made: Reproduction, out: Path) -> None:
    assert set(made.content) == set(paper.LABELS)
    for name, table in made.content.items():
        cells = [cell for row in table["rows"] for cell in row]
        assert any(isinstance(cell, float | int) for cell in cells) or name == "transport_vision", name
    assert json.loads((out / "reproduction.json").read_text())["tables"].keys() == made.content.keys()


def test_the_methods_beyond_the_paper_stand_in_the_transport_table(made: Reproduction) -> None:
    rows = made.content["transport_text"]["rows"]
    for method in ("bico", "best"):
        found = [row for row in rows if row[1] == METHODS[method].title]
        assert [(row[0], row[2]) for row in found] == [("unrelated", 1), ("related", 1)]
        assert all(isinstance(cell, float) for row in found for cell in row[3:5])


def test_the_support_set_of_a_task_is_one_with_other_labels(home: Path, out: Path, made: Reproduction) -> None:
    suite = suite_of(home)
    suite.use(out, lambda _: None)
    for task, other in (("movie", "banking"), ("banking", "movie")):
        found = suite.support("related", task, "target")
        assert found is not None
        assert found.bound.labels == list(suite.data(other).labels)
    assert "banking support" in made.content["generalisation"]["header"]


def test_fine_tunes_and_answers_are_kept(home: Path, out: Path, made: Reproduction) -> None:
    folders = sorted((out / "checkpoints").iterdir())
    assert len(folders) == 8, "four models on two tasks"
    before = [path.stat().st_mtime_ns for path in folders]
    suite = suite_of(home)
    suite.open = None  # type: ignore[method-assign, assignment]
    again = plan_reproduce(suite=suite, out=out).run()
    assert again.as_json() == made.as_json()
    assert [path.stat().st_mtime_ns for path in folders] == before


def test_a_finished_table_is_there_before_the_run_ends(home: Path, tmp_path: Path) -> None:
    """The run is interrupted as soon as the cheapest table is written; the next one goes on."""

    def stopped(_: str) -> None:
        if (tmp_path / "tables" / "supervision.json").exists():
            raise KeyboardInterrupt

    planned = plan_reproduce(suite=suite_of(home, steps=1), out=tmp_path)
    planned = replace(planned, asked={name: planned.asked[name] for name in ("supervision", "flops", "masks")})
    with pytest.raises(KeyboardInterrupt):
        planned.run(stopped)
    written = json.loads((tmp_path / "reproduction.json").read_text())["tables"]
    assert "supervision" in written
    assert "masks" not in written
    assert set(planned.run().content) == {"supervision", "flops", "masks"}


def test_packed_matrices_come_back_row_by_row(home: Path, tmp_path: Path) -> None:
    stored = home / "models" / "gte-l6"
    packed = pack(stored, tmp_path / "packed" / "copy.safetensors", "gte-l6")
    with pytest.raises(UsageError, match="takes its tokenizer from"):
        unpack(packed, tmp_path / "out")
    shutil.copytree(stored, tmp_path / "models" / "gte-l6")
    unpack(packed, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (stored, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        room = tensor.abs().amax(-1, keepdim=True) / 100
        assert bool(((tensor - after[name].float()).abs() <= room).all()), name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (stored / "tokenizer.json").read_bytes()


def test_what_is_not_a_packed_model_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CorruptInput, match="not a packed model"):
        unpack(tmp_path / "a.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_folder_must_be_given_and_hold_the_models(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--local encoders=FOLDER"):
        plan_reproduce(suite="encoders")
    suite = suite_of(home)
    suite.local = {**suite.local, "gte-l6": str(tmp_path)}
    assert suite.where("gte-l6") == str(tmp_path)
    with pytest.raises(UsageError, match="no model 'e5-l12'.*--local e5-l12=FOLDER"):
        EncoderSuite(local={"encoders": str(tmp_path)}).where("e5-l12")


def test_the_command_says_what_the_suite_would_cost(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("amazon", "tweets"):
        shutil.copytree(home / "tasks" / "movie", home / "tasks" / task, dirs_exist_ok=True)
    words = ["reproduce", "masks", "--suite", "encoders", "--local", f"encoders={home}", "--dry-run"]
    assert run(words) == 0
    assert "8 fine-tunes of 400 steps" in capsys.readouterr().err
    assert run([*words, "--jobs", "0"]) == 2
    assert "--jobs must be 1 or more" in capsys.readouterr().err
