"""What the package ships: size, disjoint images, and models that score what figures.json says."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from scripts.pocket.train import in_range, keeps_contract, learnable

from gradfix import pocket
from gradfix.errors import CorruptInput, UsageError
from gradfix.pocket import shipped

TASKS = pocket.TASKS
TUNED = [(name, task) for name in shipped.BASES for task in shipped.common_tasks((name,))]


@pytest.fixture(scope="module")
def network():
    return shipped.network()


def _accuracy(network, state, task):
    names = shipped.module_names()
    network.load_state_dict({names[name]: torch.from_numpy(value) for name, value in state.items()})
    pixels, labels = pocket.images("test", task)
    with torch.no_grad():
        right = [network(pixel_values=part).logits.argmax(-1) for part in pixels.split(150)]
    return 100 * (torch.cat(right) == labels).double().mean().item()


def test_everything_together_is_below_ten_megabytes():
    assert sum(path.stat().st_size for path in shipped.DATA.rglob("*")) <= 10_000_000


def test_no_image_is_in_two_splits():
    seen = [image.tobytes() for split in shipped.SPLITS for image in shipped.read_images(split)[0]]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("split", shipped.SPLITS)
def test_the_classes_take_turns(split):
    labels = shipped.read_images(split)[1]
    assert len(labels) >= 250
    assert (labels.reshape(-1, len(pocket.CLASSES)) == np.arange(len(pocket.CLASSES))).all()


@pytest.mark.parametrize(("name", "task"), TUNED)
def test_scores_are_those_of_the_figures(network, name, task):
    figures = pocket.figures()["figures"][task]
    zero_shot = _accuracy(network, shipped.read_base(name), task)
    assert zero_shot == pytest.approx(figures["zero_shot"][name]["test"], abs=1.5)
    tuned = _accuracy(network, shipped.read_tuned(name, task), task)
    assert tuned == pytest.approx(figures["fine_tuned"][name]["test"], abs=1.5)


def test_every_task_is_learnable_and_not_yet_known():
    for task in TASKS:
        figures = pocket.figures()["figures"][task]
        assert in_range(figures["zero_shot"]) and learnable(figures)
    assert TASKS[0] == pocket.PRIMARY
    assert len(TASKS) >= 3
    assert keeps_contract(pocket.figures()["figures"][pocket.PRIMARY])


@pytest.mark.parametrize(("name", "task"), TUNED)
def test_fine_tuning_moves_the_encoder_and_never_the_head(name, task):
    base, tuned = shipped.read_base(name), shipped.read_tuned(name, task)
    moved = {key for key in base if not np.array_equal(base[key], tuned[key])}
    assert moved == {key for key in base if not key.startswith("classifier")}


def test_the_primary_task_is_shipped_for_every_pair():
    assert pocket.pair_tasks("unrelated") == TASKS
    assert pocket.pair_tasks("related")[0] == pocket.PRIMARY
    with pytest.raises(UsageError, match="no pocket task for A and B_related called 'nothing'"):
        pocket.sources("nothing")


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(UsageError, match="Did you mean 'related'"):
        pocket.pair("relatd")
    with pytest.raises(UsageError, match=pocket.PRIMARY):
        pocket.pair("related", "no such task")
    with pytest.raises(UsageError, match="there are: train, validation, test"):
        pocket.images("dev")


def test_a_difference_of_another_size_is_refused():
    base = shipped.read_base("A")
    with pytest.raises(CorruptInput, match="3 symbols"):
        shipped.restore(base, (np.zeros(3, np.int8), np.zeros(len(base), np.float32)))


def test_importing_the_demo_does_not_import_torch():
    code = "import sys, gradfix.pocket; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
