"""Tiny models in the real formats, built from a config and a seed, and toy data they can learn.

`save_tiny(family, folder, seed)` writes what the family's own loader reads offline: weights, config,
tokenizer, image processor. Two seeds give two unrelated checkpoints of one architecture."""

from __future__ import annotations

import json
import os
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from gradfix._compat import heal_torchvision

heal_torchvision()

TEXT_LABELS = ("negative", "positive")
IMAGE_LABELS = ("red", "green", "blue")
IMAGE_SIZE = 16
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")
VOCAB = [
    *SPECIAL,
    *string.ascii_lowercase,
    *string.digits,
    *string.punctuation,
    *("##" + letter for letter in string.ascii_lowercase + string.digits),
    *("good", "bad", "fine", "poor", "a", "the", "film", "of", "photo", *TEXT_LABELS, *IMAGE_LABELS),
]
VOCAB = list(dict.fromkeys(VOCAB))
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

Builder = Callable[[Path, torch.dtype, Sequence[str]], None]
_BUILDERS: dict[str, Builder] = {}


def save_tiny(
    family: str,
    folder: str | Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    labels: Sequence[str] | None = None,
) -> Path:
    """Write a tiny checkpoint of a family into `folder` and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images = family in ("vit", "timm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _BUILDERS[family](folder, dtype, labels or (IMAGE_LABELS if images else TEXT_LABELS))
    return folder


def save_tokenizer(folder: Path, prefix: str = "", suffix: str = "", chat: bool = False, **options: Any) -> None:
    """A lower-casing word-piece tokenizer of about 150 entries that can spell anything in ASCII."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCAB)}
    core = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    used = [token for token in (prefix, suffix) if token]
    if used:
        core.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A {suffix}".split(),
            pair=f"{prefix} $A {suffix} $B {suffix}".split(),
            special_tokens=[(token, ids[token]) for token in dict.fromkeys(used)],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def rewrite_tokenizer(folder: Path) -> None:
    """The tokenizer of a folder with its words under other numbers, and without some of them."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    kept = [word for word in content["model"]["vocab"] if word not in ("good", "film", "positive")]
    special, usual = kept[: len(SPECIAL)], kept[len(SPECIAL) :]
    content["model"]["vocab"] = {word: number for number, word in enumerate([*special, *reversed(usual)])}
    file.write_text(json.dumps(content), encoding="utf-8")


def _named(labels: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def _save(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]


def _family(name: str) -> Callable[[Builder], Builder]:
    def add(build: Builder) -> Builder:
        _BUILDERS[name] = build
        return build

    return add


_BERT: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@_family("bert")
def _bert(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import BertConfig, BertModel

    _save(BertModel(BertConfig(**_BERT)), folder, dtype)
    save_tokenizer(folder, "[CLS]", "[SEP]")


@_family("bert_classifier")
def _bert_classifier(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    _save(BertForSequenceClassification(BertConfig(**_BERT, **_named(labels))), folder, dtype)
    save_tokenizer(folder, "[CLS]", "[SEP]")


@_family("vit")
def _vit(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(**_TOWER, image_size=IMAGE_SIZE, patch_size=8, initializer_range=0.1, **_named(labels))
    _save(ViTForImageClassification(config), folder, dtype)
    ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(folder)


@_family("clip")
def _clip(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    text = {**_TOWER, "vocab_size": len(VOCAB), "max_position_embeddings": 24}
    text |= {"bos_token_id": VOCAB.index("<s>"), "eos_token_id": VOCAB.index("</s>"), "pad_token_id": 0}
    vision = {**_TOWER, "image_size": IMAGE_SIZE, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, initializer_factor=4.0)
    _save(CLIPModel(config), folder, dtype)
    CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=IMAGE_SIZE).save_pretrained(folder)
    save_tokenizer(folder, "<s>", "</s>", model_max_length=24)


@_family("siglip")
def _siglip(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    text = {**_TOWER, "vocab_size": len(VOCAB), "max_position_embeddings": 24, "projection_size": 32}
    text |= {"bos_token_id": VOCAB.index("<s>"), "eos_token_id": VOCAB.index("</s>"), "pad_token_id": 0}
    vision = {**_TOWER, "image_size": IMAGE_SIZE, "patch_size": 8}
    _save(SiglipModel(SiglipConfig(text_config=text, vision_config=vision)), folder, dtype)
    SiglipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(folder)
    save_tokenizer(folder, "", "</s>", model_max_length=24)


OPEN_CLIP_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": IMAGE_SIZE,
        "layers": 2,
        "width": 32,
        "patch_size": 8,
        "head_width": 8,
        "mlp_ratio": 1.5,
    },
    "text_cfg": {
        "context_length": 24,
        "vocab_size": len(VOCAB),
        "width": 32,
        "heads": 4,
        "layers": 2,
        "mlp_ratio": 1.5,
        "hf_tokenizer_name": "tiny",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "pool_type": "eos",
        "eos_id": VOCAB.index("</s>"),
    },
}


@_family("open_clip")
def _open_clip(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from open_clip.model import CLIP
    from safetensors.torch import save_file

    model = CLIP(OPEN_CLIP_CONFIG["embed_dim"], OPEN_CLIP_CONFIG["vision_cfg"], _text_tower(OPEN_CLIP_CONFIG))
    weights = {name: tensor.contiguous() for name, tensor in model.to(dtype).state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "size": IMAGE_SIZE}
    config = {"model_cfg": OPEN_CLIP_CONFIG, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_tokenizer(folder, "<s>", "</s>", model_max_length=24)


def _text_tower(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config["text_cfg"].items() if k not in ("hf_tokenizer_name", "tokenizer_kwargs")}


@_family("timm")
def _timm(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    import timm
    from timm.models import save_for_hf

    size = {"embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5, "img_size": IMAGE_SIZE, "patch_size": 8}
    overlay = {"input_size": (3, IMAGE_SIZE, IMAGE_SIZE), "crop_pct": 1.0, "custom_load": False, "tag": "tiny"}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=len(labels), pretrained_cfg_overlay=overlay, **size)
    config = {"label_names": list(labels)}
    save_for_hf(model.to(dtype), str(folder), model_config=config, model_args=size, safe_serialization=True)


@_family("t5")
def _t5(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=len(VOCAB),
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=VOCAB.index("</s>"),
        decoder_start_token_id=0,
    )
    _save(T5ForConditionalGeneration(config), folder, dtype)
    save_tokenizer(folder, "", "</s>")


def _llama_shape() -> dict[str, Any]:
    return {
        **_TOWER,
        "vocab_size": len(VOCAB),
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": VOCAB.index("<s>"),
        "eos_token_id": VOCAB.index("</s>"),
        "pad_token_id": 0,
    }


@_family("llama")
def _llama(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _save(LlamaForCausalLM(LlamaConfig(**_llama_shape())), folder, dtype)
    save_tokenizer(folder, "<s>", "", chat=True)


@_family("gpt2")
def _gpt2(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    eos = VOCAB.index("</s>")
    config = GPT2Config(
        vocab_size=len(VOCAB),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.1,
        bos_token_id=eos,
        eos_token_id=eos,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    _save(GPT2LMHeadModel(config), folder, dtype)
    save_tokenizer(folder)


@_family("mixtral")
def _mixtral(folder: Path, dtype: torch.dtype, labels: Sequence[str]) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_llama_shape(), num_local_experts=3, num_experts_per_tok=2)
    _save(MixtralForCausalLM(config), folder, dtype)
    save_tokenizer(folder, "<s>", "")


FAMILIES = list(_BUILDERS)


def toy_texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows with "text" and "label": one word of each text decides; labels alternate."""
    draw = random.Random(seed)
    words = {"positive": ("good", "fine"), "negative": ("bad", "poor")}
    rows = []
    for index in range(count):
        label = TEXT_LABELS[index % 2]
        filler = draw.sample(["a", "the", "film", "of", "photo", "x", "y", "z", str(index)], 4)
        filler.insert(draw.randrange(5), draw.choice(words[label]))
        rows.append({"text": " ".join(filler), "label": label})
    return rows


