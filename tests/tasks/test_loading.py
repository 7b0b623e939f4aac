"""What a loader would only warn about is an error here, and it names the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradfix.errors import CorruptInput, GradfixError, IncompatibleCheckpoints, UsageError
from gradfix.tasks import TASKS
from tests.tasks.families import CASES, TEXT_PROMPTS, Case
from tiny import save_tiny

ZERO = TASKS["zero-shot"](TEXT_PROMPTS)


def rewrite(folder: Path, change: object) -> Path:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, {"format": "pt"})
    return folder


NAMED = {case.family: case for case in CASES}
FIRST = {"open_clip": "visual.proj", "timm": "blocks.0.attn.qkv.weight", "gpt2": "transformer.h.0.attn.c_attn.weight"}


def a_weight(folder: Path, family: str) -> str:
    names = sorted(load_file(next(folder.glob("*.safetensors"))))
    return FIRST.get(family) or next(name for name in names if name.endswith(".weight") and "layer" in name.lower())


@pytest.mark.parametrize("case", [c for c in NAMED.values() if c.family != "mixtral"], ids=str)
def test_missing_extra_and_misshapen_tensors_are_named(case: Case, tmp_path: Path) -> None:
    folder = case.save(tmp_path)
    name = a_weight(folder, case.family)
    kept = load_file(next(folder.glob("*.safetensors")))[name].clone()
    tail = name.rsplit(".", 2)[-2]
    with pytest.raises(CorruptInput, match="lacks") as missing:
        case.open(rewrite(folder, lambda tensors: tensors.pop(name)))
    # transformers reports its own module names, which end alike or are fused from several on disk
    assert tail in str(missing.value) or "proj" in str(missing.value)
    with pytest.raises(GradfixError, match="another shape|the config says"):
        case.open(rewrite(folder, lambda tensors: tensors.update({name: kept[:-1].contiguous()})))
    rewrite(folder, lambda tensors: tensors.update({name: kept}))
    case.open(folder)


def test_a_missing_expert_is_not_replaced(tmp_path: Path) -> None:
    case = NAMED["mixtral"]
    folder = case.save(tmp_path)
    with pytest.raises(CorruptInput, match="such as experts, are missing"):
        case.open(rewrite(folder, lambda t: t.pop(next(name for name in sorted(t) if "experts.1" in name))))


def test_unknown_tensors_in_the_encoder_are_refused(tmp_path: Path) -> None:
    folder = rewrite(save_tiny("bert", tmp_path), lambda t: t.update({"encoder.layer.9.odd": torch.ones(1)}))
    with pytest.raises(CorruptInput, match=r"does not know, first 'encoder.layer.9.odd'"):
        ZERO.open(folder)


def test_the_head_of_a_pretraining_checkpoint_is_left_aside_and_noted(tmp_path: Path) -> None:
    bound = ZERO.open(save_tiny("bert_classifier", tmp_path))
    assert bound.notes == ["2 tensors of an unused head were left aside, first 'classifier.bias'."]
    assert not any("classifier" in name for name in bound.trainable())


def test_a_missing_pooler_is_no_loss_where_it_is_not_used(tmp_path: Path) -> None:
    folder = save_tiny("bert", tmp_path)
    before = ZERO.open(folder)
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith("pooler")])
    after = ZERO.open(folder)
    assert torch.equal(before.head, after.head) and before.trainable() == after.trainable()
    assert not any(name.startswith("pooler") for name, _ in after.model.named_parameters())


def test_damaged_folders_give_one_line(tmp_path: Path) -> None:
    folder = save_tiny("bert", tmp_path / "a")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(CorruptInput, match="model.safetensors"):
        ZERO.open(folder)
    folder = save_tiny("bert", tmp_path / "b")
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptInput, match="config.json is missing or not readable"):
        ZERO.open(folder)
    folder = save_tiny("bert", tmp_path / "c")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorruptInput, match="no usable tokenizer"):
        ZERO.open(folder)
    folder = save_tiny("vit", tmp_path / "d")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CorruptInput, match="no usable image processor"):
        TASKS["classification"](dict.fromkeys(("red", "green", "blue"), "")).open(folder)
    with pytest.raises(CorruptInput, match="does not exist"):
        ZERO.open(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a single file: weights without the config.json"):
        TASKS["seq2seq"](TEXT_PROMPTS).open(weights)


def test_an_adapter_is_worn_by_its_base_as_peft_does_it(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = save_tiny("llama", tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    rows = [{"prompt": "a good film", "completion": "so it is"}]
    task = TASKS["causal"]()
    plain, named = task.open(base), task.open(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    given = task.open(tmp_path / "adapter", head_from=base)
    batch = plain.collate(rows)
    with torch.no_grad():
        expected = plain.loss(theirs.merge_and_unload(), batch)
        assert not torch.allclose(plain.loss(plain.model, batch), expected)
        for bound in (named, given):
            torch.testing.assert_close(bound.loss(bound.model, batch), expected)
    with pytest.raises(UsageError, match="does not name its base"):
        task.open(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "adapter")})
    )
    with pytest.raises(UsageError, match="cannot be the base"):
        task.open(tmp_path / "adapter")


def test_code_in_a_checkpoint_never_runs_unasked(tmp_path: Path) -> None:
    folder = save_tiny("bert", tmp_path / "model")
    canary = tmp_path / "canary"
    (folder / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptInput):
        ZERO.open(folder)
    assert not canary.exists()


def test_a_checkpoint_in_another_shape_than_its_config(tmp_path: Path) -> None:
    folder = save_tiny("bert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(IncompatibleCheckpoints, match="another shape than the config says"):
        ZERO.open(folder)
