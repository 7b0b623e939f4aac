"""Models and texts for the golden results, the same bits on every machine.

Weights are drawn as whole numbers by numpy and scaled by powers of two: `torch.randn` may differ in the last
bit from one CPU to the next. The trained world is made by float64 training and is the same to about ten
digits only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LABELS = ("bird", "fish", "tree")
WORDS = [f"w{number:02d}" for number in range(30)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, *LABELS, *WORDS]
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    "id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)},
}  # fmt: skip
SPLITS = {"train": 60, "validation": 60, "test": 90}
State = dict[str, Tensor]


def noise(draw: np.random.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    """Uniform numbers in (-size, size) with all bits of a float32 in use; `size` is a power of two."""
    whole = draw.integers(-(2**23) + 1, 2**23, shape)
    return torch.from_numpy(np.asarray(whole / 2**23 * size, dtype=np.float32))


def build(bare: bool = False) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    return (BertModel if bare else BertForSequenceClassification)(BertConfig(**SHAPE))


def draw_state(seed: int, bare: bool = False) -> State:
    draw = np.random.default_rng(seed)
    state = {}
    for name, tensor in build(bare).named_parameters():
        centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        state[name] = centre + noise(draw, tuple(tensor.shape), 0.25)
    return state


def nudge(state: Mapping[str, Tensor], seed: int, size: float = 2**-5) -> State:
    """A stand-in for a fine-tune. Key biases stay: their gradient is zero but for rounding, and so their votes."""
    draw = np.random.default_rng(seed)
    moved = {name: tensor + noise(draw, tuple(tensor.shape), size) for name, tensor in state.items()}
    return {name: state[name] if name.endswith("key.bias") else tensor for name, tensor in moved.items()}


def save_model(folder: Path, state: Mapping[str, Tensor], *, bare: bool = False, shards: int = 1) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    config = build(bare).config
    config.architectures = ["BertModel" if bare else "BertForSequenceClassification"]
    config.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    save_weights(folder, state, shards)
    return folder


def save_weights(folder: Path, state: Mapping[str, Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", {"format": "pt"})
        return
    where = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in list(state)[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index_file = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")


def rewrite(folder: Path, change: Callable[[State], object]) -> None:
    """Let `change` work on the tensors of a folder in place."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_weights(folder, state)


def save_adapter(folder: Path, base: Path) -> Path:
    """A LoRA adapter with few bits per number: its product is exact in any order of summing."""
    draw, factors = np.random.default_rng(7), {}
    for layer in (0, 1):
        stem = f"base_model.model.bert.encoder.layer.{layer}.attention.self.value.lora_"
        for part, shape in (("A", (2, 16)), ("B", (16, 2))):
            factors[f"{stem}{part}.weight"] = torch.from_numpy(draw.integers(-15, 16, shape) / 64).float()
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 4, "target_modules": ["value"]}
    folder.mkdir()
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def rows(count: int, seed: int, shift: int = 0, spoiled: float = 0.0) -> list[dict[str, str]]:
    """Texts of six words; most words speak for one label, the label with most speakers wins.

    `shift` turns the words to the next label, `spoiled` is the share of labels drawn blindly."""
    draw, found = np.random.default_rng([seed, 99]), []
    while len(found) < count:
        picked = draw.integers(0, len(WORDS), 6)
        spoken = [(int(word) + shift) % 3 for word in picked if word < 24]
        label = LABELS[len(found) % 3]
        if max(range(3), key=spoken.count) != LABELS.index(label):
            continue
        if draw.integers(0, 100) < 100 * spoiled:
            label = LABELS[draw.integers(0, 3)]
        found.append({"text": " ".join(WORDS[word] for word in picked), "label": label})
    return found


def save_texts(folder: Path, **splits: list[dict[str, str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def make_drawn(home: Path) -> Path:
    """Drawn models: two bases with their fine-tunes, targets whole, sharded and bare, an adapter, texts."""
    base, older, target = draw_state(0), draw_state(1), draw_state(2)
    save_model(home / "base", base)
    save_model(home / "tuned", nudge(base, 10))
    save_model(home / "older", older)
    save_model(home / "older-tuned", nudge(older, 11))
    save_model(home / "target", target)
    save_model(home / "sharded", target, shards=3)
    for name in ("base", "target"):
        bare = {"base": base, "target": target}[name]
        inner = {part.removeprefix("bert."): tensor for part, tensor in bare.items() if "classifier" not in part}
        save_model(home / f"bare-{name}", inner, bare=True)
    save_adapter(home / "lora", home / "base")
    splits = {name: rows(count, seed) for seed, (name, count) in enumerate(SPLITS.items())}
    save_texts(home / "data", **splits)
    return home


def ids_of(some: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
    ids = [[2, *(VOCAB.index(word) for word in row["text"].split()), 3] for row in some]
    return torch.tensor(ids), torch.tensor([LABELS.index(row["label"]) for row in some])


def train(state: Mapping[str, Tensor], some: list[dict[str, str]], steps: int, rate: float = 3e-3) -> State:
    model = build().double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()}, strict=False)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    ids, labels = ids_of(some)
    for step in range(steps):
        batch = torch.arange(step * 32, step * 32 + 32) % len(labels)
        logits = model(input_ids=ids[batch]).logits
        nn.functional.cross_entropy(logits, labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().float() for name, tensor in model.named_parameters()}


def make_trained(home: Path) -> Path:
    """A base that knows a little, a target that learnt on from it, and a fine-tune of each."""
    base = train(draw_state(0), rows(320, 20, spoiled=0.6), 60)
    target = train(nudge(base, 12, 2**-2), rows(320, 21, spoiled=0.6), 60)
    save_model(home / "base", base)
    save_model(home / "target", target)
    save_model(home / "tuned", train(base, rows(640, 22), 160))
    save_model(home / "target-tuned", train(target, rows(640, 22), 160))
    splits = {name: rows(count, seed) for seed, (name, count) in enumerate(SPLITS.items())}
    save_texts(home / "data", **splits)
    return home


def copy_of(home: Path, place: Path) -> Path:
    shutil.copytree(home, place)
    return place
