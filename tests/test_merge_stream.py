"""Merging from folder to folder: equal to memory bit for bit, bounded in memory, honest about its inputs."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradfix
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, OutputError, UnsafeResult, UsageError
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.merging.memory import MERGES, mask_then_merge, merge, merge_then_mask
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector

SHAPES = {"embed.weight": (40, 30), "layers.0.weight": (25, 44), "layers.0.bias": (25,), "norm.scale": (7,), "t": ()}
RANDOM = [name for name in MERGES if "seed" in MERGES[name].options]


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    return {**tensors, "steps": torch.tensor([seed], dtype=torch.int64)}


def tune(base: dict[str, Tensor], seed: int, size: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100)
    return {
        n: (t.float() + size * torch.randn(t.shape, generator=generator)).to(t.dtype) if t.is_floating_point() else t
        for n, t in base.items()
    }


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def votes_for(seed: int, count: int = 5) -> SignVotes:
    generator = torch.Generator().manual_seed(seed + 50)
    return SignVotes(
        {n: torch.randint(-count, count + 1, s, generator=generator, dtype=torch.int8) for n, s in SHAPES.items()},
        count,
    )


class Case:
    """Three fine-tunes on two bases, and a target, on disk and in memory."""

    def __init__(self, tmp: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> None:
        bases = [state(0, dtype), state(0, dtype), state(1, dtype)]
        self.tuned = [tune(base, seed) for seed, base in enumerate(bases)]
        self.target_state = state(2, dtype)
        self.target = save(tmp / "target", self.target_state, shards)
        folders = [save(tmp / "base0", bases[0], shards)] * 2 + [save(tmp / "base2", bases[2])]
        self.vectors = [
            Vector(base, save(tmp / f"tuned{i}", tuned, shards if i == 0 else 1))
            for i, (base, tuned) in enumerate(zip(folders, self.tuned, strict=True))
        ]
        self.taus = [TaskVector.between(b, t) for b, t in zip(bases, self.tuned, strict=True)]
        self.tasks = [votes_for(seed) for seed in range(3)]

    def voting(self) -> list[Vector]:
        return [Vector(v.base, v.tuned, votes) for v, votes in zip(self.vectors, self.tasks, strict=True)]

    def expect(self, out: Path, update: TaskVector, alpha: float) -> None:
        written = read(out)
        assert set(written) == set(self.target_state)
        for name, weight in self.target_state.items():
            if name in update:
                wide = torch.promote_types(weight.dtype, torch.float32)
                expected = (weight.to(wide) + alpha * update[name].to(wide)).to(weight.dtype)
            else:
                expected = weight
            assert torch.equal(written[name], expected), name


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "merging.bundles",
        "merging.differences",
        "stream.updates",
        "stream.pipeline",
        "vectors.transported",
    ):
        monkeypatch.setattr(f"gradfix.{module}.CHUNK", 100)


@pytest.mark.parametrize("method", list(MERGES))
@pytest.mark.parametrize(
    ("dtype", "shards"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float64, 1), (torch.float16, 1)]
)
def test_stream_equals_memory_bit_for_bit(tmp_path: Path, method: str, dtype: torch.dtype, shards: int) -> None:
    case = Case(tmp_path, dtype, shards)
    count = 2 if method == "slerp" else 3
    seed = 3 if method in RANDOM else None
    merge_checkpoints(
        target=case.target, vectors=case.vectors[:count], out=tmp_path / "out", method=method, alpha=0.7, seed=seed
    )
    case.expect(tmp_path / "out", merge(case.taus[:count], method, generator=seed), 0.7)


@pytest.mark.parametrize("options", [{"per_tensor": True}, {"election": "count"}, {"density": [0.1, 0.5, 1.0]}])
def test_options_reach_the_stream(tmp_path: Path, options: dict[str, Any]) -> None:
    case = Case(tmp_path)
    vectors = [Vector(v.base, v.tuned, weight=w) for v, w in zip(case.vectors, (1.0, 0.5, 2.0), strict=True)]
    merge_checkpoints(target=case.target, vectors=vectors, out=tmp_path / "out", **options)
    case.expect(tmp_path / "out", merge(case.taus, "ties", [1.0, 0.5, 2.0], **options), 1.0)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "della", "model_stock"])
@pytest.mark.parametrize("mask", ["agree", "veto", "random"])
@pytest.mark.parametrize("order", ["mask_then_merge", "merge_then_mask"])
def test_pipelines_equal_memory_bit_for_bit(tmp_path: Path, order: str, mask: str, method: str) -> None:
    case = Case(tmp_path, torch.bfloat16)
    margin = 0.3 if mask == "veto" else None
    seed = 5 if mask == "random" or method == "della" else None
    report = merge_checkpoints(
        target=case.target, vectors=case.voting(), out=tmp_path / "out", method=method, order=order, mask=mask,
        margin=margin, seed=seed, alpha=0.5, force=True,
    )  # fmt: skip
    pipeline = mask_then_merge if order == "mask_then_merge" else merge_then_mask
    moved = pipeline(case.taus, case.tasks, method, mask=mask, margin=margin, generator=seed)
    case.expect(tmp_path / "out", moved.update, 0.5)
    assert report.transported == len(SHAPES) and report.copied == 1


def test_votes_files_and_shared_votes(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.tasks[0].save(tmp_path / "votes.safetensors")
    vectors = [Vector(v.base, v.tuned, tmp_path / "votes.safetensors") for v in case.vectors]
    merge_checkpoints(target=case.target, vectors=vectors, out=tmp_path / "a", order="mask_then_merge")
    case.expect(tmp_path / "a", mask_then_merge(case.taus, case.tasks[0]).update, 1.0)
    merge_checkpoints(target=case.target, vectors=vectors, out=tmp_path / "b", order="merge_then_mask")
    case.expect(tmp_path / "b", merge_then_mask(case.taus, case.tasks[0]).update, 1.0)


def test_weights_without_votes_stay(tmp_path: Path) -> None:
    case = Case(tmp_path)
    some = [SignVotes({n: t for n, t in v.items() if n != "embed.weight"}, v.count) for v in case.tasks]
    vectors = [Vector(v.base, v.tuned, votes) for v, votes in zip(case.vectors, some, strict=True)]
    for order, pipeline in (("mask_then_merge", mask_then_merge), ("merge_then_mask", merge_then_mask)):
        merge_checkpoints(target=case.target, vectors=vectors, out=tmp_path / order, order=order)
        case.expect(tmp_path / order, pipeline(case.taus, some).update, 1.0)
        assert torch.equal(read(tmp_path / order)["embed.weight"], case.target_state["embed.weight"])


def test_the_manifest_tells_the_whole_story(tmp_path: Path) -> None:
    case = Case(tmp_path)
    merge_checkpoints(
        target=case.target, vectors=case.voting(), out=tmp_path / "out", order="mask_then_merge",
        details={"who": "me"},
    )  # fmt: skip
    manifest = gradfix.verify(tmp_path / "out")
    assert manifest["kind"] == "merge"
    assert set(manifest["inputs"]) == {"target", *(f"{r} {i}" for r in ("base", "tuned") for i in (1, 2, 3))}
    from gradfix.checkpoints.hashes import hash_file

    for role in manifest["inputs"].values():
        for file, digest in role["hashes"].items():
            assert digest == hash_file(Path(role["path"]) / file)
    assert manifest["details"]["who"] == "me"
    assert manifest["details"]["merge"]["method"] == "ties"
    assert all(0.3 < fact["kept"] < 0.7 for fact in manifest["details"]["vectors"])
    assert set(manifest["tensors"]) == set(case.target_state)
    assert manifest["counts"]["total"] == len(case.target_state)


def test_a_lora_folder_is_a_fine_tune(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["query"], r=2, init_lora_weights=False, lora_alpha=0.1)
    )
    adapted.save_pretrained(tmp_path / "lora")
    full = tune(load_file(tmp_path / "base" / "model.safetensors"), 3, size=0.01)
    save(tmp_path / "full", full)
    vectors = [Vector(tmp_path / "base", tmp_path / "lora"), Vector(tmp_path / "base", tmp_path / "full")]
    merge_checkpoints(target=tmp_path / "base", vectors=vectors, out=tmp_path / "out", method="mean")
    taus = [TaskVector.between(tmp_path / "base", tmp_path / kind) for kind in ("lora", "full")]
    base = load_file(tmp_path / "base" / "model.safetensors")
    merged = merge(taus, "mean")
    written = read(tmp_path / "out")
    assert all(torch.equal(written[name], base[name] + merged[name]) for name in merged)


def test_memory_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "merging.bundles",
        "merging.differences",
        "stream.updates",
        "stream.pipeline",
        "vectors.transported",
    ):
        monkeypatch.setattr(f"gradfix.{module}.CHUNK", 1 << 14)
    base = {"w": torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    save(tmp_path / "base", base)
    vectors = [Vector(tmp_path / "base", save(tmp_path / f"t{i}", tune(base, i))) for i in range(3)]
    del base
    tracemalloc.start()
    merge_checkpoints(target=tmp_path / "base", vectors=vectors, out=tmp_path / "out", method="ties")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Buffers read from files are Python's; one whole vector in bf16 would be 4 MiB.
    assert peak < 3 << 20


def test_heads_follow_the_policy(tmp_path: Path) -> None:
    case = Case(tmp_path)
    headed = [{**tuned, "head.weight": torch.full((2, 2), float(i))} for i, tuned in enumerate(case.tuned)]
    folders = [save(tmp_path / f"headed{i}", tensors) for i, tensors in enumerate(headed)]
    both = [Vector(v.base, f) for v, f in zip(case.vectors, folders, strict=True)]
    one = [both[0], *case.vectors[1:]]
    with pytest.raises(IncompatibleCheckpoints, match=r"'head.weight'"):
        merge_checkpoints(target=case.target, vectors=one, out=tmp_path / "out")
    with pytest.raises(UsageError, match="both bring a head 'head.weight'"):
        merge_checkpoints(target=case.target, vectors=both, out=tmp_path / "out", head="copy")
    merge_checkpoints(target=case.target, vectors=one, out=tmp_path / "copied", head="copy")
    assert torch.equal(read(tmp_path / "copied")["head.weight"], headed[0]["head.weight"])
    report = merge_checkpoints(target=case.target, vectors=both, out=tmp_path / "skipped", head="skip")
    assert report.skipped == 1 and "head.weight" not in read(tmp_path / "skipped")


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path)
    out = tmp_path / "out"

    def attempt(vectors: list[Vector], **options: Any) -> None:
        merge_checkpoints(target=case.target, vectors=vectors, out=out, **options)

    with pytest.raises(UsageError, match="nothing to merge"):
        attempt([])
    with pytest.raises(UsageError, match="no order called 'mask_merge'"):
        attempt(case.vectors, order="mask_merge")
    with pytest.raises(UsageError, match="'plain' uses no votes"):
        attempt(case.voting())
    with pytest.raises(UsageError, match="needs votes"):
        attempt(case.vectors, order="merge_then_mask")
    with pytest.raises(UsageError, match="no option of this merge called 'lambda'"):
        attempt(case.vectors, **{"lambda": 1})
    with pytest.raises(UsageError, match="needs randomness"):
        attempt(case.vectors, method="dare_ties")
    with pytest.raises(UnsafeResult, match="task vector is zero"):
        attempt([case.vectors[0], Vector(case.vectors[1].base, case.vectors[1].base)])
    cosines = r"of its norm: not a fine-tune.*base and fine-tune 0\.\d+, of base and target -?0\.\d+"
    with pytest.raises(IncompatibleCheckpoints, match=cosines):
        attempt([case.vectors[0], Vector(case.vectors[0].base, case.vectors[2].tuned)])
    silent = SignVotes({n: torch.zeros(s, dtype=torch.int8) for n, s in SHAPES.items()}, 5)
    with pytest.raises(UnsafeResult, match=r"keeps 0.00%"):
        attempt([Vector(v.base, v.tuned, silent) for v in case.vectors], order="mask_then_merge")
    other = SignVotes(dict(case.tasks[0]), 5, target_hash="files:other")
    for order in ("mask_then_merge", "merge_then_mask"):
        with pytest.raises(IncompatibleCheckpoints, match="other weights"):
            attempt([Vector(v.base, v.tuned, other) for v in case.vectors], order=order)
    small = save(tmp_path / "small", {"embed.weight": torch.zeros(2)})
    with pytest.raises(IncompatibleCheckpoints):
        attempt([case.vectors[0], Vector(small, small)])
    with pytest.raises(OutputError, match="inputs are never modified"):
        merge_checkpoints(target=case.target, vectors=case.vectors, out=Path(str(case.vectors[2].tuned)))
    assert not out.exists() and not list(tmp_path.glob(".out.gradfix-*"))


def test_nan_is_blamed_on_its_file(tmp_path: Path) -> None:
    case = Case(tmp_path)
    broken = {**case.tuned[0], "norm.scale": torch.full((7,), float("nan"))}
    vectors = [*case.vectors[1:], Vector(case.vectors[0].base, save(tmp_path / "broken", broken))]
    with pytest.raises(CorruptInput, match=r"'norm.scale' of .*broken holds NaN"):
        merge_checkpoints(target=case.target, vectors=vectors, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_alpha_zero_copies_the_target(tmp_path: Path) -> None:
    case = Case(tmp_path)
    report = merge_checkpoints(target=case.target, vectors=case.vectors, out=tmp_path / "out", alpha=0.0)
    assert report.transported == 0 and "alpha is 0" in report.notes[0]
    written = read(tmp_path / "out")
    assert all(torch.equal(written[name], tensor) for name, tensor in case.target_state.items())


def test_equal_magnitudes_that_keep_more_are_told(tmp_path: Path) -> None:
    """bf16 leaves few sizes for a change, so that many entries share one."""
    generator = torch.Generator().manual_seed(0)
    base = (0.02 * torch.randn(80, 80, generator=generator)).bfloat16()
    tuned = (base.float() + 1e-4 * torch.randn(base.shape, generator=generator)).bfloat16()
    settings = {"target": {"w": base}, "vectors": [Vector({"w": base}, {"w": tuned})], "density": 0.2}
    report = merge_checkpoints(**settings, out=tmp_path / "all", method="ties")
    assert any(note.startswith("density 0.2 keeps 3") and "exact" in note for note in report.notes)
    exact = merge_checkpoints(**settings, out=tmp_path / "exact", method="ties", exact=True)
    assert not exact.notes and exact.kept * int((tuned != base).sum()) == pytest.approx(0.2 * 6400)
