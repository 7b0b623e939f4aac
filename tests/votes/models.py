"""Small float64 models with a loss and a batch, one per kind of layer the engines must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix._compat import heal_torchvision

heal_torchvision()


@dataclass
class Case:
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make: Callable[[int, torch.Generator], Any]  # (samples, generator) -> batch

    def batch(self, samples: int, seed: int = 0) -> Any:
        return self.make(samples, torch.Generator().manual_seed(seed))


class TiedMLP(nn.Module):
    """A layer used twice: its gradient is the sum over both uses, before the sign."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.head_again = nn.Linear(6, 3)
        self.head_again.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(torch.tanh(self.inner(x)))
        return self.head(hidden) + self.head_again(torch.tanh(hidden))


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    return Case(model, _cross_entropy, _vectors(5, 3))


def tied() -> Case:
    return Case(TiedMLP(), _cross_entropy, _vectors(6, 3))


def conv() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, stride=2),
        nn.Flatten(),
        nn.Linear(54, 3),
    )

    def make(samples: int, g: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(samples, 2, 6, 6, generator=g, dtype=torch.float64),
            "y": torch.randint(0, 3, (samples,), generator=g),
        }

    return Case(model, _cross_entropy, make)


def _vectors(width: int, classes: int) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    def make(samples: int, g: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(samples, width, generator=g, dtype=torch.float64),
            "y": torch.randint(0, classes, (samples,), generator=g),
        }

    return make


def _tokens(vocab: int, length: int, classes: int) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    def make(samples: int, g: torch.Generator) -> dict[str, Tensor]:
        mask = torch.ones(samples, length, dtype=torch.int64)
        for row in range(samples):
            mask[row, length - row % 3 :] = 0
        return {
            "ids": torch.randint(3, vocab, (samples, length), generator=g),
            "mask": mask,
            "y": torch.randint(0, classes, (samples,), generator=g),
        }

    return make


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=23, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=16, num_labels=3, attn_implementation="eager",
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        return functional.cross_entropy(logits, batch["y"], reduction="none")

    return Case(BertForSequenceClassification(config), loss, _tokens(23, 7, 3))


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=8, patch_size=4,
        num_channels=1, num_labels=3, attn_implementation="eager",
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(pixel_values=batch["x"]).logits, batch["y"], reduction="none")

    def make(samples: int, g: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(samples, 1, 8, 8, generator=g, dtype=torch.float64),
            "y": torch.randint(0, 3, (samples,), generator=g),
        }

    return Case(ViTForImageClassification(config), loss, make)


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=23, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        start = torch.zeros_like(batch["labels"][:, :1])
        decoder = torch.cat([start, batch["labels"][:, :-1]], dim=1)
        out = model(input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=decoder)
        return _next_token(out.logits, batch["labels"])

    def make(samples: int, g: torch.Generator) -> dict[str, Tensor]:
        batch = _tokens(23, 6, 2)(samples, g)
        batch["labels"] = torch.randint(3, 23, (samples, 3), generator=g)
        return batch

    return Case(T5ForConditionalGeneration(config), loss, make)


def llama(tied_embeddings: bool = True) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied_embeddings,
        attn_implementation="eager",
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(input_ids=batch["ids"], attention_mask=batch["mask"])
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
        return _next_token(out.logits[:, :-1], labels[:, 1:])

    return Case(LlamaForCausalLM(config), loss, _tokens(23, 6, 2))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "tied": tied,
    "conv": conv,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "llama_tied": llama,
    "llama_untied": lambda: llama(False),
}


def case(name: str, seed: int = 0) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = CASES[name]()
        made.model.double().eval()
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def analytically_zero(name: str) -> bool:
    """Softmax does not feel a shift of all keys: gradients of key biases are rounding noise."""
    return name.endswith(("key.bias", "k_proj.bias"))
