"""From three checkpoints to a fourth: the stream equals memory bit for bit, and bad input writes nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gradfix
from gradfix.errors import (
    CorruptInput,
    GradfixError,
    IncompatibleCheckpoints,
    OutputError,
    UnsafeResult,
    UsageError,
)
from gradfix.stream import write_update
from gradfix.votes.tally import SignVotes

SHAPES = {
    "layers.0.weight": (300, 70),
    "layers.0.bias": (300,),
    "norm.weight": (300,),
    "empty": (0, 4),
    "scalar": (),
}


def _state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}


def _save(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")
    names = list(state)
    if shards == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def _votes(seed: int, count: int = 5) -> SignVotes:
    g = torch.Generator().manual_seed(seed)
    return SignVotes(
        {
            n: (torch.randint(0, 2, (count, *s), generator=g) * 2 - 1).sum(0).to(torch.int8)
            for n, s in SHAPES.items()
        },
        count,
    )


@pytest.fixture
def trio(tmp_path):
    base = _state(0)
    tuned = {
        name: value + 0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
        for name, value in base.items()
    }
    return {
        "base": _save(tmp_path / "base", base),
        "tuned": _save(tmp_path / "tuned", tuned, shards=2),
        "target": _save(tmp_path / "target", _state(1), shards=3),
    }


def _read(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mask", "options"),
    [("agree", {}), ("force", {}), ("veto", {"margin": 0.4}), ("random", {"seed": 3}), ("none", {})],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_stream_equals_memory_bit_for_bit(tmp_path, monkeypatch, dtype, mask, options, shards):
    monkeypatch.setattr("gradfix.updates.CHUNK", 500)
    monkeypatch.setattr("gradfix.updates.BLOCK", 300)
    monkeypatch.setattr("gradfix.transported.CHUNK", 1000)
    base, target = _state(0, dtype), _state(1, dtype)
    tuned = {
        n: (v.float() + 0.05 * torch.randn(v.shape, generator=torch.Generator().manual_seed(5))).to(dtype)
        for n, v in base.items()
    }
    folders = {
        "base": _save(tmp_path / "base", base, shards),
        "tuned": _save(tmp_path / "tuned", tuned),
        "target": _save(tmp_path / "target", target, shards),
    }
    votes = _votes(2)
    gradfix.transport_checkpoint(
        **folders, votes=votes, mask=mask, alpha=0.7, out=tmp_path / "out", **options
    )
    in_memory = {"margin": options.get("margin"), "generator": options.get("seed")}
    moved = gradfix.transport(gradfix.TaskVector.between(base, tuned), votes, mask, **in_memory)
    written = _read(tmp_path / "out")
    for name, value in target.items():
        expected = (value.float() + 0.7 * moved.update[name]).to(dtype)
        assert written[name].dtype is dtype
        assert torch.equal(written[name], expected), name
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == sorted(
        p.name for p in folders["target"].glob("*.safetensors")
    )


def test_manifest_accounts_for_every_tensor_and_verify_finds_changes(trio, tmp_path):
    out = tmp_path / "out"
    gradfix.transport_checkpoint(**trio, votes=_votes(2), out=out)
    manifest = gradfix.verify(out)
    counts = manifest["counts"]
    assert counts["transported"] + counts["copied"] + counts["skipped"] == counts["total"] == len(SHAPES)
    assert set(manifest["tensors"]) == set(SHAPES)
    assert set(manifest["inputs"]) == {"base", "tuned", "target"}
    assert len(manifest["inputs"]["target"]["hashes"]) == 3
    from blake3 import blake3

    for file, digest in manifest["inputs"]["target"]["hashes"].items():
        assert digest == "blake3:" + blake3((trio["target"] / file).read_bytes()).hexdigest()
    weights = next(out.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptInput, match=f"{weights.name} has changed"):
        gradfix.verify(out)


def test_verify_wants_the_manifest_and_no_stray_weights(trio, tmp_path):
    out = tmp_path / "out"
    gradfix.transport_checkpoint(**trio, votes=_votes(2), out=out)
    (out / "extra.safetensors").write_bytes(b"")
    with pytest.raises(CorruptInput, match="not in the manifest"):
        gradfix.verify(out)
    (out / "extra.safetensors").unlink()
    (out / "gradfix.json").unlink()
    with pytest.raises(CorruptInput, match=r"no gradfix\.json"):
        gradfix.verify(out)


def test_inputs_are_untouched_and_the_same_run_gives_the_same_bits(trio, tmp_path):
    before = {p: p.read_bytes() for folder in trio.values() for p in folder.iterdir()}
    for name in ("one", "two"):
        gradfix.transport_checkpoint(**trio, votes=_votes(2), out=tmp_path / name, alpha=0.5)
    assert all(path.read_bytes() == content for path, content in before.items())
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def _fails(trio, tmp_path, error: type[GradfixError], match: str, code: int, **changes) -> None:
    arguments = {**trio, "votes": _votes(2), "out": tmp_path / "out", **changes}
    present = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(error, match=match) as caught:
        gradfix.transport_checkpoint(**arguments)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    left = [p for p in tmp_path.rglob("*") if p not in present and not p.name.endswith(".lock")]
    assert left == []


def test_tuned_equal_to_base_is_refused(trio, tmp_path):
    _fails(trio, tmp_path, UnsafeResult, "the task vector is zero", 6, tuned=trio["base"])
    with pytest.raises(UnsafeResult, match="the task vector is zero"):
        gradfix.TaskVector.between(trio["base"], trio["base"])


def test_missing_tensor_is_refused(trio, tmp_path):
    state = _state(3)
    del state["norm.weight"]
    odd = _save(tmp_path / "odd", state)
    _fails(
        trio, tmp_path, IncompatibleCheckpoints, "lacks 1 tensors of its base .* 'norm.weight'", 4, tuned=odd
    )
    _fails(
        trio, tmp_path, IncompatibleCheckpoints, "lacks 1 tensors .* not the same architecture", 4, target=odd
    )


def test_other_shapes_are_refused(trio, tmp_path):
    state = {**_state(3), "layers.0.weight": torch.zeros(300, 71)}
    odd = _save(tmp_path / "odd", state)
    _fails(
        trio,
        tmp_path,
        IncompatibleCheckpoints,
        r"'layers.0.weight' is \[300, 70\] .* \[300, 71\]",
        4,
        target=odd,
    )
    rows = _save(tmp_path / "rows", {**_state(3), "layers.0.weight": torch.zeros(310, 70)})
    _fails(trio, tmp_path, IncompatibleCheckpoints, "the vocabularies differ", 4, target=rows)


@pytest.mark.parametrize("role", ["base", "tuned", "target"])
def test_nan_in_an_input_names_tensor_and_file(trio, tmp_path, role):
    state = _read(trio[role])
    state["layers.0.bias"][7] = float("nan")
    odd = _save(tmp_path / "odd", state)
    _fails(trio, tmp_path, CorruptInput, "tensor 'layers.0.bias' of .*odd holds NaN or Inf", 3, **{role: odd})


@pytest.mark.parametrize("inside", ["", "sub", "a/b"])
def test_output_inside_an_input_is_refused(trio, tmp_path, inside):
    _fails(trio, tmp_path, OutputError, "inputs are never modified", 8, out=trio["target"] / inside)


def test_output_reached_through_a_link_is_refused(trio, tmp_path):
    (tmp_path / "link").symlink_to(trio["base"])
    _fails(trio, tmp_path, OutputError, "inputs are never modified", 8, out=tmp_path / "link" / "out")


def test_non_empty_output_needs_overwrite_and_is_swapped_whole(trio, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    _fails(trio, tmp_path, OutputError, "--overwrite", 8)
    assert (out / "precious.txt").read_text() == "mine"
    gradfix.transport_checkpoint(**trio, votes=_votes(2), out=out, overwrite=True)
    assert not (out / "precious.txt").exists()
    gradfix.verify(out)


def test_votes_of_another_target_are_refused(trio, tmp_path):
    probe = {"layers.0.bias": _state(1)["layers.0.bias"][:8].double().tolist()}
    right = SignVotes(dict(_votes(2)), 5, probe=probe)
    right.save(tmp_path / "votes.safetensors")
    gradfix.transport_checkpoint(**trio, votes=tmp_path / "votes.safetensors", out=tmp_path / "good")
    wrong = SignVotes(dict(_votes(2)), 5, probe={"layers.0.bias": [9.0] * 8})
    _fails(trio, tmp_path, IncompatibleCheckpoints, "taken on other weights", 4, votes=wrong)
    hashed = SignVotes(dict(_votes(2)), 5, target_hash="files:0000")
    _fails(trio, tmp_path, IncompatibleCheckpoints, "taken on other weights", 4, votes=hashed)


def test_not_descended_is_refused_unless_forced(trio, tmp_path):
    stranger = _save(tmp_path / "stranger", _state(77))
    _fails(trio, tmp_path, IncompatibleCheckpoints, "of its norm: not a fine-tune", 4, tuned=stranger)
    gradfix.transport_checkpoint(
        **{**trio, "tuned": stranger}, votes=_votes(2), out=tmp_path / "out", force=True
    )


def test_an_update_lost_in_rounding_is_refused(tmp_path):
    base = {"w": torch.full((64,), 256.0, dtype=torch.bfloat16)}
    tuned = {"w": torch.full((64,), 256.0, dtype=torch.float32) + 1e-3}
    folders = {
        "base": _save(tmp_path / "base", {"w": base["w"].float()}),
        "tuned": _save(tmp_path / "tuned", tuned),
        "target": _save(tmp_path / "target", base),
    }
    votes = SignVotes({"w": torch.ones(64, dtype=torch.int8)}, 1)
    _fails(
        folders,
        tmp_path,
        UnsafeResult,
        "rounding .* absorbs the whole update; use --out-dtype fp32",
        6,
        votes=votes,
    )
    report = gradfix.transport_checkpoint(**folders, votes=votes, out=tmp_path / "out", dtype="fp32")
    assert report.survived == 1.0


def test_all_dropped_is_refused(trio, tmp_path):
    tau = gradfix.TaskVector.between(trio["base"], trio["tuned"])
    against = SignVotes({n: (-t.sign()).to(torch.int8) for n, t in tau.items()}, 1)
    _fails(trio, tmp_path, UnsafeResult, "the mask keeps 0.00%", 6, votes=against)


def test_a_head_only_the_fine_tune_has_follows_the_policy(trio, tmp_path):
    state = {**_read(trio["tuned"]), "head.weight": torch.ones(2, 3)}
    headed = _save(tmp_path / "headed", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "--head copy .* or --head skip", 4, tuned=headed)
    given = {**trio, "tuned": headed, "votes": _votes(2)}
    gradfix.transport_checkpoint(**given, out=tmp_path / "copy", head="copy")
    gradfix.transport_checkpoint(**given, out=tmp_path / "skip", head="skip")
    assert torch.equal(_read(tmp_path / "copy")["head.weight"], torch.ones(2, 3))
    assert "head.weight" not in _read(tmp_path / "skip")
    assert gradfix.verify(tmp_path / "skip")["counts"]["skipped"] == 1


def test_quantised_weights_are_refused_by_name(trio, tmp_path):
    state = {**_read(trio["target"]), "layers.0.weight": torch.zeros(300, 70, dtype=torch.int8)}
    odd = _save(tmp_path / "odd", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "'layers.0.weight' .* quantised", 4, target=odd)


def test_integer_buffers_are_copied_from_the_target(tmp_path):
    base = {"w": torch.randn(8, generator=torch.Generator().manual_seed(0)), "position_ids": torch.arange(4)}
    tuned = {"w": base["w"] + 0.01, "position_ids": torch.arange(4)}
    target = {"w": base["w"] + 1, "position_ids": torch.arange(4) + 7}
    folders = {n: _save(tmp_path / n, s) for n, s in (("base", base), ("tuned", tuned), ("target", target))}
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out")
    assert torch.equal(_read(tmp_path / "out")["position_ids"], target["position_ids"])


def test_masks_that_need_votes_say_so(trio, tmp_path):
    _fails(trio, tmp_path, UsageError, "needs votes: make them with `gradfix vote`", 2, votes=None)
    _fails(trio, tmp_path, UsageError, "need a seed", 2, mask="random")


def test_write_update_adds_a_given_vector(trio, tmp_path):
    update = {"norm.weight": torch.full((300,), 0.25)}
    write_update(update, target=trio["target"], out=tmp_path / "out", alpha=2.0)
    written, before = _read(tmp_path / "out"), _read(trio["target"])
    assert torch.equal(written["norm.weight"], before["norm.weight"] + 0.5)
    assert torch.equal(written["layers.0.weight"], before["layers.0.weight"])


def test_apply_keeps_the_dtype_and_computes_in_float32():
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    before = model.weight.detach().clone()
    update = {"weight": torch.full((4, 4), 1e-3)}
    gradfix.apply(model, update, 2.0)
    assert model.weight.dtype is torch.bfloat16
    assert torch.equal(model.weight, (before.float() + 2.0 * update["weight"]).to(torch.bfloat16))
    with pytest.raises(IncompatibleCheckpoints, match="model lacks, first 'nope'"):
        gradfix.apply(model, {"nope": torch.zeros(1)}, 1.0)


def test_the_stream_stays_within_100_mib(tmp_path):
    """64 MiB tensors, three inputs: a whole-tensor implementation would need several hundred MiB."""
    big = {"w": torch.zeros(2**24)}
    base = _save(tmp_path / "base", big)
    tuned = _save(tmp_path / "tuned", {"w": torch.full((2**24,), 0.01)})
    target = _save(tmp_path / "target", {"w": torch.ones(2**24)})
    del big
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradfix.transport_checkpoint(
        base=base, tuned=tuned, target=target, mask="none", out=tmp_path / "out", force=True
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100


def test_a_tensor_without_votes_does_not_change_the_names_of_the_others():
    """A frozen head is in the task vector and not in the votes; the rest must still find its votes."""
    tau = gradfix.TaskVector(
        {"layers.0.weight": torch.ones(4), "embed": torch.ones(2), "head": torch.ones(3)}
    )
    votes = SignVotes(
        {"layers.0.weight": torch.ones(4, dtype=torch.int8), "embed": torch.ones(2, dtype=torch.int8)},
        1,
        disk_names={"layers.0.weight": "encoder.layer.0.weight"},
    )
    assert gradfix.transport(tau, votes).kept == {"layers.0.weight": 1.0, "embed": 1.0, "head": 0.0}
    on_disk = tau.renamed({"layers.0.weight": "encoder.layer.0.weight"})
    assert gradfix.transport(on_disk, votes).kept == {
        "encoder.layer.0.weight": 1.0,
        "embed": 1.0,
        "head": 0.0,
    }


def _prefixed(state: dict[str, torch.Tensor], prefix: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()} | more


def test_a_trainer_style_classifier_moves_between_bases_saved_with_and_without_a_head(tmp_path):
    """Base with a pre-training head, fine-tune with a classifier, target saved as the bare encoder."""
    base = _state(0)
    tuned = {n: v + 0.01 for n, v in base.items()}
    folders = {
        "base": _save(tmp_path / "base", _prefixed(base, "bert.", **{"cls.bias": torch.zeros(3)})),
        "tuned": _save(
            tmp_path / "tuned", _prefixed(tuned, "bert.", **{"classifier.weight": torch.ones(2, 3)})
        ),
        "target": _save(tmp_path / "target", _state(1)),
    }
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out", head="copy")
    written = _read(tmp_path / "out")
    expected = _state(1)["norm.weight"] + (tuned["norm.weight"] - base["norm.weight"])
    assert torch.equal(written["norm.weight"], expected)
    assert torch.equal(written["classifier.weight"], torch.ones(2, 3))
    assert "cls.bias" not in written


def test_a_head_the_fine_tune_dropped_stays_the_targets(tmp_path):
    base = _state(0) | {"cls.bias": torch.zeros(3)}
    tuned = {n: v + 0.01 for n, v in _state(0).items()}
    target = _state(1) | {"cls.bias": torch.full((3,), 7.0)}
    folders = {n: _save(tmp_path / n, s) for n, s in (("base", base), ("tuned", tuned), ("target", target))}
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out")
    assert torch.equal(_read(tmp_path / "out")["cls.bias"], torch.full((3,), 7.0))
    assert gradfix.verify(tmp_path / "out")["tensors"]["cls.bias"]["reason"] == "a head the fine-tune dropped"
