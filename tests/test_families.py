"""Every family end to end through the command line: fine-tune, transport, load with the family's own loader.

The written weights are compared with `B + alpha * mask(tau)` computed here from the files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gradfix.cli import run
from gradfix.vectors.signvotes import SignVotes
from tests.tiny import save_tiny, toy_images, toy_texts, write_rows


def _hf(name: str) -> Callable[[Path], object]:
    def load(folder: Path) -> object:
        import transformers

        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        return model

    return load


def _timm(folder: Path) -> object:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def _open_clip(folder: Path) -> object:
    import open_clip

    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    model = open_clip.CLIP(**config)
    found = open_clip.load_checkpoint(model, str(folder / "open_clip_model.safetensors"))
    assert not found.missing_keys and not found.unexpected_keys
    return model


@dataclass(frozen=True)
class Family:
    tiny: str
    task: str
    load: Callable[[Path], object]
    images: bool = False
    lr: float = 3e-3


FAMILIES = {
    "vit": Family("vit", "classification", _hf("AutoModelForImageClassification"), images=True),
    "clip": Family("clip", "zero-shot", _hf("CLIPModel"), images=True),
    "open_clip": Family("open_clip", "zero-shot", _open_clip, images=True),
    "timm": Family("timm", "classification", _timm, images=True),
    "bert_classifier": Family("bert_classifier", "classification", _hf("AutoModelForSequenceClassification")),
    "bert_zero_shot": Family("bert", "zero-shot", _hf("AutoModel")),
    "t5": Family("t5", "seq2seq", _hf("AutoModelForSeq2SeqLM")),
    "llama": Family("llama", "causal", _hf("AutoModelForCausalLM")),
    "gpt2": Family("gpt2", "causal", _hf("AutoModelForCausalLM")),
}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "zero_shot_head.safetensors":
            out |= load_file(file)
    return out


def _data(folder: Path, images: bool) -> Path:
    make = toy_images if images else toy_texts
    for split, count, seed in (("train", 36, 1), ("validation", 12, 2), ("test", 12, 3)):
        write_rows(folder, split, make(count, seed))
    return folder


def _cli(*words: object) -> None:
    assert run([str(word) for word in words]) == 0


def _check(base, tuned, target, out: Path, votes: SignVotes, alpha: float) -> None:
    """agree: keep tau where its sign equals the voted one; everything else is B's."""
    before, after, goal, written = _weights(base), _weights(tuned), _weights(target), _weights(out)
    assert set(written) == set(goal)
    changed = 0
    for name, weight in goal.items():
        expected = weight
        if name in votes and name in before:
            tau = after[name].float() - before[name].float()
            kept = torch.where(tau.sign() == votes[name].sign(), tau, 0)
            expected = (weight.float() + alpha * kept).to(weight.dtype)
        assert torch.equal(written[name], expected), name
        changed += int((written[name] != weight).sum())
    assert changed > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fine_tune_moves_and_loads(name, tmp_path, capsys):
    family = FAMILIES[name]
    base = save_tiny(family.tiny, tmp_path / "base", seed=0)
    target = save_tiny(family.tiny, tmp_path / "target", seed=1)
    data = _data(tmp_path / "data", family.images)
    common = ("--data", data, "--task", family.task)
    _cli(
        "finetune",
        "--model",
        base,
        "--out",
        tmp_path / "tuned",
        *common,
        "--steps",
        25,
        "--train-batch",
        12,
        "--lr",
        family.lr,
    )
    _cli("vote", "--target", target, *common, "--shots", 3, "--seed", 4, "--out", tmp_path / "votes.safetensors")
    votes = SignVotes.load(tmp_path / "votes.safetensors")
    assert votes.count == 3 * (3 if family.images else 2)
    assert all(not tensor.dtype.is_floating_point for tensor in votes.values())
    _cli(
        "transport", "--base", base, "--tuned", tmp_path / "tuned", "--target", target, *common, "--shots", 3, "--seed", 4,
        "--votes", tmp_path / "votes.safetensors", "--alpha", "0.5", "--out", tmp_path / "out", "--force",
        "--json", tmp_path / "result.json",
    )  # fmt: skip
    _check(base, tmp_path / "tuned", target, tmp_path / "out", votes, 0.5)
    _cli("verify", tmp_path / "out")
    family.load(tmp_path / "out")
    _cli("evaluate", "--model", tmp_path / "out", *common, "--json", tmp_path / "score.json")
    measured = json.loads((tmp_path / "result.json").read_text())
    again = json.loads((tmp_path / "score.json").read_text())
    assert again["accuracy"] == pytest.approx(measured["test_after"]["accuracy"])
    assert (tmp_path / "out" / "README.md").is_file()


