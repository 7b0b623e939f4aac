"""Votes of a sharded model equal those of one process exactly, and every silent failure of FSDP is an error."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.errors import GradfixError
from gradfix.system.processes import Group, in_processes, joined
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes.collect import collect, collect_votes
from gradfix.votes.distributed.build import blocks, build_sharded, mesh_of, shard
from gradfix.votes.distributed.sharded import InShards, save_sharded
from gradfix.votes.engines.loop import Batches
from tiny import save_tiny, toy_texts, write_rows

SAMPLES = 7  # not divisible by 2 or 4


def _text_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["tokens"]
    kind = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, **kind).logits[:, :-1]
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def _image_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(pixel_values=batch["pixels"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def _batches(family: str) -> Batches:
    draw = torch.Generator().manual_seed(3)
    if family == "vit":
        data = {
            "pixels": torch.randn(SAMPLES, 3, 16, 16, generator=draw, dtype=torch.float64),
            "labels": torch.randint(0, 3, (SAMPLES,), generator=draw),
        }
    else:
        data = {"tokens": torch.randint(7, 60, (SAMPLES, 6), generator=draw)}
    return Batches(lambda rows: {n: t[list(rows)] for n, t in data.items()}, range(SAMPLES), 4)


def _auto(family: str) -> Any:
    heal_torchvision()
    import transformers

    kinds = {"t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}
    return getattr(transformers, kinds.get(family, "AutoModelForCausalLM"))


def _make(family: str, folder: Path) -> nn.Module:
    from transformers import AutoConfig

    model = _auto(family).from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _reference(family: str, folder: Path, dtype: torch.dtype) -> SignVotes:
    model = _auto(family).from_pretrained(folder, dtype=dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    batches = _batches(family)
    loss = _image_loss if family == "vit" else _text_loss
    votes = collect_votes(model, loss, [batches[i] for i in range(len(batches))], engine="loop")
    names = name_map(model, open_checkpoint(folder).names())
    return SignVotes(names.to_disk(votes), votes.count)


def _check(group: Group, home: Path, name: str, replicas: int = 1, **options: Any) -> str:
    """Vote sharded, save, compare with one process; key biases have no true gradient and are left out."""
    family = name.split("-", maxsplit=1)[0]
    folder, loss = home / name, _image_loss if family == "vit" else _text_loss
    checkpoint = open_checkpoint(folder)
    mesh = mesh_of(group, "cpu", replicas)
    built = build_sharded(lambda: _make(family, folder), checkpoint, mesh, "cpu", **options)
    held = sum(p.to_local().numel() for p in built.model.parameters())
    whole = sum(p.numel() for p in built.model.parameters())
    votes = collect(InShards(group, built.model, built.signs, loss, _batches(family)))
    label = "-".join([name, str(group.size), str(replicas), *options])
    for out in (home / f"{label}.safetensors", home / label):
        save_sharded(group, votes, built, checkpoint, out, target_hash="x")
    del built
    gc.collect()
    if not group.leads:
        return ""
    if held > 0.75 * whole:
        return f"{label}: one process holds {held} of {whole} weights"
    expected = _reference(family, folder, options.get("compute", torch.float64))
    for out in (home / f"{label}.safetensors", home / label):
        found = SignVotes.load(out)
        if set(found) != set(expected) or found.count != SAMPLES:
            return f"{label}: names or count differ"
        wrong = [n for n in expected if "key.bias" not in n and not torch.equal(found[n], expected[n])]
        if wrong:
            return f"{label}: {len(wrong)} tensors differ, first {wrong[0]}"
    return ""


class _Twice(nn.Module):
    """A layer that is used twice, with the checkpointing the caller likes."""

    def __init__(self, reuse: bool, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64)])
        self.reuse = reuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(1 + self.reuse):
            x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant).tanh()
        return x.sum(1)


def _guards(group: Group) -> dict[str, str]:
    """What each way to go wrong in silence is answered with."""
    found: dict[str, str] = {}
    data = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches = Batches(lambda rows: data[list(rows)].requires_grad_(), range(4), 2)

    def told(name: str, model: nn.Module, spoil: Any = None, mesh: Any = None) -> None:
        try:
            signs = shard(model, mesh or mesh_of(group, "cpu"))
            if spoil is not None:
                spoil(model)
            collect(InShards(group, model, signs, lambda m, x: m(x), batches))
            found[name] = "nothing"
        except (GradfixError, SystemExit) as error:
            found[name] = str(error)

    told("fine", _Twice(reuse=False))
    told("no sync", _Twice(reuse=False), lambda m: m.set_requires_gradient_sync(False))
    told("reused", _Twice(reuse=True))
    told("reused plainly", _Twice(reuse=True, reentrant=False))
    idle = _Twice(reuse=False)
    idle.layers.append(nn.Linear(4, 4, dtype=torch.float64))
    told("idle layer", idle)
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=16, tie_word_embeddings=True)  # fmt: skip
    torn = AutoModelForCausalLM.from_config(small)
    torn.lm_head.weight = nn.Parameter(torn.model.embed_tokens.weight.detach().clone())
    told("tied in pieces", torn)
    for name, group_of, replicas in (("alone", Group(0, 1, 0), 1), ("uneven", group, 3)):
        try:
            mesh_of(group_of, "cpu", replicas)
        except GradfixError as error:
            found[name] = str(error)
    gc.collect()
    return found


def _work(home: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with joined() as group:
        names = ["llama-tied", "llama-untied", "t5", "vit", "mixtral"]
        found: dict[str, Any] = {"wrong": []}
        cases: list[tuple[str, int, dict[str, Any]]] = [(name, 1, {}) for name in names]
        if group.size == 4:
            cases += [("llama-tied", 2, {}), ("mixtral", 2, {}), ("llama-untied", 1, {"recompute": True})]
        else:
            cases = [("llama-tied", 1, {"recompute": True}), ("t5", 1, {}), ("t5-head", 1, {}), ("mixtral", 1, {}),
                     ("llama-untied", 1, {"compute": torch.float32})]  # fmt: skip
            found |= _guards(group)
        for name, replicas, options in cases:
            answer = _check(group, Path(home), name, replicas, **options)
            if answer:
                found["wrong"].append(answer)
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for name in ("llama-untied", "t5", "vit", "mixtral"):
        save_tiny(name.split("-", maxsplit=1)[0], folder / name, 1, torch.float64)
    shutil.copytree(folder / "t5", folder / "t5-head")  # T5 1.1: the config ties what the file holds twice
    weights = load_file(folder / "t5" / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    head = torch.randn(weights["shared.weight"].shape, generator=draw, dtype=torch.float64)
    save_file({**weights, "lm_head.weight": head}, folder / "t5-head" / "model.safetensors", {"format": "pt"})
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = json.loads((folder / "llama-untied" / "config.json").read_text())
    torch.manual_seed(4)
    tied = AutoModelForCausalLM.from_config(LlamaConfig(**{**config, "tie_word_embeddings": True}))
    tied.to(torch.float64).save_pretrained(folder / "llama-tied")
    return folder


def test_four_processes(home):
    assert in_processes(_work, str(home), 4) == {"wrong": []}


def test_two_processes_and_the_guards(home):
    found = in_processes(_work, str(home), 2)
    assert found.pop("wrong") == []
    assert found.pop("fine") == "nothing"
    for name, text in {
        "no sync": "folded 0 times in one step; no gradient arrived at all",
        "reused": "after it was folded; its gradient came in pieces",
        "reused plainly": "folded 2 times in one step; its gradient came in pieces",
        "idle layer": "folded 0 times in one step; its gradient never arrived",
        "tied in pieces": "each would vote on half of the gradient",
        "alone": "needs at least two processes",
        "uneven": "cannot hold 3 replicas",
    }.items():
        assert text in found.pop(name), name
    assert found == {}


def test_the_command_gives_what_one_process_gives(home, tmp_path):
    save_tiny("llama", tmp_path / "target", 2)
    write_rows(tmp_path / "data", "train", toy_texts(10))
    common = ["vote", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "data"), "--task", "causal",
              "--shots", "5", "--dtype", "fp64", "--engine", "loop", "--batch-size", "4", "--quiet"]  # fmt: skip
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run([*common, "--out", str(one)]) == 0
    assert run([*common, "--out", str(two), "--sharded", "--processes", "2"]) == 0
    assert run([*common, "--out", str(two), "--sharded"]) == 2
    expected, found = SignVotes.load(one), SignVotes.load(two)
    assert (found.count, found.target_hash) == (expected.count, expected.target_hash)
    assert set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in expected)


def test_blocks_are_the_outermost_lists():
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))]), nn.Linear(1, 1))
    assert blocks(model) == [model[0][0]]
