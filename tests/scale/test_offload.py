"""A model whose weights are on disk votes as it does in memory, exactly; silence is an error."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.errors import UnsafeResult, UsageError
from gradfix.votes.collect import collect_votes
from gradfix.votes.offload import canonical_names, collect_offloaded, load_offloaded
from gradfix.votes.tally import SignVotes
from tiny import save_tiny, toy_texts, write_rows

heal_torchvision()


def _llama(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=40, tie_word_embeddings=tied)  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64).eval()


def _loss(model, batch):
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


BATCHES = [{"tokens": torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))}]


@pytest.mark.parametrize("tied", [False, True])
def test_disk_and_memory_agree_exactly(tmp_path, tied):
    expected = collect_votes(_llama(tied), _loss, BATCHES, engine="loop")
    model = _llama(tied)
    names = canonical_names(model)
    everything = {"model.embed_tokens": "cpu", "lm_head": "cpu" if tied else "disk", "model.norm": "disk",
                  "model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "disk"}  # fmt: skip
    model = dispatch_model(model, everything, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    for _ in range(2):  # the hooks are gone after a vote, and it can be taken again
        votes = collect_offloaded(model, _loss, BATCHES, names)
        assert set(votes) == set(expected) and votes.count == 3
        assert all(torch.equal(votes[name], expected[name]) for name in expected)
    plain = collect_votes(_llama(tied), _loss, BATCHES, engine="loop")
    assert all(torch.equal(plain[name], expected[name]) for name in expected)


def test_a_model_that_no_gradient_reaches_is_refused(tmp_path):
    model = _llama(False)
    names = canonical_names(model)
    places = {"model": "cpu", "lm_head": "disk"}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    with pytest.raises(UnsafeResult, match="folded 0 times for one sample instead of 1"):
        collect_offloaded(
            model, lambda m, b: m.model(input_ids=b["tokens"]).last_hidden_state.sum((1, 2)), BATCHES, names
        )
    with pytest.raises(UnsafeResult, match="no weight was folded"):
        collect_offloaded(
            model, lambda m, b: torch.ones(len(b["tokens"]), requires_grad=True), BATCHES, names
        )


def test_loading_within_a_limit_leaves_the_rest_on_disk(tmp_path):
    folder = save_tiny("llama", tmp_path / "target", 1, torch.float64)
    from transformers import AutoConfig, AutoModelForCausalLM

    def make():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)

    model, names = load_offloaded(make, open_checkpoint(folder), tmp_path / "off", {"cpu": 100_000})
    assert any(p.device.type == "meta" for p in model.parameters())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = collect_votes(whole, _loss, BATCHES, engine="loop")
    votes = collect_offloaded(model, _loss, BATCHES, names)
    assert all(torch.equal(votes[name], expected[name]) for name in expected)


def test_the_command_gives_what_memory_gives(tmp_path):
    save_tiny("llama", tmp_path / "target", 2)
    write_rows(tmp_path / "data", "train", toy_texts(6))
    common = ["vote", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "data"), "--task", "causal",
              "--shots", "3", "--dtype", "fp64", "--engine", "loop", "--batch-size", "4", "--quiet"]  # fmt: skip
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run([*common, "--out", str(one)]) == 0
    more = ["--offload", str(tmp_path / "off"), "--max-memory", "100KB"]
    assert run([*common, "--out", str(two), *more]) == 0
    expected, found = SignVotes.load(one), SignVotes.load(two)
    assert (found.count, found.target_hash) == (expected.count, expected.target_hash)
    assert set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in expected)


def test_renamed_tensors_are_refused(tmp_path):
    folder = save_tiny("mixtral", tmp_path / "target", 1)
    from transformers import AutoConfig, AutoModelForCausalLM

    with pytest.raises(UsageError, match="cannot be offloaded"):
        load_offloaded(
            lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)),
            open_checkpoint(folder), tmp_path / "off", None,
        )  # fmt: skip
