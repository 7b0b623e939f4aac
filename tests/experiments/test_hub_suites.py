"""The paper's suites through the real loading code, on stand-ins in the same formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.stand_ins import write_dataset
from gradfix import pocket
from gradfix.checkpoints.open import open_checkpoint
from gradfix.data import few_shot
from gradfix.errors import DataError
from gradfix.experiments import paper, plan_reproduce
from gradfix.experiments.hub_suites import OPEN_CLIP, T5, HubSuite, OpenClipSuite, T5Suite
from gradfix.experiments.paper import IMAGENET_R, TEXT, VISION, load
from gradfix.experiments.suite import Grid, PocketSuite
from gradfix.methods.methods import METHODS
from gradfix.methods.search import Search
from gradfix.training.finetuning import Recipe
from tiny import save_tiny

SMALL = Recipe(steps=2, batch_size=4, lr=1e-3, warmup=0)
GRID = Grid(
    budgets=(1,), main=(1,), selection=(1,), curve=1, seeds=(0,),
    search=Search(alphas=(0.5, 1.0), wider=(), rates=(1e-3,), steps=(1,)),
)  # fmt: skip
SMALL_VISION = {
    "eurosat": replace(VISION["eurosat"], classes=("forest", "river", "sea")),
    "svhn": replace(VISION["svhn"], classes=("0", "1")),
}


def key(declared: paper.Declared) -> str:
    return f"{declared.hub}:{declared.config}" if declared.config else declared.hub


@pytest.fixture(scope="module")
def openclip(tmp_path_factory: pytest.TempPathFactory) -> OpenClipSuite:
    home = tmp_path_factory.mktemp("openclip")
    model = OPEN_CLIP["ViT-B-16"]
    names = [model.base, model.target, model.sources[1]]
    local = {name: str(save_tiny("open_clip", home / f"m{i}", seed=i)) for i, name in enumerate(names)}
    for declared in (*SMALL_VISION.values(), IMAGENET_R):
        local[key(declared)] = str(write_dataset(home / key(declared).replace(":", "-"), declared, 4))
    suite = OpenClipSuite(local=local, recipe=SMALL, out=home / "out")
    suite.models = {"ViT-B-16": replace(model, sources=(model.base, model.sources[1]))}
    suite.datasets, suite.grid = SMALL_VISION, GRID
    return suite


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("table", ["transport_vision", "merging", "generalisation", "supervision", "subset_selection"])
def test_open_clip_tables_on_stand_ins(openclip, table):
    config = {"table": table, "out": str(openclip.out)}
    made = plan_reproduce(**config, suite=openclip).run().as_json()["tables"][table]
    measured = [cell for row in made["rows"] for cell in row if isinstance(cell, float)]
    assert measured
    assert all(cell >= 0 for cell in measured)


@pytest.mark.usefixtures("short_lessons")
def test_the_papers_figures_stand_per_task(openclip):
    config = {"table": "transport_vision", "out": str(openclip.out)}
    table = plan_reproduce(**config, suite=openclip).run().as_json()["tables"]["transport_vision"]
    row = next(row for row in table["rows"] if row[1] == METHODS["gradfix"].title)
    assert row[table["header"].index("paper svhn")] == 71.07


@pytest.mark.usefixtures("short_lessons")
def test_fine_tunes_are_kept_and_complete(openclip):
    plan_reproduce(table="transport_vision", out=str(openclip.out), suite=openclip).run()
    folders = sorted(path.name for path in (openclip.out / "checkpoints").iterdir())
    assert any(name.startswith("open_clip-ViT-B-16-datacomp_xl_s13b_b90k-svhn-") for name in folders)
    assert not any(name.startswith(".") for name in folders)
    before = (openclip.out / "checkpoints" / folders[0] / "gradfix.json").stat().st_mtime_ns
    openclip.finetuned(OPEN_CLIP["ViT-B-16"].base, "svhn")
    assert (openclip.out / "checkpoints" / folders[0] / "gradfix.json").stat().st_mtime_ns == before
    base = open_checkpoint(openclip.where(OPEN_CLIP["ViT-B-16"].base))
    tuned = open_checkpoint(openclip.finetuned(OPEN_CLIP["ViT-B-16"].base, "svhn"))
    moved = [n for n in base.names() if not bool((base.read(n) == tuned.read(n)).all())]
    assert moved
    assert all(name.startswith("visual.") for name in moved), "the text tower is frozen"


@pytest.mark.usefixtures("short_lessons")
def test_t5_table_on_stand_ins(tmp_path):
    chosen = {name: TEXT[name] for name in ("rte", "scitail")}
    local = {
        T5["T5"].base: str(save_tiny("t5", tmp_path / "a", seed=0)),
        T5["T5"].target: str(save_tiny("t5", tmp_path / "b", seed=1)),
    }
    for declared in chosen.values():
        local[key(declared)] = str(write_dataset(tmp_path / key(declared).replace(":", "-"), declared, 6))
    suite = T5Suite(local=local, recipe=SMALL)
    suite.datasets, suite.grid = chosen, replace(GRID, budgets=(2,), main=(2,), selection=(2,), curve=2)
    config = {"table": "transport_text", "out": str(tmp_path / "out")}
    table = plan_reproduce(**config, suite=suite).run().as_json()["tables"]["transport_text"]
    rows = {(row[1], row[2]): row for row in table["rows"]}
    assert rows[METHODS["gradfix"].title, 2][3] is not None
    assert rows[METHODS["oracle"].title, None][table["header"].index("paper rte")] == 72.93
    assert suite.data("scitail").labels == {"entailment": "yes", "neutral": "no"}
    assert suite.data("rte").splits["train"][0]["text"].startswith("Premise: ")


@pytest.mark.parametrize("name", [*VISION, *TEXT])
def test_every_declared_dataset_loads(tmp_path, name):
    declared = {**VISION, **TEXT}[name]
    folder = write_dataset(tmp_path / "data", declared, 3)
    data = load(declared, {key(declared): str(folder)})
    assert set(data.splits) == {"train", "validation", "test"}
    assert len(data.labels) == declared.class_count
    prompts = [prompt for given in data.labels.values() for prompt in ([given] if isinstance(given, str) else given)]
    assert len(set(prompts)) == len(prompts)
    assert all("{" not in prompt for prompt in prompts)
    contents = [{row.content for row in data.splits[split]} for split in ("train", "validation", "test")]
    assert not contents[0] & contents[1]
    assert not contents[0] & contents[2]


def test_a_dataset_of_another_size_is_refused(tmp_path):
    folder = write_dataset(tmp_path, replace(VISION["svhn"], classes=("0", "1")), 2)
    with pytest.raises(DataError, match="2 classes, 10 were declared"):
        load(VISION["svhn"], {key(VISION["svhn"]): str(folder)})


def test_a_missing_split_is_named(tmp_path):
    folder = write_dataset(tmp_path, replace(SMALL_VISION["svhn"], test="extra"), 2)
    with pytest.raises(DataError, match="no split 'test'"):
        load(SMALL_VISION["svhn"], {key(VISION["svhn"]): str(folder)})


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("suite", ["openclip", "t5", "pocket"])
def test_the_cost_is_known_before_anything_starts(suite, quick):
    job = plan_reproduce(suite=suite, quick=quick)
    assert job.questions
    assert job.estimate.flops > 0
    assert job.estimate.seconds > 0
    assert job.suite.asks_first == isinstance(job.suite, HubSuite)
    if isinstance(job.suite, HubSuite):
        assert "fine-tunes of 2000 steps" in job.estimate.words
        assert job.out == Path(f"gradfix-reproduce-{suite}")


def test_quick_costs_less():
    for suite in ("pocket", "openclip", "t5"):
        full, quick = (plan_reproduce(suite=suite, quick=q).estimate for q in (False, True))
        assert quick.flops < full.flops


def test_the_pocket_suite_opens_the_embedded_models():
    suite = PocketSuite(quick=True)
    assert suite.tasks("unrelated") == tuple(pocket.TASKS)
    scene = suite.open("unrelated", pocket.PRIMARY)
    assert scene.samples == pocket.figures()["images"]["all"]
    assert len(few_shot(scene.trial.splits.train, 5, 0)) == 50
    assert not any(name.startswith("classifier.") for name in scene.trial.bound.trainable())
    batch = next(iter(scene.base().batches(scene.trial.splits.test[:4])))
    assert scene.trial.bound.features(scene.trial.model, batch).shape == (4, 128)
    side = suite.support("unrelated", pocket.PRIMARY, "target")
    assert len(side.examples) == 300
