"""The demo's models in memory and on disk are the same models."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch

from gradfix import pocket
from gradfix._compat import heal_torchvision

ROLES = ("base", "tuned", "target", "target_tuned")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return pocket.materialise(tmp_path_factory.mktemp("pocket"))


@pytest.mark.parametrize("name", list(pocket.PAIRS))
@pytest.mark.parametrize("role", ROLES)
def test_folders_load_completely_and_equal_the_state_dicts(written, name, role):
    heal_torchvision()
    from transformers import ViTForImageClassification

    model, info = ViTForImageClassification.from_pretrained(written[name][role], output_loading_info=True)
    assert not any(info.values())
    expected = getattr(pocket.pair(name), role)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert [model.config.id2label[number] for number in range(10)] == list(pocket.CLASSES)


@pytest.mark.parametrize("task", pocket.TASKS)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_parquet_holds_the_same_pixels_and_names(written, task, split):
    import io

    import numpy as np
    from PIL import Image

    table = pq.read_table(written["tasks"][task] / f"{split}.parquet").to_pydict()
    pixels, labels = pocket.raw_images(split, task)
    assert table["label"] == [pocket.CLASSES[number] for number in labels]
    for row, image in list(zip(table["image"], pixels, strict=True))[::50]:
        decoded = np.asarray(Image.open(io.BytesIO(row["bytes"])))
        assert decoded.shape == (28, 28, 3)
        assert (decoded == image[:, :, None]).all()
    names = json.loads((written["tasks"][task] / "task.json").read_text())["labels"]
    assert list(names) == list(pocket.CLASSES)


def test_the_image_processor_of_a_folder_gives_the_models_pixels(written):
    heal_torchvision()
    from transformers import AutoImageProcessor

    pixels, _ = pocket.images("test")
    raw, _ = pocket.raw_images("test")
    processor = AutoImageProcessor.from_pretrained(written["related"]["target"])
    coloured = [image[:, :, None].repeat(3, axis=2) for image in raw[:8]]
    processed = processor(coloured, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(torch.as_tensor(processed), pixels[:8])


def test_loss_is_per_sample_and_the_sources_share_one_task():
    found, pair = pocket.sources()
    assert [source.name for source in found] == ["A", "B_related"]
    assert pair.name == "unrelated"
    pixels, labels = pocket.images("validation")
    losses = pocket.loss(pocket.model(found[0].tuned), (pixels[:4], labels[:4]))
    assert losses.shape == (4,) and losses.isfinite().all()


def test_models_do_not_share_memory():
    pair = pocket.pair("related")
    first, second = pocket.model(pair.target), pocket.model(pair.target)
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0
    assert next(iter(pair.target.values())).abs().sum() > 0
