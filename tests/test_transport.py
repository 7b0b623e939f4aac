"""From three checkpoints to a fourth: the stream equals memory bit for bit, and every tensor is accounted for."""

from __future__ import annotations

import json
import resource

import pytest
import torch

import gradfix
from gradfix.cli import run
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.stream.checkpoint import write_update
from gradfix.vectors.signvotes import SignVotes
from tests.stage import setup
from trio import SHAPES, draw_state, draw_votes, make_trio, read_folder, save_folder


@pytest.fixture
def trio(tmp_path):
    return make_trio(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mask", "options"),
    [("agree", {}), ("force", {}), ("veto", {"margin": 0.4}), ("random", {"seed": 3}), ("none", {})],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_stream_equals_memory_bit_for_bit(tmp_path, monkeypatch, dtype, mask, options, shards):
    monkeypatch.setattr("gradfix.stream.updates.CHUNK", 500)
    monkeypatch.setattr("gradfix.stream.updates.BLOCK", 300)
    monkeypatch.setattr("gradfix.vectors.transported.CHUNK", 1000)
    base, target = draw_state(0, dtype), draw_state(1, dtype)
    tuned = {
        n: (v.float() + 0.05 * torch.randn(v.shape, generator=torch.Generator().manual_seed(5))).to(dtype)
        for n, v in base.items()
    }
    folders = {
        "base": save_folder(tmp_path / "base", base, shards),
        "tuned": save_folder(tmp_path / "tuned", tuned),
        "target": save_folder(tmp_path / "target", target, shards),
    }
    votes = draw_votes(2)
    gradfix.transport_checkpoint(**folders, votes=votes, mask=mask, alpha=0.7, out=tmp_path / "out", **options)
    in_memory = {"margin": options.get("margin"), "generator": options.get("seed")}
    moved = gradfix.transport(gradfix.TaskVector.between(base, tuned), votes, mask, **in_memory)
    written = read_folder(tmp_path / "out")
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
    gradfix.transport_checkpoint(**trio, votes=draw_votes(2), out=out)
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
    gradfix.transport_checkpoint(**trio, votes=draw_votes(2), out=out)
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
        gradfix.transport_checkpoint(**trio, votes=draw_votes(2), out=tmp_path / name, alpha=0.5)
    assert all(path.read_bytes() == content for path, content in before.items())
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_integer_buffers_are_copied_from_the_target(tmp_path):
    base = {"w": torch.randn(8, generator=torch.Generator().manual_seed(0)), "position_ids": torch.arange(4)}
    tuned = {"w": base["w"] + 0.01, "position_ids": torch.arange(4)}
    target = {"w": base["w"] + 1, "position_ids": torch.arange(4) + 7}
    folders = {n: save_folder(tmp_path / n, s) for n, s in (("base", base), ("tuned", tuned), ("target", target))}
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out")
    assert torch.equal(read_folder(tmp_path / "out")["position_ids"], target["position_ids"])


def test_write_update_adds_a_given_vector(trio, tmp_path):
    update = {"norm.weight": torch.full((300,), 0.25)}
    write_update(update, target=trio["target"], out=tmp_path / "out", alpha=2.0)
    written, before = read_folder(tmp_path / "out"), read_folder(trio["target"])
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
    base = save_folder(tmp_path / "base", big)
    tuned = save_folder(tmp_path / "tuned", {"w": torch.full((2**24,), 0.01)})
    target = save_folder(tmp_path / "target", {"w": torch.ones(2**24)})
    del big
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradfix.transport_checkpoint(base=base, tuned=tuned, target=target, mask="none", out=tmp_path / "out", force=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100


def test_a_tensor_without_votes_does_not_change_the_names_of_the_others():
    """A frozen head is in the task vector and not in the votes; the rest must still find its votes."""
    tau = gradfix.TaskVector({"layers.0.weight": torch.ones(4), "embed": torch.ones(2), "head": torch.ones(3)})
    votes = SignVotes(
        {"layers.0.weight": torch.ones(4, dtype=torch.int8), "embed": torch.ones(2, dtype=torch.int8)},
        1,
        disk_names={"layers.0.weight": "encoder.layer.0.weight"},
    )
    assert gradfix.transport(tau, votes).kept == {"layers.0.weight": 1.0, "embed": 1.0, "head": 0.0}
    on_disk = tau.renamed({"layers.0.weight": "encoder.layer.0.weight"})
    assert gradfix.transport(on_disk, votes).kept == {"encoder.layer.0.weight": 1.0, "embed": 1.0, "head": 0.0}


def _prefixed(state: dict[str, torch.Tensor], prefix: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()} | more


def test_a_trainer_style_classifier_moves_between_bases_saved_with_and_without_a_head(tmp_path):
    """Base with a pre-training head, fine-tune with a classifier, target saved as the bare encoder."""
    base = draw_state(0)
    tuned = {n: v + 0.01 for n, v in base.items()}
    folders = {
        "base": save_folder(tmp_path / "base", _prefixed(base, "bert.", **{"cls.bias": torch.zeros(3)})),
        "tuned": save_folder(tmp_path / "tuned", _prefixed(tuned, "bert.", **{"classifier.weight": torch.ones(2, 3)})),
        "target": save_folder(tmp_path / "target", draw_state(1)),
    }
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out", head="copy")
    written = read_folder(tmp_path / "out")
    expected = draw_state(1)["norm.weight"] + (tuned["norm.weight"] - base["norm.weight"])
    assert torch.equal(written["norm.weight"], expected)
    assert torch.equal(written["classifier.weight"], torch.ones(2, 3))
    assert "cls.bias" not in written


def test_a_head_the_fine_tune_dropped_stays_the_targets(tmp_path):
    base = draw_state(0) | {"cls.bias": torch.zeros(3)}
    tuned = {n: v + 0.01 for n, v in draw_state(0).items()}
    target = draw_state(1) | {"cls.bias": torch.full((3,), 7.0)}
    folders = {n: save_folder(tmp_path / n, s) for n, s in (("base", base), ("tuned", tuned), ("target", target))}
    gradfix.transport_checkpoint(**folders, mask="none", out=tmp_path / "out")
    assert torch.equal(read_folder(tmp_path / "out")["cls.bias"], torch.full((3,), 7.0))
    assert gradfix.verify(tmp_path / "out")["tensors"]["cls.bias"]["reason"] == "a head the fine-tune dropped"


def test_write_update_writes_a_lent_head_with_its_trained_change(trio, tmp_path):
    update = {"norm.weight": torch.full((300,), 0.25), "classifier.weight": torch.full((2, 3), 0.5)}
    head = {"classifier.weight": torch.ones(2, 3), "classifier.bias": torch.zeros(2)}
    write_update(update, target=trio["target"], out=tmp_path / "out", alpha=2.0, head=head)
    written, before = read_folder(tmp_path / "out"), read_folder(trio["target"])
    assert torch.equal(written["norm.weight"], before["norm.weight"] + 0.5)
    assert torch.equal(written["classifier.weight"], torch.full((2, 3), 2.0))
    assert torch.equal(written["classifier.bias"], torch.zeros(2))
    assert torch.equal(head["classifier.weight"], torch.ones(2, 3))
    gradfix.verify(tmp_path / "out")


@pytest.mark.parametrize(
    "options", [["--mask", "magnitude"], ["--mask", "random"], ["--method", "one_step"]], ids=" ".join
)
def test_a_copied_head_is_written_whatever_makes_the_update(tmp_path, monkeypatch, options):
    """What was scored is what a reader of the folder gets: encoder, coins and classifier."""
    setup("bert", tmp_path)
    monkeypatch.chdir(tmp_path)
    data = ["--data", "reviews", "--task", "classification"]
    words = ["--base", "bert-old", "--tuned", "bert-old-reviews", "--target", "bert-new", *data, "--head", "copy"]
    alpha = [] if "--method" in options else ["--alpha", "0.5"]
    rest = ["--shots", "2", *alpha, "--force", "--out", "out", "--json", "out.json", "-q"]
    assert run(["transport", *words, *options, *rest]) == 0
    assert any(name.startswith("classifier.") for name in read_folder(tmp_path / "out"))
    assert run(["evaluate", "--model", "out", *data, "--json", "again.json", "-q"]) == 0
    told = json.loads((tmp_path / "out.json").read_text())["test_after"]
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["loss"] == pytest.approx(told["loss"], rel=1e-5)
