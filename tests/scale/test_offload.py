"""A model whose weights are on disk votes as it does in memory, exactly; silence is an error."""

from __future__ import annotations

import json
import re

import pytest
import torch
from accelerate import dispatch_model

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.open import open_checkpoint
from gradfix.cli import run
from gradfix.commands.configs import VoteConfig
from gradfix.commands.vote import run_vote
from gradfix.errors import CorruptInput, UnsafeResult, UsageError
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes.collect import collect, collect_votes
from gradfix.votes.distributed.offload import canonical_names, load_offloaded
from gradfix.votes.distributed.ondisk import OnDisk
from tiny import IMAGE_LABELS, TEXT_LABELS, save_tiny, toy_images, toy_texts, write_rows

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
        votes = collect(OnDisk(model, _loss, BATCHES, names))
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
        collect(
            OnDisk(model, lambda m, b: m.model(input_ids=b["tokens"]).last_hidden_state.sum((1, 2)), BATCHES, names)
        )
    with pytest.raises(UnsafeResult, match="no weight was folded"):
        collect(OnDisk(model, lambda m, b: torch.ones(len(b["tokens"]), requires_grad=True), BATCHES, names))


def _next_token(model, batch):
    tokens = batch["tokens"]
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, **more).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def _label(model, batch):
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return torch.nn.functional.cross_entropy(model(**given).logits, batch["labels"], reduction="none")


_DRAW = torch.Generator().manual_seed(3)
TOKENS = {"tokens": torch.randint(7, 60, (3, 6), generator=_DRAW)}
TEXTS = {"input_ids": TOKENS["tokens"], "labels": torch.tensor([0, 1, 1])}
IMAGES = {"pixel_values": torch.randn(3, 3, 16, 16, generator=_DRAW, dtype=torch.float64),
          "labels": torch.tensor([0, 1, 2])}  # fmt: skip
# family, its class, loss, batch, bytes for weights, and how many of its tensors stay in memory with so many
MODELS = {
    "llama": ("CausalLM", _next_token, TOKENS, 110_000, 1),
    "llama tied": ("CausalLM", _next_token, TOKENS, 110_000, 1),
    "t5": ("Seq2SeqLM", _next_token, TOKENS, 140_000, 1),
    "t5 with its own head": ("Seq2SeqLM", _next_token, TOKENS, 140_000, 1),
    "mixtral": ("CausalLM", _next_token, TOKENS, 180_000, 1),
    "gpt2": ("CausalLM", _next_token, TOKENS, 145_000, 1),
    "vit": ("ImageClassification", _label, IMAGES, 130_000, 4),
    "bert_classifier": ("SequenceClassification", _label, TEXTS, 105_000, 1),
}


def _auto(kind: str):
    import transformers

    return getattr(transformers, f"AutoModelFor{kind}")


def _in_float64(model):
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _saved(name: str, folder):
    family, _, twist = name.partition(" ")
    save_tiny(family, folder, 1, torch.float64)
    if twist:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        if twist == "tied":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
            del weights["lm_head.weight"]
        else:
            draw = torch.Generator().manual_seed(5)
            weights["lm_head.weight"] = torch.randn(weights["shared.weight"].shape, generator=draw, dtype=torch.float64)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_disk_and_memory_agree_for_every_kind_of_layer(name, tmp_path):
    from transformers import AutoConfig

    kind, loss, batch, limit, resident = MODELS[name]
    folder = _saved(name, tmp_path / "target")
    whole = _in_float64(_auto(kind).from_pretrained(folder, dtype=torch.float64))

    def make():
        return _in_float64(_auto(kind).from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64))

    found = load_offloaded(make, open_checkpoint(folder), tmp_path / "off", {"cpu": limit})
    assert sum(p.device.type != "meta" for p in found.model.parameters()) == resident
    written = {path.name.removesuffix(".safetensors") for path in (tmp_path / "off").iterdir()}
    assert written == {n for place in found.names.fused.values() for n in place.sources}
    expected = collect_votes(whole, loss, [batch], engine="loop")
    votes = collect(OnDisk(found.model, loss, [batch], found.ties))
    assert set(votes) == set(expected) == set(canonical_names(whole).values())
    # a key bias has no gradient but rounding
    assert all(torch.equal(votes[n], expected[n]) for n in expected if "key.bias" not in n)
    one = {n: t[:1] for n, t in batch.items()}  # one sample, twice: nothing of a vote is left behind
    again = [collect(OnDisk(found.model, loss, [one], found.ties)) for _ in range(2)]
    assert all(torch.equal(again[0][n], again[1][n]) for n in expected)


