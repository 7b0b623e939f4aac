"""Same seed, same settings: same bits; and what changes bits is written down."""

from __future__ import annotations

import pytest
import torch

import gradfix
from tests.reliability.world import World, say
from tests.torture.crashes import relative

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


def test_same_seed_same_settings_same_bits(world: World) -> None:
    files = []
    for name in ("one", "two"):
        folder = world.home / name
        folder.mkdir()
        assert say(world.arguments("vote", out=folder / "v.safetensors")).code == 0
        assert say(world.arguments(out=folder / "out", alpha="auto", validation="none", mask="veto")).code == 0
        files.append({p: h for p, h in relative(folder).items() if p not in ("out/gradfix.json", "out/README.md")})
    assert files[0] == files[1] and len(files[0]) >= 5
    other = world.home / "three.safetensors"
    assert say(world.arguments("vote", out=other, seed=1)).code == 0
    assert other.read_bytes() != (world.home / "one" / "v.safetensors").read_bytes()


def test_what_changes_bits_is_in_the_manifest(world: World) -> None:
    votes = world.home / "v.safetensors"
    assert say(world.arguments("vote", out=votes, batch_size=3, dtype="bf16")).code == 0
    assert say(world.arguments(votes=votes, batch_size=5)).code == 0
    told = gradfix.verify(world.out)
    assert told["details"]["computed"] == {"batch_size": 5, "dtype": "fp32", "engine": "auto", "device": "cpu"}
    assert {"threads", "cpu", "arch", "matmul", "products"} <= set(told["machine"])
    assert {"torch", "gradfix", "python", "safetensors"} <= set(told["versions"])
    origin = told["votes"]["origin"]
    assert origin["settings"]["batch_size"] == 3 and origin["settings"]["dtype"] == "bf16"
    assert origin["device"] == "cpu" and origin["machine"]["threads"] == torch.get_num_threads()
    assert told["config"]["seed"] == 0
