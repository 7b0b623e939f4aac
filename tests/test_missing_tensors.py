"""Tensors that not every file stores: buffers and dropped heads are no reason to refuse, weights are."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import gradfix
from gradfix.checkpoints import safetensors_file
from gradfix.checkpoints.matched import match_prefix, match_vocabulary
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult
from gradfix.merging.folders import Vector, merge_checkpoints
from trio import read_folder

BUFFERS = {
    "embeddings.position_ids": torch.arange(6)[None],
    "rotary_emb.inv_freq": torch.linspace(1, 2, 4),
    "h.0.attn.bias": torch.ones(1, 1, 5, 5).tril(),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "steps": torch.tensor(3),
}


def draw(seed: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "enc.w": torch.randn(6, generator=generator),
        "enc.v": torch.randn(3, generator=generator),
        **more,
    }


def shifted(state: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: tensor + by if name not in BUFFERS else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("stored", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_need_not_be_in_every_file(tmp_path, name, stored):
    extras = [{name: BUFFERS[name]} if has else {} for has in stored]
    base, tuned = draw(0, **extras[0]), shifted(draw(0, **extras[1]), 0.01)
    target = draw(1, **{n: t * 2 for n, t in extras[2].items()})
    report = gradfix.transport_checkpoint(
        base=base, tuned=tuned, target=target, out=tmp_path / "out", mask="none"
    )
    out = read_folder(tmp_path / "out")
    assert set(out) == set(target) and report.transported == 2
    assert all(torch.equal(out[n], target[n]) for n in extras[2])
    assert set(gradfix.TaskVector.between(base, tuned)) == {"enc.w", "enc.v"}


def test_a_missing_weight_is_still_refused():
    tuned = shifted(draw(0), 0.01)
    del tuned["enc.v"]
    with pytest.raises(IncompatibleCheckpoints, match="differ in 1 tensor names, first 'enc.v'"):
        gradfix.TaskVector.between(draw(0), tuned)


def test_strict_still_refuses_a_buffer_that_only_the_target_has(tmp_path):
    target = draw(1, **{"rotary_emb.inv_freq": torch.ones(4)})
    with pytest.raises(IncompatibleCheckpoints, match="--strict: 1 tensors .* 'rotary_emb.inv_freq'"):
        gradfix.transport_checkpoint(
            base=draw(0),
            tuned=shifted(draw(0), 0.01),
            target=target,
            out=tmp_path / "out",
            mask="none",
            strict=True,
        )


HEAD = {"pooler.weight": torch.ones(3)}


@pytest.mark.parametrize("dropped", [(True, True), (True, False), (False, True)])
def test_a_merge_leaves_a_dropped_head_as_it_is(tmp_path, dropped):
    base = draw(0, **HEAD)
    vectors = [
        Vector(base, shifted(draw(0) if gone else base, 0.01 * number))
        for number, gone in enumerate(dropped, 1)
    ]
    target = draw(1, **HEAD)
    report = merge_checkpoints(target=target, vectors=vectors, out=tmp_path / "out", method="mean")
    out = read_folder(tmp_path / "out")
    assert torch.allclose(out["enc.w"], target["enc.w"] + 0.015)
    assert torch.equal(out["pooler.weight"], target["pooler.weight"])
    assert report.tensors["pooler.weight"] == {"fate": "copied", "reason": "a head the fine-tune dropped"}


def test_a_merge_matches_the_prefix(tmp_path):
    base = draw(0)
    target = {f"bert.{name}": tensor for name, tensor in draw(1).items()}
    vectors = [Vector(base, shifted(base, by)) for by in (0.01, 0.02)]
    merge_checkpoints(target=target, vectors=vectors, out=tmp_path / "out", method="mean")
    assert torch.allclose(read_folder(tmp_path / "out")["bert.enc.w"], target["bert.enc.w"] + 0.015)


def test_a_merge_still_refuses_a_base_without_a_weight(tmp_path):
    whole, part = draw(0), {"enc.w": draw(0)["enc.w"]}
    vectors = [Vector(whole, shifted(whole, 0.01)), Vector(part, shifted(part, 0.01))]
    with pytest.raises(
        IncompatibleCheckpoints, match="vectors 1 and 2 differ in 1 tensor names, first 'enc.v'"
    ):
        merge_checkpoints(target=draw(1), vectors=vectors, out=tmp_path / "out", method="mean")


@pytest.mark.parametrize(("base", "target"), [({"a": 1}, {"c": 1}), ({"a": 1}, {}), ({"a": 1}, {"m.c": 1})])
def test_names_without_dots_are_refused_by_name(tmp_path, base, target):
    base, target = ({name: torch.ones(4) for name in names} for names in (base, target))
    tuned = {name: tensor * 1.01 for name, tensor in base.items()}
    with pytest.raises(IncompatibleCheckpoints, match="lacks 1 tensors .* not the same architecture"):
        gradfix.transport_checkpoint(base=base, tuned=tuned, target=target, out=tmp_path / "out", mask="none")


def test_an_empty_pair_is_refused(tmp_path):
    with pytest.raises(UnsafeResult, match="task vector is zero"):
        gradfix.transport_checkpoint(
            base={}, tuned={}, target={"m.a": torch.ones(4)}, out=tmp_path / "out", mask="none"
        )


def test_a_folder_with_a_file_and_an_index_is_read_as_transformers_reads_it(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(open_checkpoint(tmp_path).read("w"), torch.ones(2))


def test_reordered_tokens_under_another_prefix_are_read_row_by_row(tmp_path, monkeypatch):
    rows, width = 60, 8

    def folder(name: str, prefix: str, step: int):
        path = tmp_path / name
        path.mkdir()
        names = ("embeddings.word_embeddings.weight", "enc.w", "enc.v")
        save_file({prefix + n: torch.randn(rows, width) for n in names}, path / "model.safetensors")
        words = {f"t{i}": row for row, i in enumerate(range(rows)[::step])}
        Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(path / "tokenizer.json"))
        return open_checkpoint(path)

    base, tuned, target = folder("base", "", 1), folder("tuned", "", 1), folder("target", "bert.", -1)
    base, tuned = match_prefix(base, target), match_prefix(tuned, target)
    base, tuned, _ = match_vocabulary(base, tuned, target)
    read, original = [], safetensors_file._read_range

    def counted(*arguments):
        read.append(arguments[3])
        return original(*arguments)

    monkeypatch.setattr(safetensors_file, "_read_range", counted)
    base.read("bert.embeddings.word_embeddings.weight")
    assert sum(read) == rows * width


def test_a_weight_stored_as_integers_is_no_buffer(tmp_path):
    states = [{"layer.weight": torch.ones(4, 3) * k, "scale": torch.tensor(float(k))} for k in (1, 2, 3)]
    states[1]["scale"] = torch.tensor(5)
    base, tuned, target = states
    report = gradfix.transport_checkpoint(
        base=base, tuned=tuned, target=target, out=tmp_path / "out", mask="none", alpha=0.5, force=True
    )
    assert report.tensors["scale"]["fate"] == "transported"
    assert float(load_file(tmp_path / "out" / "model.safetensors")["scale"]) == 3 + 0.5 * (5 - 1)