def test_a_lora_of_a_llama_moves_and_loads(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = save_tiny("llama", tmp_path / "base", seed=0)
    target = save_tiny("llama", tmp_path / "target", seed=1)
    data = _data(tmp_path / "data", images=False)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    common = ("--data", data, "--task", "causal", "--shots", 3)
    _cli("vote", "--target", target, *common, "--out", tmp_path / "votes.safetensors")
    _cli(
        "transport", "--base", base, "--tuned", tmp_path / "adapter", "--target", target, *common, "--force",
        "--votes", tmp_path / "votes.safetensors", "--alpha", "0.5", "--out", tmp_path / "out",
    )  # fmt: skip
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    votes = SignVotes.load(tmp_path / "votes.safetensors")
    written, goal = _weights(tmp_path / "out"), _weights(target)
    before, after = _weights(base), _weights(tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj.weight"
    tau = after[name] - before[name]
    kept = torch.where(tau.sign() == votes[name].sign(), tau, 0)
    assert torch.allclose(written[name], goal[name] + 0.5 * kept, atol=1e-6)
    assert torch.equal(written["model.norm.weight"], goal["model.norm.weight"])
    _hf("AutoModelForCausalLM")(tmp_path / "out")


def test_votes_on_disk_are_integers_under_on_disk_names(tmp_path):
    target = save_tiny("vit", tmp_path / "target", seed=1)
    data = _data(tmp_path / "data", images=True)
    _cli(
        "vote",
        "--target",
        target,
        "--data",
        data,
        "--task",
        "classification",
        "--shots",
        2,
        "--out",
        tmp_path / "v.safetensors",
    )
    with safe_open(tmp_path / "v.safetensors", "pt") as file:
        assert set(file.keys()) <= set(_weights(target))
        assert file.metadata()["format"] == "gradfix.votes"


def test_best_recipe_report_and_choice_by_folds_through_the_command_line(tmp_path):
    base = save_tiny("bert", tmp_path / "base", seed=0)
    target = save_tiny("bert", tmp_path / "target", seed=1)
    data = _data(tmp_path / "data", images=False)
    common = ("--data", data, "--task", "zero-shot")
    _cli(
        "finetune",
        "--model",
        base,
        "--out",
        tmp_path / "tuned",
        *common,
        "--steps",
        25,
        "--train-batch",
        12,
        "--lr",
        3e-3,
    )
    trio = ("--base", base, "--tuned", tmp_path / "tuned", "--target", target, *common, "--shots", 3, "--force")
    _cli("transport", *trio, "--method", "best", "--out", tmp_path / "best", "--report", tmp_path / "page.html")
    _cli("verify", tmp_path / "best")
    assert "Transported (best)" in (tmp_path / "page.html").read_text()
    _cli(
        "transport",
        *trio,
        "--validation",
        "none",
        "--mask",
        "veto",
        "--out",
        tmp_path / "folds",
        "--json",
        tmp_path / "f.json",
    )
    result = json.loads((tmp_path / "f.json").read_text())
    assert result["regime"] == "few_shot"
    assert 0 <= result["margin"] <= 1
    assert result["curve"][0][0] == 0.0


def test_a_head_only_the_fine_tune_has_is_asked_about_and_copied(tmp_path, capsys):
    base = save_tiny("bert", tmp_path / "base", seed=0)
    target = save_tiny("bert", tmp_path / "target", seed=1)
    common = ("--data", _data(tmp_path / "data", images=False), "--task", "classification")
    tuning = ("--steps", 20, "--train-batch", 12, "--lr", 3e-3, "--new-head")
    _cli("finetune", "--model", base, "--out", tmp_path / "tuned", *common, *tuning)
    words = ["transport", "--base", base, "--tuned", tmp_path / "tuned", "--target", target, *common, "--shots", 3]
    assert run([str(word) for word in (*words, "--out", tmp_path / "asked")]) == 4
    assert "Choose --head copy" in capsys.readouterr().err
    assert not (tmp_path / "asked").exists()
    _cli(*words, "--head", "copy", "--out", tmp_path / "out")
    written, tuned = _weights(tmp_path / "out"), _weights(tmp_path / "tuned")
    assert torch.equal(written["classifier.weight"], tuned["classifier.weight"])
    _hf("AutoModelForSequenceClassification")(tmp_path / "out")
