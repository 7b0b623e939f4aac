"""Specs meet checkpoints: detection, head counts, names on disk, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from gradfix import TaskVector
from gradfix.align import ALIGNERS, align
from gradfix.align.families import FAMILIES
from gradfix.align.layout import build_layout, detect_family
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from tests.align.models import MAKERS, make
from tests.align.symmetry import random_alignment

EXPECTED = {
    "vit_backbone": "vit", "clip_vision": "clip", "clip_vision_tower": "vision_tower",
    "clip_text_tower": "text_tower", "siglip_vision_tower": "vision_tower", "bert_backbone": "bert",
    "bert_tokens": "bert", "bert_vocabulary": "bert", "roberta": "bert", "t5_gated": "t5",
    "llama_tied": "llama", "llama_one_group": "llama", "qwen2": "llama", "qwen3": "llama",
    "olmo2": "llama", "olmo2_grouped": "llama", "olmo3": "llama",
}  # fmt: skip


def weights_of(name):
    return dict(make(name).model.state_dict())


@pytest.mark.parametrize("name", MAKERS)
def test_the_family_is_found_from_the_names(name):
    assert detect_family(list(weights_of(name))).name == EXPECTED.get(name, name)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_specs_are_well_formed(family):
    for tower in family.towers:
        for row in tower.rows:
            assert row.axes, row.pattern
            for word in row.axes:
                assert word.partition("@")[0].isidentifier() or word in "-*" or ":" in word or word == "pool.mlp"


def test_a_tensor_no_spec_covers_is_named():
    weights = {**weights_of("bert"), "adapter.odd.weight": torch.zeros(2)}
    with pytest.raises(IncompatibleCheckpoints, match="adapter.odd.weight") as caught:
        align(weights, weights, heads=4)
    assert "nearest family: bert" in str(caught.value)
    alignment = random_alignment(weights_of("bert"), heads=4)
    with pytest.raises(IncompatibleCheckpoints, match="adapter.odd.weight"):
        alignment.apply(weights)


def test_missing_head_counts_say_how_to_give_them():
    with pytest.raises(UsageError, match="heads=12"):
        align(weights_of("bert"), weights_of("bert"))
    with pytest.raises(UsageError, match="vision"):
        align(weights_of("clip"), weights_of("clip"), heads={"text": 4})
    with pytest.raises(UsageError, match="no tower called 'audio'"):
        align(weights_of("clip"), weights_of("clip"), heads={"audio": 4})


def test_t5_tells_its_heads_itself():
    weights = weights_of("t5")
    assert build_layout({n: tuple(t.shape) for n, t in weights.items()}).heads["encoder"] == 4


def test_wrong_head_counts_are_refused():
    weights = weights_of("bert")
    with pytest.raises(IncompatibleCheckpoints, match="do not divide into 5 heads"):
        align(weights, weights, heads=5)
    with pytest.raises(UsageError, match="do not divide"):
        align(weights_of("llama"), weights_of("llama"), heads=8, kv_heads=3)


@pytest.mark.parametrize("entries", [16, 12])
def test_a_norm_of_neither_one_head_nor_all_heads_is_refused(entries):
    """Left in place while its heads move, it would change the model in silence."""
    weights = weights_of("olmo2")
    weights["model.layers.1.self_attn.q_norm.weight"] = torch.ones(entries)
    with pytest.raises(IncompatibleCheckpoints, match="layers.1.self_attn.q_norm.weight.*neither one head"):
        align(weights, weights, heads=4)


def test_shapes_and_names_must_meet():
    weights = weights_of("bert")
    cut = {**weights, "bert.embeddings.word_embeddings.weight": torch.zeros(39, 32)}
    with pytest.raises(IncompatibleCheckpoints, match="word_embeddings") as caught:
        align(weights, cut, heads=4)
    assert "[40, 32]" in str(caught.value) and "[39, 32]" in str(caught.value)
    with pytest.raises(IncompatibleCheckpoints, match="share no tensor name"):
        align(weights, {"other": torch.zeros(2)}, heads=4)
    narrow = {**weights, "bert.pooler.dense.weight": torch.zeros(32, 31)}
    with pytest.raises(IncompatibleCheckpoints, match="31 entries along 'residual'"):
        align(narrow, narrow, heads=4)
    with pytest.raises(IncompatibleCheckpoints, match="3 axes"):
        build_layout({"bert.pooler.dense.bias": (1, 1, 4)}, heads=4).axes("bert.pooler.dense.bias", (1, 1, 4))


def test_unknown_choices_list_what_there_is():
    weights = weights_of("bert")
    with pytest.raises(UsageError, match="Did you mean 'transfusion'"):
        align(weights, weights, heads=4, method="transfusio")
    with pytest.raises(UsageError, match="no family called 'brt'"):
        align(weights, weights, heads=4, family="brt")
    with pytest.raises(UsageError, match="per-junction"):
        align(weights, weights, heads=4, residual="none")


@pytest.mark.parametrize("name", ["vit", "bert", "t5", "llama", "clip", "gpt2"])
def test_folders_work_and_their_alignment_moves_module_names_too(name, tmp_path):
    model, _ = make(name)
    planted = random_alignment(model, seed=2)
    model.save_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = planted.apply(before)
    model.load_state_dict(expected)
    model.save_pretrained(tmp_path / "target")
    found = align(tmp_path / "base", tmp_path / "target")
    assert {group: stack.tolist() for group, stack in found.groups.items()} == {
        group: stack.tolist() for group, stack in planted.groups.items()
    }
    moved = found.apply(before)
    assert all(torch.equal(moved[n], expected[n]) for n in before)


def test_open_clip_folders_tell_their_heads(tmp_path):
    from safetensors.torch import save_file

    model, _ = make("open_clip")
    save_file(dict(model.state_dict()), tmp_path / "open_clip_model.safetensors")
    vision, text = {"layers": 2, "width": 64, "head_width": 16}, {"layers": 2, "width": 32, "heads": 4}
    config = {"model_cfg": {"vision_cfg": vision, "text_cfg": text}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    assert random_alignment(tmp_path).groups.keys() == random_alignment(model).groups.keys()
    assert align(tmp_path, tmp_path).identity_share() == 1.0


def test_a_damaged_config_is_named(tmp_path):
    model, _ = make("bert")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptInput, match="config.json"):
        align(tmp_path, tmp_path)
    assert align(tmp_path, tmp_path, heads=4, config={"num_attention_heads": 4}).identity_share() == 1.0


def test_a_tensor_only_the_base_has_is_permuted_and_reported():
    base = weights_of("bert")
    planted = random_alignment(base, heads=4)
    target = {n: t for n, t in planted.apply(base).items() if not n.startswith("classifier")}
    found = align(base, target, heads=4)
    assert found.unmatched == ("classifier.weight", "classifier.bias")
    assert "classifier.weight" in found.report()
    assert torch.equal(found.apply(base)["classifier.weight"], planted.apply(base)["classifier.weight"])


def test_a_task_vector_comes_back_as_one_and_buffers_stay():
    weights = weights_of("bert")
    alignment = random_alignment(weights, heads=4)
    tau = TaskVector({n: t for n, t in weights.items() if "layer.0" in n})
    moved = alignment.apply(tau)
    assert isinstance(moved, TaskVector) and list(moved) == list(tau)
    ids = torch.arange(16)[None]
    assert torch.equal(alignment.permute("bert.embeddings.position_ids", ids), ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ALIGNERS)
def test_stored_precision_is_kept(dtype, method):
    base = {n: t.to(dtype) for n, t in weights_of("bert").items()}
    planted = random_alignment(base, heads=4, keep_heads=True, seed=6)
    target = planted.apply(base)
    found = align(base, target, method=method, heads=4)
    moved = found.apply(base)
    assert all(moved[n].dtype == dtype and torch.equal(moved[n], target[n]) for n in base)
