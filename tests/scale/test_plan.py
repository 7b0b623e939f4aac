"""A plan comes from config and headers alone, and its numbers move the right way."""

from __future__ import annotations

import json

import pytest
import torch

from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.planning import Pace, Shape, choose_mode, plan_vote, shape_of
from tiny import save_tiny

EIGHT_B = Shape(8_030_261_248, 525_336_576, 16_060_522_496, 32, 4096, 14336, 128_256, 512)
COMMON = {"dtype": torch.bfloat16, "batch": 1, "pace": Pace(4e14)}


def test_the_shape_is_read_off_without_weights(tmp_path, monkeypatch):
    folder = save_tiny("llama", tmp_path / "target", 0)
    monkeypatch.setattr("gradfix.checkpoints.safetensors_file._read_range", None)  # any read would fail
    shape = shape_of(open_checkpoint(folder), 64)
    assert (shape.layers, shape.hidden, shape.inner, shape.tokens) == (2, 32, 48, 64)
    assert shape.largest == shape.vocabulary * 32
    vit = shape_of(open_checkpoint(save_tiny("vit", tmp_path / "vit", 0)))
    assert (vit.tokens, vit.vocabulary) == (5, 0)


def test_more_samples_cost_time_and_from_128_on_memory():
    few, many = (plan_vote(EIGHT_B, count, **COMMON) for count in (100, 1000))
    assert many.flops == 10 * few.flops and many.seconds > few.seconds
    assert many.memory - few.memory >= EIGHT_B.parameters
    assert plan_vote(EIGHT_B, 127, **COMMON).memory == few.memory


def test_sharding_divides_the_weights_and_offload_does_without_them():
    one = plan_vote(EIGHT_B, 100, **COMMON)
    eight = plan_vote(EIGHT_B, 100, **COMMON, devices=8, mode="sharded", recompute=True)
    disk = plan_vote(EIGHT_B, 100, **COMMON, mode="offload", recompute=True)
    assert one.memory > 3 * EIGHT_B.parameters > eight.memory
    assert eight.traffic > 0 and disk.traffic > one.traffic
    assert choose_mode([one, eight], 80 * 2**30) is one
    assert choose_mode([one, eight], 16 * 2**30) is eight


def test_the_command(tmp_path, capsys):
    folder = save_tiny("llama", tmp_path / "target", 0)
    assert run(["plan", "--target", str(folder), "--shots", "5", "--devices", "2", "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["samples"] == 10 and content["fits"]
    assert {mode["mode"] for mode in content["modes"]} == {
        "one device",
        "data parallel",
        "sharded",
        "offload",
    }
    assert content["disk"]["output_folder"] == content["target"]["file_bytes"]
    assert run(["plan", "--target", str(folder), "--shots", "0"]) == 2
    (folder / "config.json").unlink()
    assert run(["plan", "--target", str(folder)]) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": "x"}'])
def test_a_config_of_another_kind_is_named(tmp_path, text, capfd):
    folder = save_tiny("llama", tmp_path / "target", 0)
    (folder / "config.json").write_text(text)
    assert run(["plan", "--target", str(folder)]) == 3
    assert len(capfd.readouterr().err.strip().splitlines()) == 1
