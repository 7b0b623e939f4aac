"""A plan comes from config and headers alone, and its numbers move the right way."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.commands.configs import PlanConfig
from gradfix.commands.plan import Allocations, Rehearsal, run_plan
from gradfix.votes.batched.forms import BLOCK_BYTES
from gradfix.votes.collect import ENGINES, voting_parameters
from gradfix.votes.needs import Pace, Shape, VoteSetup, choose_mode, shape_of
from gradfix.votes.tally import Tally
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
    few, many = (VoteSetup(EIGHT_B, count, **COMMON).plan() for count in (100, 1000))
    assert many.flops == 10 * few.flops and many.seconds > few.seconds
    assert many.memory - few.memory >= EIGHT_B.parameters
    assert VoteSetup(EIGHT_B, 127, **COMMON).plan().memory == few.memory


def test_sharding_divides_the_weights_and_offload_does_without_them():
    one = VoteSetup(EIGHT_B, 100, **COMMON).plan()
    eight = VoteSetup(EIGHT_B, 100, **COMMON, devices=8, mode="sharded", recompute=True).plan()
    disk = VoteSetup(EIGHT_B, 100, **COMMON, mode="offload", recompute=True).plan()
    assert one.memory > 3 * EIGHT_B.parameters > eight.memory
    assert eight.traffic > 0 and disk.traffic > one.traffic
    assert choose_mode([one, eight], 80 * 2**30) is one
    assert choose_mode([one, eight], 16 * 2**30) is eight


def _label(model, batch):
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return torch.nn.functional.cross_entropy(model(**given).logits, batch["labels"], reduction="none")


def _small(kind: str, samples: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model large enough for its activations to outweigh the odds and ends, and a batch for it."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    labels = torch.zeros(samples, dtype=torch.int64)
    if kind == "vit":
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        return transformers.ViTForImageClassification(config), {
            "pixel_values": torch.randn(samples, 3, 32, 32), "labels": labels
        }  # fmt: skip
    ids = torch.randint(7, 60, (samples, 24), generator=torch.Generator().manual_seed(0))
    config = transformers.BertConfig(**sizes, vocab_size=500, max_position_embeddings=24)
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize(("kind", "engine"), [("bert", "loop"), ("vit", "loop"), ("bert", "batched")])
def test_a_walk_without_weights_takes_the_memory_of_the_engine(kind, engine, tmp_path):
    count = 1 if engine == "loop" else 6
    model, batch = _small(kind, count)
    model.eval().config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)  # the config alone
    walked = Rehearsal.of_folder(tmp_path, 24, torch.float32, "cpu").walk(count)
    tally = Tally(voting_parameters(model))
    ENGINES[engine](model, _label, batch, tally)  # the batched engine has looked at the model now
    lived = Allocations(model)
    lived.sizes |= {buffer.untyped_storage()._cdata: 0 for _, buffer in tally.items()}
    with lived:
        ENGINES[engine](model, _label, batch, tally)
    if engine == "loop":
        assert walked.memory == pytest.approx(lived.peak, rel=0.1)
    else:
        assert 0.9 * walked.bare < lived.peak < 1.1 * walked.bare + BLOCK_BYTES
    assert 0 < walked.kept <= walked.bare <= walked.memory and walked.looking < walked.memory


@pytest.mark.parametrize("family", ["bert", "clip", "gpt2", "llama", "mixtral", "siglip", "t5", "vit"])
def test_every_family_can_be_walked_through_and_no_weight_is_read(family, tmp_path, monkeypatch):
    folder = save_tiny(family, tmp_path / "target", 0)
    monkeypatch.setattr("gradfix.checkpoints.safetensors_file._read_range", None)  # any read would fail
    common = {"target": str(folder), "tokens": 12, "tflops": 0.1, "device": "cpu"}
    plans = [run_plan(PlanConfig(**common, engine=engine)) for engine in ("loop", "auto")]
    assert all(plan.notes == () for plan in plans)
    loop, batched = (plan.plans[0] for plan in plans)
    assert batched.memory > loop.memory  # a whole batch is alive at once
    assert batched.flops > 0


def test_a_model_that_nobody_knows_is_planned_by_formula(tmp_path):
    folder = save_tiny("llama", tmp_path / "target", 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    plan = run_plan(PlanConfig(target=str(folder), tflops=0.1, device="cpu"))
    assert len(plan.notes) == 1 and "sizes by formula" in plan.notes[0]
    assert plan.chosen.memory > 0


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
    assert run(["plan", "--target", str(folder), "--engine", "fast"]) == 2
    (folder / "config.json").unlink()
    assert run(["plan", "--target", str(folder)]) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": "x"}'])
def test_a_config_of_another_kind_is_named(tmp_path, text, capfd):
    folder = save_tiny("llama", tmp_path / "target", 0)
    (folder / "config.json").write_text(text)
    assert run(["plan", "--target", str(folder)]) == 3
    assert len(capfd.readouterr().err.strip().splitlines()) == 1
