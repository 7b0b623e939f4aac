"""On-disk and module names: exact round trips over real model classes and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradfix.checkpoints.names import Window, name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import IncompatibleCheckpoints
from gradfix.vectors.signvotes import SignVotes, votes_to_disk
from tiny import _BERT, VOCAB, _llama_shape, save_tiny

LOADERS = {
    "vit": "AutoModelForImageClassification",
    "clip": "AutoModel",
    "siglip": "AutoModel",
    "bert": "AutoModel",
    "bert_classifier": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "llama": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM",
}


def load(folder: Path, loader: str, **options: object) -> nn.Module:
    import transformers

    return getattr(transformers, loader).from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(family, root / family) for family in LOADERS}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("family", LOADERS)
def test_disk_to_module_to_disk_is_exact(folders: dict[str, Path], family: str) -> None:
    checkpoint = open_checkpoint(folders[family])
    model = load(folders[family], LOADERS[family])
    names = name_map(model, checkpoint.names())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    on_disk = {name: t for name, t in checkpoint.state().items() if not name.endswith("position_ids")}
    assert_same(names.to_disk(parameters), on_disk)
    assert_same(names.to_module(on_disk), parameters)


@pytest.mark.parametrize("family", LOADERS)
def test_a_weightless_model_gives_the_same_map(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family], LOADERS[family])
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert name_map(empty).renamed == name_map(model).renamed
    assert name_map(empty).fused == name_map(model).fused


@pytest.mark.parametrize("family", sorted(set(LOADERS) - {"mixtral"}))
def test_nothing_is_fused_where_nothing_is_split(folders: dict[str, Path], family: str) -> None:
    assert name_map(load(folders[family], LOADERS[family])).fused == {}


def test_experts_are_described_without_coordinates(folders: dict[str, Path]) -> None:
    names = name_map(load(folders["mixtral"], "AutoModelForCausalLM"))
    assert names.fused
    assert all(isinstance(place, Window) for place in names.fused.values())


def test_a_fused_file_of_split_weights_round_trips(tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    size = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 14, "patch_size": 7}
    config = Dinov2Config(**size, use_swiglu_ffn=True)
    Dinov2Model(config).save_pretrained(tmp_path)
    model = Dinov2Model.from_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    names = name_map(model, checkpoint.names())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(names.to_disk(parameters), checkpoint.state())
    assert_same(names.to_module(checkpoint.state()), parameters)


@pytest.mark.parametrize(
    ("saved", "loader"),
    [("bert_classifier", "AutoModel"), ("vit", "AutoModel"), ("llama", "AutoModel"), ("gpt2", "AutoModel")],
)
def test_a_bare_model_over_a_file_saved_with_a_head(folders: dict[str, Path], saved: str, loader: str) -> None:
    checkpoint = open_checkpoint(folders[saved])
    model = load(folders[saved], loader)
    held = name_map(model, checkpoint.names()).to_disk(dict(model.named_parameters()))
    shared = set(held) & set(checkpoint.names())
    assert len(shared) >= len(checkpoint.names()) - 2  # all but the head
    for name in shared:
        assert torch.equal(held[name], checkpoint.read(name))


@pytest.mark.parametrize(
    ("saved", "loader"), [("bert", "AutoModelForSequenceClassification"), ("llama_bare", "AutoModelForCausalLM")]
)
def test_a_headed_model_over_a_bare_file(folders: dict[str, Path], tmp_path: Path, saved: str, loader: str) -> None:
    folder = folders.get(saved)
    if folder is None:
        folder = tmp_path
        load(folders["llama"], "AutoModel").save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    model = load(folder, loader)
    held = name_map(model, checkpoint.names()).to_disk(dict(model.named_parameters()))
    missing = set(checkpoint.names()) - set(held)
    assert not missing
    for name in checkpoint.names():
        assert torch.equal(held[name], checkpoint.read(name))


@pytest.mark.parametrize(
    ("saved", "part"),
    [
        ("clip", "CLIPTextModel"),
        ("clip", "CLIPVisionModel"),
        ("siglip", "SiglipTextModel"),
        ("siglip", "SiglipVisionModel"),
        ("t5", "T5EncoderModel"),
        ("mixtral", "MixtralModel"),
    ],
)
def test_a_part_of_a_model_finds_its_tensors(folders: dict[str, Path], saved: str, part: str) -> None:
    """Towers have the same inner names: each must find its own."""
    checkpoint = open_checkpoint(folders[saved])
    model = load(folders[saved], part)
    with torch.device("meta"):
        empty = type(model)(model.config)
    for source in (model, empty):
        held = name_map(source, checkpoint.names()).to_disk(dict(model.named_parameters()))
        for name, tensor in held.items():
            assert torch.equal(tensor, checkpoint.read(name)), name


def test_tied_copies_on_disk_move_with_their_tensor(tmp_path: Path, folders: dict[str, Path]) -> None:
    from safetensors.torch import save_file
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    weights = open_checkpoint(folders["gpt2"]).state()
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    votes = SignVotes({n: torch.ones(p.shape, dtype=torch.int8) for n, p in model.named_parameters()}, 3)
    named = votes_to_disk(votes, model, checkpoint)
    assert set(named) == set(checkpoint.names())
    assert name_map(model, checkpoint.names()).to_module(weights).keys() == dict(model.named_parameters()).keys()


def test_a_tied_tensor_stored_under_its_second_name_only(folders: dict[str, Path]) -> None:
    model = load(folders["gpt2"], "AutoModelForCausalLM")
    weights = open_checkpoint(folders["gpt2"]).state()
    weights["lm_head.weight"] = weights.pop("transformer.wte.weight")
    assert name_map(model, weights).renamed["transformer.wte.weight"] == "lm_head.weight"


@pytest.mark.parametrize("family", LOADERS)
def test_votes_keep_their_integers_under_disk_names(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family], LOADERS[family])
    checkpoint = open_checkpoint(folders[family])
    draw = torch.Generator().manual_seed(0)
    tensors = {
        n: torch.randint(-300, 301, p.shape, generator=draw, dtype=torch.int16) for n, p in model.named_parameters()
    }
    votes = SignVotes(tensors, 300, rule="majority", target_hash="x", notes=("kept",))
    named = votes_to_disk(votes, model, checkpoint)
    assert {n for n in checkpoint.names() if not n.endswith("position_ids")} == set(named)
    assert all(t.dtype is torch.int16 and t.shape == checkpoint.info(n).shape for n, t in named.items())
    assert (named.count, named.target_hash, named.notes) == (300, "x", ("kept",))
    assert_same(name_map(model, checkpoint.names()).to_module(named), tensors)
    assert set(votes_to_disk(named, model, checkpoint)) == set(named)


def test_votes_without_a_home_are_named_in_the_notes(folders: dict[str, Path]) -> None:
    model = load(folders["bert"], "AutoModelForSequenceClassification")
    checkpoint = open_checkpoint(folders["bert"])
    votes = SignVotes({n: torch.ones(p.shape, dtype=torch.int8) for n, p in model.named_parameters()}, 1)
    named = votes_to_disk(votes, model, checkpoint)
    assert set(named) == set(checkpoint.names())
    assert "votes for 'classifier.weight' left out: it is not in the file" in named.notes


def test_votes_of_another_model_are_refused(folders: dict[str, Path]) -> None:
    model = load(folders["bert"], "AutoModel")
    votes = SignVotes({n: torch.ones(p.shape, dtype=torch.int8) for n, p in model.named_parameters()}, 1)
    with pytest.raises(IncompatibleCheckpoints, match="share no tensor name .* Was the model loaded from this"):
        votes_to_disk(votes, model, open_checkpoint(folders["llama"]))


def test_votes_of_another_shape_are_refused(folders: dict[str, Path]) -> None:
    model = load(folders["gpt2"], "AutoModelForCausalLM")
    votes = SignVotes({n: torch.ones(1, dtype=torch.int8) for n, p in model.named_parameters()}, 1)
    with pytest.raises(IncompatibleCheckpoints, match=r"votes for '.*' are \[1\], the tensor in .* is \["):
        votes_to_disk(votes, model, open_checkpoint(folders["gpt2"]))


def test_incomplete_experts_are_refused(folders: dict[str, Path]) -> None:
    names = name_map(load(folders["mixtral"], "AutoModelForCausalLM"))
    weights = open_checkpoint(folders["mixtral"]).state()
    gone = next(name for name in weights if ".experts.2." in name)
    del weights[gone]
    with pytest.raises(IncompatibleCheckpoints, match=f"several on-disk tensors; '{gone}' is missing"):
        names.to_module(weights)


def test_any_module_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    names = name_map(model)
    assert names.renamed == {name: name for name, _ in model.named_parameters()}
    prefixed = ["module." + name for name in names.renamed]
    assert list(name_map(model, prefixed).renamed.values()) == prefixed


def test_masked_language_models_share_their_embedding(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(**_BERT)).save_pretrained(tmp_path)
    model = BertForMaskedLM.from_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    held = name_map(model, checkpoint.names()).to_disk({n: p.detach() for n, p in model.named_parameters()})
    assert_same(held, checkpoint.state())


def test_the_tied_llama_has_no_head_on_disk(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**_llama_shape(), tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.info("model.embed_tokens.weight").shape[0] == len(VOCAB)
    assert set(name_map(model, checkpoint.names()).disk_names()) == set(checkpoint.names())


def test_a_head_of_another_task_is_no_prefix(tmp_path: Path) -> None:
    """ALBERT's `sop_classifier.classifier` ends like the classifier of a fine-tune, and is not it."""
    from transformers import AlbertConfig, AlbertForPreTraining, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=11, pad_token_id=0, hidden_size=8, embedding_size=8, num_attention_heads=2, intermediate_size=8
    )
    AlbertForPreTraining(config).save_pretrained(tmp_path)
    names = name_map(AlbertForSequenceClassification(config), open_checkpoint(tmp_path).names())
    assert names.renamed["classifier.weight"] == "classifier.weight"


def test_what_a_bare_file_lacks_is_named_as_its_other_tensors(folders: dict[str, Path]) -> None:
    model = load(folders["bert_classifier"], LOADERS["bert_classifier"])
    bare = [name.removeprefix("bert.") for name in open_checkpoint(folders["bert_classifier"]).names()]
    names = name_map(model, [name for name in bare if not name.startswith(("pooler.", "classifier."))])
    assert names.renamed["bert.pooler.dense.weight"] == "pooler.dense.weight"
    assert names.renamed["classifier.weight"] == "classifier.weight"
