"""From one family of models to another: paired by role, moved by the public call, read back by plain code."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file

from gradfix.align.correspondence import Correspondence, correspond
from gradfix.commands.configs import InspectConfig, TransportConfig
from gradfix.commands.inspect import run_inspect
from gradfix.commands.transport import run_transport
from gradfix.tasks.base import TASKS
from gradfix.training.finetuning import finetune
from tests.tiny import (
    _BERT,
    _TOWER,
    IMAGE_LABELS,
    TEXT_LABELS,
    VOCAB,
    _llama_shape,
    _named,
    save_tiny,
    save_tokenizer,
    toy_images,
    toy_texts,
    write_rows,
)

WIDER = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
MAPS = {"q", "k", "v", "o", "up", "down"}


def _vit(folder: Path) -> None:
    save_tiny("vit", folder, 0)


def _dinov2(folder: Path) -> None:
    torch.manual_seed(1)
    config = hf.Dinov2Config(
        **WIDER, mlp_ratio=2, image_size=28, patch_size=7, initializer_range=0.1, layerscale_value=0.5,
        **_named(IMAGE_LABELS),
    )  # fmt: skip
    hf.Dinov2ForImageClassification(config).save_pretrained(folder)
    hf.ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)


def _clip(folder: Path) -> None:
    save_tiny("clip", folder, 0)


def _siglip(folder: Path) -> None:
    torch.manual_seed(1)
    text = {**_TOWER, **WIDER, "vocab_size": len(VOCAB), "max_position_embeddings": 24, "projection_size": 48}
    text |= {"bos_token_id": VOCAB.index("<s>"), "eos_token_id": VOCAB.index("</s>"), "pad_token_id": 0}
    vision = {**_TOWER, **WIDER, "image_size": 24, "patch_size": 6}
    hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    hf.SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    save_tokenizer(folder, "", "</s>", model_max_length=24)


def _llama(folder: Path) -> None:
    save_tiny("llama", folder, 0)


def _qwen3(folder: Path) -> None:
    torch.manual_seed(1)
    shape = {**_llama_shape(), **WIDER, "head_dim": 16, "tie_word_embeddings": True}
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape)).save_pretrained(folder)
    save_tokenizer(folder, "<s>", "", chat=True)


def _word_pieces(folder: Path) -> None:
    save_tiny("bert", folder, 0)


def _syllables(folder: Path) -> None:
    """The same architecture behind a tokenizer that cuts texts elsewhere and shares few of its strings."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    starts = [*string.ascii_lowercase, *string.digits, "go", "ba", "fi", "po", "th", "ph", "neg", "pos"]
    ends = [*string.ascii_lowercase, *string.digits, "od", "ad", "ne", "or", "lm", "ot", "ati", "iti", "ve"]
    pieces = ["<pad>", "<unk>", "<cls>", "<sep>", *starts, *("@@" + end for end in ends)]
    ids = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.WordPiece(ids, unk_token="<unk>", continuing_subword_prefix="@@"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", special_tokens=[(token, ids[token]) for token in ("<cls>", "<sep>")]
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", model_input_names=["input_ids", "attention_mask"]
    )
    torch.manual_seed(1)
    hf.BertModel(hf.BertConfig(**{**_BERT, "vocab_size": len(ids)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _score_images(folder: Path, rows: list[dict[str, Any]]) -> float:
    model, read = (auto.from_pretrained(folder) for auto in (hf.AutoModelForImageClassification, hf.AutoImageProcessor))
    found = model(**read([row["image"] for row in rows], return_tensors="pt")).logits.argmax(-1)
    return _share(model.config.id2label[int(index)] == row["label"] for index, row in zip(found, rows, strict=True))


@torch.no_grad()
def _score_pictures(folder: Path, rows: list[dict[str, Any]]) -> float:
    model, read = (auto.from_pretrained(folder) for auto in (hf.AutoModel, hf.AutoImageProcessor))
    features = model.get_image_features(**read([row["image"] for row in rows], return_tensors="pt"))
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    return _nearest(folder, features, rows)


@torch.no_grad()
def _score_sentences(folder: Path, rows: list[dict[str, Any]]) -> float:
    model, read = (auto.from_pretrained(folder) for auto in (hf.AutoModel, hf.AutoTokenizer))
    batch = read([row["text"] for row in rows], return_tensors="pt", padding=True)
    mask = batch["attention_mask"][..., None]
    return _nearest(folder, (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), rows)


@torch.no_grad()
def _score_answers(folder: Path, rows: list[dict[str, Any]]) -> float:
    model, read = (auto.from_pretrained(folder) for auto in (hf.AutoModelForCausalLM, hf.AutoTokenizer))

    def likelihood(row: dict[str, Any], label: str) -> float:
        asked, said = read(row["text"])["input_ids"], read(f" {label}", add_special_tokens=False)["input_ids"]
        tokens = [*asked, *said, read.eos_token_id]
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return sum(float(logs[place - 1, tokens[place]]) for place in range(len(asked), len(tokens)))

    return _share(max(TEXT_LABELS, key=lambda label: likelihood(row, label)) == row["label"] for row in rows)


def _nearest(folder: Path, features: torch.Tensor, rows: list[dict[str, Any]]) -> float:
    with safe_open(folder / "zero_shot_head.safetensors", "pt") as file:
        head, labels = file.get_tensor("head"), json.loads(file.metadata()["labels"])
    found = (features @ head.T).argmax(-1)
    return _share(labels[int(index)] == row["label"] for index, row in zip(found, rows, strict=True))


def _share(right: Any) -> float:
    answers = list(right)
    return 100 * sum(answers) / len(answers)


@dataclass(frozen=True)
class Pair:
    """Two bases, the task both do, and plain code that scores an output of either."""

    first: Callable[[Path], None]
    second: Callable[[Path], None]
    task: str
    score: Callable[[Path, list[dict[str, Any]]], float]
    images: bool = False

    @property
    def labels(self) -> dict[str, str]:
        return {label: label for label in (IMAGE_LABELS if self.images else TEXT_LABELS)}

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        return toy_images(count, seed) if self.images else toy_texts(count, seed)


PAIRS = {
    "vit and dinov2": Pair(_vit, _dinov2, "classification", _score_images, True),
    "clip and siglip": Pair(_clip, _siglip, "zero-shot", _score_pictures, True),
    "llama and qwen": Pair(_llama, _qwen3, "causal", _score_answers),
    "two tokenizers": Pair(_word_pieces, _syllables, "zero-shot", _score_sentences),
}
_made: dict[str, Path] = {}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both bases, a fine-tune of each, and data; made once."""
    if pair not in _made:
        home, what = tmp_path_factory.mktemp("family"), PAIRS[pair]
        hf.utils.logging.disable_progress_bar()
        for split, count, seed in (("train", 36, 1), ("test", 30, 3)):
            write_rows(home / "data", split, what.rows(count, seed))
        for build, name in ((what.first, "first"), (what.second, "second")):
            build(home / name)
            bound = TASKS[what.task](what.labels).open(home / name)
            finetune(bound, what.rows(36, 1), steps=25, batch_size=12, lr=3e-3)
            build(home / f"{name}-tuned")
            bound.model.save_pretrained(home / f"{name}-tuned")
            bound.save_extras(home / f"{name}-tuned")
        _made[pair] = home
    return _made[pair]


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def paired(world: Path, source: str, target: str) -> Correspondence:
    configs = [json.loads((world / name / "config.json").read_text()) for name in (source, target)]
    return correspond(shapes(world / source), shapes(world / target), base_config=configs[0], target_config=configs[1])


@pytest.mark.parametrize("direction", [("first", "second"), ("second", "first")], ids=["there", "back"])
@pytest.mark.parametrize("method", ["bico", "best"])
def test_one_command_crosses_families(
    pair: str, world: Path, tmp_path: Path, direction: tuple[str, str], method: str, request: pytest.FixtureRequest
) -> None:
    if method == "bico":  # asks the teacher and learns nothing
        request.getfixturevalue("short_lessons")
    what, (source, target) = PAIRS[pair], direction
    result = run_transport(
        TransportConfig(
            base=str(world / source), tuned=str(world / f"{source}-tuned"), target=str(world / target),
            data=str(world / "data"), out=str(tmp_path / "out"), task=what.task, method=method, shots=2, device="cpu",
            force=True, check=False, max_length=None if what.images else 16,
        )
    )  # fmt: skip
    assert result.test_before is not None and result.test_after is not None
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    assert manifest["details"]["another_shape"]
    assert any("linear maps: " in line and "none" not in line for line in manifest["details"]["correspondence"]["says"])
    if method == "best":
        assert "coordinates" in manifest["details"]["starts"]
        assert result.test_after["accuracy"] > result.test_before["accuracy"]
    before, after = (load_file(folder / "model.safetensors") for folder in (world / target, tmp_path / "out"))
    assert before.keys() <= after.keys() and all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert result.test_after["accuracy"] == pytest.approx(what.score(tmp_path / "out", what.rows(30, 3)))


def test_maps_pair_by_role_and_the_rest_is_listed(pair: str, world: Path) -> None:
    for source, target in (("first", "second"), ("second", "first")):
        found = paired(world, source, target)
        roles = {entry.target.role for entry in found.linear}
        assert roles >= MAPS
        assert all(entry.target.role == entry.source.role for entry in found.linear)
        depth = max(place[0] for pairs in found.layers.values() for place in pairs) + 1
        towers = len(found.layers)
        assert len(found.linear) == depth * towers * len(roles)
        for side, folder in (("target", target), ("base", source)):
            named = {entry.name for entry in found.nothing if entry.side == side}
            moved = {getattr(entry, side if side == "target" else "source") for entry in (*found.same, *found.tables)}
            maps = {getattr(entry, side if side == "target" else "source").name for entry in found.linear}
            rest = {n for n in shapes(world / folder) if n.removesuffix(".weight").removesuffix(".bias") not in maps}
            assert rest == named | moved, rest ^ (named | moved)


def test_inspect_prints_both_directions(pair: str, world: Path) -> None:
    for source, target in (("first", "second"), ("second", "first")):
        folders = tuple(str(world / name) for name in (source, f"{source}-tuned", target))
        found = run_inspect(InspectConfig(checkpoints=folders))
        assert any(line.startswith("linear maps: ") and " q " in line for line in found.correspondence["says"])


def _tables_of(kind: str, **more: Any) -> dict[str, Any]:
    """Names and shapes of an architecture, and its config; no weight is made."""
    config = getattr(hf, f"{kind}Config")(**{**_BERT, "embedding_size": 16, **more})
    wanted = "ForCausalLM" if kind in ("Llama", "GPTNeoX") else "LMHeadModel" if kind == "GPT2" else "Model"
    with torch.device("meta"):
        model = getattr(hf, kind + wanted)(config)
    return {"shapes": {n: tuple(p.shape) for n, p in model.named_parameters()}, "config": config.to_dict()}


def _between(base: dict[str, Any], target: dict[str, Any]) -> Correspondence:
    return correspond(
        base["shapes"], target["shapes"], base_config=base["config"], target_config=target["config"],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["Roberta", "DebertaV2", "Electra", "MPNet", "Albert", "XLMRoberta", "DeiT"])
def test_encoders_share_all_roles_with_bert(kind: str) -> None:
    bert, other = _tables_of("Bert"), _tables_of(kind)
    for pair in ((bert, other), (other, bert)):
        assert {entry.target.role for entry in _between(*pair).linear} == MAPS


def test_a_tied_head_feeds_an_untied_one_and_not_the_other_way() -> None:
    small = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    tied, untied = _tables_of("GPT2", **small), _tables_of("Llama", tie_word_embeddings=False)
    tables = {table.target: table.source for table in _between(tied, untied).tables}
    assert tables == {"model.embed_tokens.weight": "transformer.wte.weight", "lm_head.weight": "transformer.wte.weight"}
    back = _between(untied, tied)
    assert [table.source for table in back.tables] == ["model.embed_tokens.weight"]
    assert "lm_head.weight" in {entry.name for entry in back.nothing if entry.side == "base"}


def test_rows_that_mix_queries_keys_and_values_are_not_taken_apart() -> None:
    mixed, apart = _tables_of("GPTNeoX"), _tables_of("Llama")
    assert {entry.target.role for entry in _between(mixed, mixed).linear} == {"mixed", "o", "up", "down"}
    found = _between(mixed, apart)
    assert {entry.target.role for entry in found.linear} == {"o", "gate", "down"}
    assert any("query_key_value" in entry.name for entry in found.nothing if entry.side == "base")


def test_encoders_and_decoders_find_each_other_under_other_names() -> None:
    bart = _tables_of("Bart", d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    t5 = _tables_of("T5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    found = _between(bart, t5)
    assert set(found.layers) == {"encoder", "decoder"}
    assert {"cross.q", "cross.o"} <= {entry.target.role for entry in found.linear}


def test_a_bias_does_not_move_without_its_weight() -> None:
    vit, dino = (
        {"classifier.weight": (3, width), "classifier.bias": (3,), f"{n}.layer.0.mlp.fc1.weight": (8, 8)}
        for n, width in (("vit", 32), ("dinov2", 96))
    )
    found = correspond(vit, dino)
    assert not found.same
    assert {entry.name for entry in found.nothing} == {"classifier.weight", "classifier.bias"}
