"""`gradfix extract`: a full fine-tune as an adapter that peft loads, and an honest figure of what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gradfix
from gradfix.cli import run
from gradfix.commands.configs import ExtractConfig
from gradfix.commands.extract import run_extract
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult

RANK = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("extract")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(home / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.003 * torch.randn(len(parameter), RANK) @ torch.randn(RANK, parameter.shape[1]))
            else:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(home / "tuned")
    return home


def config(home: Path, out: Path, **more: object) -> ExtractConfig:
    given = {"base": str(home / "base"), "tuned": str(home / "tuned"), "out": str(out), "rank": RANK}
    return ExtractConfig(**{**given, **more})  # type: ignore[arg-type]


def test_an_adapter_of_the_changes_own_rank_is_the_fine_tune(home: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = run_extract(config(home, tmp_path / "out", keep_small=True))
    assert result["retained_energy"] == pytest.approx(1, abs=1e-6)
    manifest = gradfix.verify(tmp_path / "out")
    assert manifest["norm_ratio"] > 0
    load = AutoModelForCausalLM.from_pretrained
    base, tuned = load(home / "base"), load(home / "tuned")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before, wanted = base(tokens).logits, tuned(tokens).logits
        found = PeftModel.from_pretrained(base, tmp_path / "out")(tokens).logits
    assert float((found - wanted).abs().max()) < 1e-4 < float((before - wanted).abs().max())
    moved = gradfix.TaskVector.between(home / "base", tmp_path / "out")
    whole = gradfix.TaskVector.between(home / "base", home / "tuned")
    assert float((moved - whole).norm()) < 1e-4 * whole.norm()


def test_a_smaller_rank_says_what_it_loses(home: Path, tmp_path: Path) -> None:
    shares = [run_extract(config(home, tmp_path / "o", rank=r, dry_run=True))["retained_energy"] for r in (1, 2, 3)]
    assert 0.25 < shares[0] < shares[1] < shares[2] < 1  # norms are left out
    assert not (tmp_path / "o").exists()
    result = run_extract(config(home, tmp_path / "o", rank=1))
    assert any("fit no adapter" in note for note in result["notes"])
    assert json.loads((tmp_path / "o" / "adapter_config.json").read_text())["r"] == 1


def test_what_is_no_fine_tune_is_refused(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsafeResult, match="the update is zero"):
        run_extract(config(home, tmp_path / "out", tuned=str(home / "base")))
    words = ["extract", "--base", home / "base", "--tuned", tmp_path / "none", "--out", tmp_path / "out"]
    assert run([str(word) for word in words]) != 0
    assert "does not exist" in capfd.readouterr().err
    from safetensors.torch import load_file, save_file

    (tmp_path / "far").mkdir()
    tensors = {name: tensor * -3 for name, tensor in load_file(home / "base" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "far" / "model.safetensors")
    with pytest.raises(IncompatibleCheckpoints, match="not a fine-tune of that base"):
        run_extract(config(home, tmp_path / "out", tuned=str(tmp_path / "far")))
