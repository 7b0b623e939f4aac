"""Tiny models of every family, with inputs and head counts, for the alignment tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**WIDTH, "vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
IMAGE = {"image_size": 8, "patch_size": 4}
T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}


class Case(NamedTuple):
    model: nn.Module
    inputs: Any


def tokens(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(2, 40, (rows, length))


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 8, 8)


def vit() -> Case:
    return Case(hf.ViTForImageClassification(hf.ViTConfig(**WIDTH, **IMAGE)), {"pixel_values": pixels()})


def vit_backbone() -> Case:
    return Case(hf.ViTModel(hf.ViTConfig(**WIDTH, **IMAGE)), {"pixel_values": pixels()})


def timm_vit() -> Case:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )
    return Case(model, pixels())


def clip() -> Case:
    config = hf.CLIPConfig(text_config=TEXT, vision_config={**WIDTH, **IMAGE}, projection_dim=24)
    return Case(hf.CLIPModel(config), {"input_ids": tokens(), "pixel_values": pixels()})


def clip_vision() -> Case:
    config = hf.CLIPVisionConfig(**WIDTH, **IMAGE, projection_dim=24)
    return Case(hf.CLIPVisionModelWithProjection(config), {"pixel_values": pixels()})


def clip_vision_tower() -> Case:
    return Case(hf.CLIPVisionModel(hf.CLIPVisionConfig(**WIDTH, **IMAGE)), {"pixel_values": pixels()})


def clip_text_tower() -> Case:
    return Case(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), {"input_ids": tokens()})


def siglip_vision_tower() -> Case:
    return Case(hf.SiglipVisionModel(hf.SiglipVisionConfig(**WIDTH, **IMAGE)), {"pixel_values": pixels()})


def siglip() -> Case:
    config = hf.SiglipConfig(text_config={**TEXT, "projection_size": 32}, vision_config={**WIDTH, **IMAGE})
    return Case(hf.SiglipModel(config), {"input_ids": tokens(), "pixel_values": pixels()})


def open_clip() -> Case:
    import open_clip as oc

    vision = {"layers": 2, "width": 64, "head_width": 16, "image_size": 8, "patch_size": 4}
    text = {"layers": 2, "width": 32, "heads": 4, "vocab_size": 40, "context_length": 7}
    return Case(oc.CLIP(24, vision, text), (pixels(), tokens()))


def bert() -> Case:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=4))
    return Case(model, {"input_ids": tokens()})


def bert_backbone() -> Case:
    return Case(hf.BertModel(hf.BertConfig(**TEXT)), {"input_ids": tokens()})


def bert_tokens() -> Case:
    return Case(hf.BertForTokenClassification(hf.BertConfig(**TEXT)), {"input_ids": tokens()})


def bert_vocabulary() -> Case:
    return Case(hf.BertForPreTraining(hf.BertConfig(**TEXT)), {"input_ids": tokens()})


def roberta() -> Case:
    return Case(hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT)), {"input_ids": tokens()})


def t5(**options: Any) -> Case:
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5, **options))
    return Case(model, {"input_ids": tokens(), "decoder_input_ids": tokens(length=5)})


def t5_gated() -> Case:
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def llama(tied: bool = False) -> Case:
    options = {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    config = hf.LlamaConfig(**options)
    return Case(hf.LlamaForCausalLM(config), {"input_ids": tokens()})


def llama_tied() -> Case:
    return llama(tied=True)


def llama_one_group() -> Case:
    return Case(hf.LlamaModel(hf.LlamaConfig(**TEXT, num_key_value_heads=1)), {"input_ids": tokens()})


def qwen3() -> Case:
    config = hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=12)
    return Case(hf.Qwen3ForCausalLM(config), {"input_ids": tokens()})


def olmo2(key_heads: int = 4) -> Case:
    config = hf.Olmo2Config(**TEXT, num_key_value_heads=key_heads)
    return Case(hf.Olmo2ForCausalLM(config), {"input_ids": tokens()})


def olmo2_grouped() -> Case:
    return olmo2(key_heads=2)


def olmo3() -> Case:
    config = hf.Olmo3Config(**TEXT, num_key_value_heads=2)
    return Case(hf.Olmo3ForCausalLM(config), {"input_ids": tokens()})


def qwen2() -> Case:
    config = hf.Qwen2Config(**TEXT, num_key_value_heads=2)
    return Case(hf.Qwen2ForSequenceClassification(config), {"input_ids": tokens(rows=1)})


def gpt2() -> Case:
    config = hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return Case(hf.GPT2LMHeadModel(config), {"input_ids": tokens()})


MAKERS: dict[str, Callable[[], Case]] = {
    maker.__name__: maker
    for maker in (
        vit, vit_backbone, timm_vit, clip, clip_vision, clip_vision_tower, clip_text_tower,
        siglip, siglip_vision_tower, open_clip, bert, bert_backbone, bert_tokens, bert_vocabulary,
        roberta, t5, t5_gated, llama, llama_tied, llama_one_group, qwen3, olmo2, olmo2_grouped, olmo3,
        qwen2, gpt2,
    )
}  # fmt: skip


def make(name: str, seed: int = 0) -> Case:
    """A tiny model in float64, every weight random: biases of zero and norms of one would hide mistakes."""
    torch.manual_seed(seed)
    model, inputs = MAKERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif not name.startswith("t5"):
                parameter.mul_(2)
    model = exact_norms(model).double().eval()
    if isinstance(inputs, dict) and "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    elif isinstance(inputs, tuple):
        inputs = (inputs[0].double(), *inputs[1:])
    elif isinstance(inputs, torch.Tensor):
        inputs = inputs.double()
    return Case(model, inputs)


def exact_norms(model: nn.Module) -> nn.Module:
    """Replace norms that round to float32 inside by torch's own: the same function in any precision."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
