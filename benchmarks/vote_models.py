"""Models of the shapes that vote benchmarks are about, with random weights, a loss per sample and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], dict[str, Tensor]]


def vit(width: int, depth: int, heads: int, patch: int, size: int, samples: int) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    config = ViTConfig(**shape, intermediate_size=4 * width, patch_size=patch, image_size=size, num_labels=100)
    batch = {"x": torch.randn(samples, 3, size, size), "y": torch.randint(0, 100, (samples,))}
    return ViTForImageClassification(config), _image_loss, batch


def _image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["x"]).logits.float(), batch["y"], reduction="none")


def llama(width: int, depth: int, hidden: int, heads: int, tokens: int, samples: int, shared_heads: int = 8) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=depth, intermediate_size=hidden, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // shared_heads), vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    batch = {"ids": torch.randint(0, 32000, (samples, tokens))}
    return LlamaForCausalLM(config), _language_loss, batch


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return losses.view(len(batch["ids"]), -1).float().mean(1)


def t5(width: int, depth: int, tokens: int, samples: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=width, d_ff=width * 8 // 3, d_kv=64, num_layers=depth, num_heads=width // 64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(2, 32000, (samples, tokens)), torch.randint(2, 32000, (samples, 8))
    return T5ForConditionalGeneration(config), _sequence_loss, {"ids": ids, "labels": labels}


def _sequence_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], labels=batch["labels"], use_cache=False).logits
    return F.cross_entropy(logits.float().mT, batch["labels"], reduction="none").mean(1)


MODELS: dict[str, Callable[[int], Case]] = {
    "vit-b": lambda n: vit(768, 12, 12, 16, 224, n),
    "vit-l": lambda n: vit(1024, 24, 16, 14, 224, n),
    "llama-350m": lambda n: llama(1024, 24, 2816, 16, 256, n),
    "llama-1b": lambda n: llama(2048, 22, 5632, 32, 512, n),
    "llama-7b": lambda n: llama(4096, 32, 11008, 32, 512, n, shared_heads=1),
    "t5-base": lambda n: t5(768, 12, 128, n),
    "vit-s": lambda n: vit(384, 12, 6, 16, 224, n),
    "vit-s-short": lambda n: vit(384, 12, 6, 16, 48, n),
    "llama-small": lambda n: llama(256, 4, 704, 8, 32, n),
}
# The same kinds of model, small enough to try a benchmark anywhere in seconds.
TINY: dict[str, Callable[[int], Case]] = {
    name: {"v": lambda n: vit(32, 2, 2, 16, 48, n), "t": lambda n: t5(64, 1, 6, n)}.get(
        name[0], lambda n: llama(32, 2, 64, 4, 8, n)
    )
    for name in MODELS
}