def test_pickled_weights_are_written_to_the_folder(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoConfig

    folder = save_tiny("llama", tmp_path / "target", 1, torch.float64)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    whole = _auto("CausalLM").from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)
    whole.load_state_dict(weights)

    def make():
        return _auto("CausalLM").from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)

    found = load_offloaded(make, open_checkpoint(folder), tmp_path / "off", {"cpu": 110_000})
    assert len(list((tmp_path / "off").iterdir())) == len(weights) - 1
    expected = collect_votes(whole, _next_token, [TOKENS], engine="loop")
    votes = collect(OnDisk(found.model, _next_token, [TOKENS], found.ties))
    assert all(torch.equal(votes[n], expected[n]) for n in expected)


def test_memory_for_less_than_the_first_layer_is_refused(tmp_path):
    folder = save_tiny("vit", tmp_path / "target", 1)
    from transformers import AutoConfig

    def make():
        return _auto("ImageClassification").from_config(AutoConfig.from_pretrained(folder))

    with pytest.raises(UsageError, match=r"no room for 'vit.embeddings', where the model begins"):
        load_offloaded(make, open_checkpoint(folder), tmp_path / "off", {"cpu": 1000})


def test_the_memory_that_a_refusal_names_is_enough(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=6000)  # its two tables are larger than any block

    def load(room: int) -> None:
        load_offloaded(
            lambda: LlamaForCausalLM(config), open_checkpoint(tmp_path / "target"), tmp_path / "off", {"cpu": room}
        )

    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    with pytest.raises(UsageError, match="beside its largest layer") as refused:
        load(900_000)
    load(int((float(re.findall(r"([\d.]+) MiB", str(refused.value))[0]) + 0.1) * 2**20))


def _of_keys(name: str) -> bool:
    """Biases of attention keys: they have no gradient but rounding."""
    return any(part in name for part in ("key.bias", "k_proj.bias", "in_proj_bias"))


@pytest.mark.parametrize(
    ("family", "task", "limit"),
    [("llama", "causal", "110KB"), ("mixtral", "causal", "180KB"), ("t5", "seq2seq", "140KB"),
     ("vit", "classification", "130KB"), ("bert", "zero-shot", "120KB"), ("clip", "zero-shot", "130KB"),
     ("siglip", "zero-shot", "130KB")],
)  # fmt: skip
def test_the_command_gives_what_memory_gives(tmp_path, family, task, limit, capfd):
    save_tiny(family, tmp_path / "target", 2)
    images = family in ("vit", "clip", "siglip")
    write_rows(tmp_path / "data", "train", toy_images(9) if images else toy_texts(6))
    prompts = {label: f"a {label} photo" for label in (IMAGE_LABELS if images else TEXT_LABELS)}
    (tmp_path / "data" / "task.json").write_text(json.dumps({"labels": prompts}))
    common = ["vote", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "data"), "--task", task,
              "--shots", "3", "--dtype", "fp64", "--engine", "loop", "--batch-size", "4", "--quiet"]  # fmt: skip
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run([*common, "--out", str(one)]) == 0
    capfd.readouterr()
    more = ["--offload", str(tmp_path / "off"), "--max-memory", limit]
    assert run([*common, "--out", str(two), *more]) == 0
    assert "device" not in capfd.readouterr().err  # accelerate has nothing to say
    expected, found = SignVotes.load(one), SignVotes.load(two)
    assert (found.count, found.target_hash) == (expected.count, expected.target_hash)
    assert set(found) == set(expected)
    assert all(torch.equal(found[n], expected[n]) for n in expected if not _of_keys(n))


def test_an_interrupted_vote_goes_on(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path / "target", 2)
    write_rows(tmp_path / "data", "train", toy_texts(12))
    out = tmp_path / "out" / "votes.safetensors"
    asked = {"target": str(tmp_path / "target"), "data": str(tmp_path / "data"), "task": "causal", "shots": 6,
             "batch_size": 4, "offload": str(tmp_path / "off"), "max_memory": "60KB"}  # fmt: skip
    whole = run_vote(VoteConfig(**asked, out=str(tmp_path / "whole.safetensors"))).votes
    monkeypatch.setattr("gradfix.votes.resume.SAVE_EVERY_SECONDS", 0.0)
    done: list[int] = []

    def dying(amount: int) -> None:
        done.append(amount)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_vote(VoteConfig(**asked, out=str(out)), dying)
    with pytest.raises(CorruptInput, match="belongs to another vote"):
        run_vote(VoteConfig(**{**asked, "seed": 1}, out=str(out)))
    again: list[int] = []
    votes = run_vote(VoteConfig(**asked, out=str(out)), again.append).votes
    assert sum(again) == 12 - 4  # the first batch was on disk, the second interrupted before it was saved
    assert votes.count == whole.count == 12 and all(torch.equal(votes[n], whole[n]) for n in whole)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