TOPICS = {
    "card": ("card", "plastic", "chip", "wallet"),
    "cash": ("money", "notes", "coins", "cash"),
    "transfer": ("send", "wire", "transfer", "account"),
    "rate": ("exchange", "rate", "currency", "euro"),
}


def toy_topics(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Different rows with "text" and "label": two words of each text are its topic's; labels alternate."""
    draw = random.Random(seed)
    fillers = ["please", "help", "my", "the", "is", "where", "now", "today", "how", "a", "again", "soon"]
    found: dict[str, str] = {}
    while len(found) < count:
        label = list(TOPICS)[len(found) % len(TOPICS)]
        words = draw.choices(TOPICS[label], k=2) + draw.sample(fillers, 3)
        draw.shuffle(words)
        found.setdefault(" ".join(words), label)
    return [{"text": text, "label": label} for text, label in found.items()]


def toy_images(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with a PIL "image" in noisy red, green or blue and its "label"; labels alternate."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        pixels = draw.integers(0, 120, (IMAGE_SIZE, IMAGE_SIZE, 3))
        pixels[..., index % 3] += 120
        rows.append({"image": Image.fromarray(pixels.astype("uint8")), "label": IMAGE_LABELS[index % 3]})
    return rows


def write_rows(folder: str | Path, split: str, rows: Sequence[dict[str, Any]]) -> Path:
    """`<folder>/<split>.jsonl` for texts, `<folder>/<split>/<label>/<n>.png` for images."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if rows and "image" in rows[0]:
        for index, row in enumerate(rows):
            home = folder / split / row["label"]
            home.mkdir(parents=True, exist_ok=True)
            row["image"].save(home / f"{index:04d}.png")
        return folder / split
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
