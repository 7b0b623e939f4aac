"""Narrow dtypes: an update that rounding absorbs is said to be absorbed, and quantised weights are refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import gradfix
from adapters import load, train_adapter
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult
from tests.tiny import save_tiny


def test_rounding_the_target_is_no_part_of_the_update(tmp_path):
    draw = torch.Generator().manual_seed(0)
    base, target = (torch.randn(1000, generator=draw) for _ in range(2))
    given = {"base": {"w": base}, "tuned": {"w": base + 1e-8 * base.sign()}, "mask": "none"}
    given["tuned"]["w"][0] += 0.5
    report = gradfix.transport_checkpoint(**given, target={"w": target}, out=tmp_path / "out", dtype="bf16")
    moved = open_checkpoint(tmp_path / "out").read("w") != target.bfloat16()
    assert moved[0] and report.tensors["w"]["survived_rounding"] < 0.02
    assert "rounding absorbs" in report.notes[0]
    half = target.bfloat16().float()
    with pytest.raises(UnsafeResult, match="rounding .* absorbs the whole update"):
        gradfix.transport_checkpoint(
            base={"w": base}, tuned={"w": base + 1e-7}, target={"w": half + 1e-6}, out=tmp_path / "none",
            mask="none", dtype="bf16",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "fp16", None])
def test_a_visible_update_survives_in_every_dtype(tmp_path, dtype):
    base, target = torch.zeros(50), torch.linspace(1, 2, 50).bfloat16()
    report = gradfix.transport_checkpoint(
        base={"w": base}, tuned={"w": base + 0.5}, target={"w": target}, out=tmp_path / "out", mask="none",
        dtype=dtype, force=True,
    )  # fmt: skip
    assert report.survived == 1.0


def fp8(value: float) -> dict[str, torch.Tensor]:
    return {"experts.up_proj": torch.full((4, 8), value).to(torch.float8_e4m3fn), "norm.weight": torch.ones(8)}


def test_one_byte_floats_are_refused_whatever_they_are_called(tmp_path):
    match = "'experts.up_proj' .* is torch.float8_e4m3fn: quantised"
    for dtype in (None, "fp32"):
        with pytest.raises(IncompatibleCheckpoints, match=match):
            gradfix.transport_checkpoint(
                base=fp8(1.0), tuned=fp8(1.125), target=fp8(2.0), out=tmp_path / "out", mask="none", dtype=dtype
            )
    with pytest.raises(IncompatibleCheckpoints, match=match):
        gradfix.TaskVector.between(fp8(1.0), fp8(1.125))


def packed(value: int) -> dict[str, torch.Tensor]:
    blocks = torch.full((4, 8), value, dtype=torch.uint8)
    return {"experts.down_proj_blocks": blocks, "norm.weight": torch.full((8,), 1 + value / 100)}


def test_packed_integers_may_not_differ(tmp_path):
    with pytest.raises(IncompatibleCheckpoints, match="'experts.down_proj_blocks' .* is torch.uint8: quantised"):
        gradfix.transport_checkpoint(
            base=packed(1), tuned=packed(2), target=packed(3), out=tmp_path / "out", mask="none"
        )
    with pytest.raises(IncompatibleCheckpoints, match="uint8: quantised"):
        gradfix.TaskVector.between(packed(1), packed(2))
    same = {**packed(2), "experts.down_proj_blocks": packed(1)["experts.down_proj_blocks"]}
    report = gradfix.transport_checkpoint(
        base=packed(1), tuned=same, target=packed(3), out=tmp_path / "out", mask="none"
    )
    assert report.tensors["experts.down_proj_blocks"]["reason"] == "not a floating tensor"


def test_an_adapter_on_a_quantised_base_is_refused(tmp_path):
    base = save_tiny("llama", tmp_path / "base", 0)
    train_adapter(load(base, "CausalLM"), tmp_path / "lora", target_modules=["q_proj"])
    state = open_checkpoint(base).state()
    state = {n: t.to(torch.float8_e4m3fn) if "q_proj" in n else t.clone() for n, t in state.items()}
    save_file(state, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncompatibleCheckpoints, match=r"q_proj.weight' .* is torch.float8_e4m3fn: quantised"):
        gradfix.TaskVector.between(base, tmp_path / "lora")


def test_an_adapter_leaves_other_tensors_their_dtype(tmp_path):
    base = save_tiny("bert", tmp_path / "base", 0, torch.bfloat16)
    ids = torch.arange(2**24 + 1, 2**24 + 5)[None]
    state = {n: t.clone() for n, t in open_checkpoint(base).state().items()} | {"embeddings.position_ids": ids}
    save_file(state, base / "model.safetensors", {"format": "pt"})
    train_adapter(load(base, ""), tmp_path / "lora", target_modules=["query"])
    seen = open_checkpoint(tmp_path / "lora", base=base)
    assert all(seen.read(name).dtype is seen.info(name).dtype for name in seen.names())
    assert torch.equal(seen.read("embeddings.position_ids"), ids)


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.9])
def test_veto_takes_the_signs_of_an_oracle(margin):
    tau = gradfix.TaskVector({"w": torch.tensor([0.01, -0.01, 0.02, -0.02])})
    oracle = gradfix.TaskVector({"w": torch.tensor([-0.01, -0.01, 0.03, 0.05])})
    votes = gradfix.SignVotes({"w": oracle["w"].sign().to(torch.int8)}, 1)
    shown, voted = (gradfix.transport(tau, d, "veto", margin=margin).update["w"] for d in (oracle, votes))
    assert torch.equal(shown, voted) and int(shown.count_nonzero()) == 2
