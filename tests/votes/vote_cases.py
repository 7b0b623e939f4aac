"""Tiny models of every family with a per-sample loss and a batch, for comparing engines in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfix import collect_votes
from tiny import _BERT, _TOWER, OPEN_CLIP_CONFIG, VOCAB, _llama_shape, _text_tower

Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], dict[str, Tensor]]
SAMPLES = 5
_CASES: dict[str, Callable[[], Case]] = {}


def make_case(name: str) -> Case:
    torch.manual_seed(0)
    model, loss, batch = _CASES[name]()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return model.double(), loss, batch


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    _CASES[build.__name__] = build
    return build


def meaningful(name: str, tensor: Tensor) -> Tensor:
    """The entries whose gradient is not analytically zero: all but the key biases of softmax attention."""
    if name.endswith(("k_proj.bias", "key.bias")):
        return tensor[:0]
    if name.endswith(("in_proj_bias", "qkv.bias", "c_attn.bias")):
        query, _, value = tensor.chunk(3)
        return torch.cat([query, value])
    return tensor


def images() -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 16)


def labels() -> Tensor:
    return torch.arange(SAMPLES) % 2


def tokens() -> dict[str, Tensor]:
    """Padded texts: the second and fourth are shorter."""
    ids = torch.randint(7, len(VOCAB), (SAMPLES, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[3, 4:] = 0
    return {"ids": ids, "mask": mask}


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"])
    return F.cross_entropy(getattr(output, "logits", output), batch["y"], reduction="none")


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False)
    wanted = batch["mask"][:, 1:]
    losses = F.cross_entropy(output.logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none") * wanted
    return losses.sum(-1) / wanted.sum(-1)


@case
def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(input_ids=batch["ids"], attention_mask=batch["mask"])
        return F.cross_entropy(output.logits, batch["y"], reduction="none")

    return BertForSequenceClassification(BertConfig(**_BERT)), loss, {**tokens(), "y": labels()}


@case
def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_TOWER, image_size=16, patch_size=8, initializer_range=0.1)
    return ViTForImageClassification(config), image_loss, {"x": images(), "y": labels()}


def _similarity(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    return -scale * (images * texts).sum(-1) + images.pow(3).sum(-1)


@case
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    text = {**_TOWER, "vocab_size": len(VOCAB), "max_position_embeddings": 24}
    text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vision = {**_TOWER, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, initializer_factor=4.0)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(input_ids=batch["ids"], attention_mask=batch["mask"], pixel_values=batch["x"])
        return _similarity(output.image_embeds, output.text_embeds, model.logit_scale.exp())

    batch = tokens()
    batch["ids"][:, 3] = 3
    return CLIPModel(config), loss, {**batch, "x": images()}


@case
def open_clip() -> Case:
    from open_clip.model import CLIP

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return _similarity(*model(batch["x"], batch["ids"]))

    config = OPEN_CLIP_CONFIG
    model = CLIP(config["embed_dim"], config["vision_cfg"], _text_tower(config))
    ids = torch.randint(7, len(VOCAB), (SAMPLES, 24))
    ids[:, -3] = ids[2, 5] = VOCAB.index("</s>")
    return model, loss, {"x": images(), "ids": ids}


@case
def timm() -> Case:
    import timm as library

    size = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 16, "patch_size": 8, "num_classes": 3}
    model = library.create_model("vit_tiny_patch16_224", init_values=0.1, **size)
    return model, image_loss, {"x": images(), "y": labels()}


def _t5(tied: bool) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"vocab_size": len(VOCAB), "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    config = T5Config(
        **shape, feed_forward_proj="relu" if tied else "gated-gelu", tie_word_embeddings=tied,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["labels"])
        return F.cross_entropy(output.logits.mT, batch["labels"], reduction="none").mean(-1)

    answers = torch.randint(7, len(VOCAB), (SAMPLES, 4))
    return T5ForConditionalGeneration(config), loss, {**tokens(), "labels": answers}


@case
def t5() -> Case:
    return _t5(tied=False)


@case
def t5_tied() -> Case:
    return _t5(tied=True)


@case
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_shape())), language_loss, tokens()


@case
def llama_tied() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_llama_shape(), tie_word_embeddings=True)
    return LlamaForCausalLM(config), language_loss, tokens()


@case
def gemma() -> Case:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**_llama_shape(), head_dim=8)), language_loss, tokens()


@case
def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": len(VOCAB), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**shape, initializer_range=0.1, bos_token_id=3, eos_token_id=3)
    return GPT2LMHeadModel(config), language_loss, tokens()


@case
def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    # The grouped product has no float64 version.
    config = MixtralConfig(**_llama_shape(), num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager")
    return MixtralForCausalLM(config), language_loss, tokens()


@case
def albert() -> Case:
    """One layer used for every depth."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=len(VOCAB), embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32, classifier_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(input_ids=batch["ids"], attention_mask=batch["mask"])
        return F.cross_entropy(output.logits, batch["y"], reduction="none")

    return AlbertForSequenceClassification(config), loss, {**tokens(), "y": labels()}


@case
def convnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=4),
        nn.BatchNorm2d(8), nn.PReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    return model, image_loss, {"x": images(), "y": labels()}


FAMILIES = list(_CASES)


def votes_of(model: nn.Module, loss: Any, batches: list[Any], engine: str = "batched") -> dict[str, Tensor]:
    return dict(collect_votes(model, loss, batches, engine=engine))


def assert_same_votes(model: nn.Module, loss: Any, batch: Any, engine: str = "batched") -> None:
    assert_equal_votes(votes_of(model, loss, [batch], "loop"), votes_of(model, loss, [batch], engine))


def assert_equal_votes(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        wrong = meaningful(name, found[name]) != meaningful(name, tensor)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} votes differ"
