"""Fine-tunes that are peft adapters: what people keep of most of their trainings."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.journeys.encoders import classifier, pretrained
from tests.journeys.kinds import Kind, add, copy_files, save_pair, seeded
from tests.journeys.scorers import causal_labels, seq2seq_labels, text_classes
from tests.journeys.speakers import PREFIX, language_model, teach, teach_pairs
from tests.journeys.toys import TEXT_LABELS, write_texts
from tests.tiny import save_tokenizer

QV = ["query", "value"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def wrapped(model: Any, folder: Path, train: Callable[[Any], None], settings: dict[str, Any]) -> None:
    """get_peft_model, train, save_pretrained; the tokenizer beside it, as Trainer leaves it."""
    from peft import LoraConfig, get_peft_model

    seeded(2)
    model = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, **settings}))
    train(model)
    model.save_pretrained(folder / "tuned")
    copy_files(folder / "base", folder / "tuned", "tokenizer*", "special_tokens*")


def forget_base(folder: Path) -> None:
    """Trained on another machine: the config names a folder that nobody has."""
    path = folder / "tuned" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "base_model_name_or_path": "/mnt/gone/my-base"}), encoding="utf-8")


def adapter_classifier(
    folder: Path, base: Callable[[], Any], prefix: tuple[str, str], lost: bool = False, **settings: Any
) -> None:
    """SEQ_CLS: the head is inside the adapter, and nothing in its folder names the classes."""
    from transformers import AutoModelForSequenceClassification

    write_texts(folder / "data", numbered=True)
    save_pair(folder, base(), partial(save_tokenizer, prefix=prefix[0], suffix=prefix[1]))
    seeded(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=len(TEXT_LABELS))
    train = partial(classifier, tokenizer_folder=folder / "base", data=folder / "data", lr=3e-3)
    wrapped(model, folder, train, {"task_type": "SEQ_CLS", "lora_alpha": 8, **settings})
    if lost:
        forget_base(folder)


def adapter_speaker(folder: Path, steps: int = 40, **settings: Any) -> None:
    """CAUSAL_LM on a base that knows a little of the language: an adapter alone cannot teach a random model."""
    from transformers import AutoModelForCausalLM

    write_texts(folder / "data")
    save_tokenizer(folder / "base", prefix=PREFIX["llama"])
    model = language_model("llama")
    teach(model, folder, steps=15)
    save_pair(folder, model, partial(save_tokenizer, prefix=PREFIX["llama"]))
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    train = partial(teach, folder=folder, steps=steps, lr=1e-2)
    wrapped(model, folder, train, {"task_type": "CAUSAL_LM", "target_modules": LLAMA, **settings})


def adapter_translator(folder: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    write_texts(folder / "data")
    save_tokenizer(folder / "base", suffix="</s>")
    model = language_model("t5", "AutoModelForSeq2SeqLM")
    teach_pairs(model, folder, steps=20)
    save_pair(folder, model, partial(save_tokenizer, suffix="</s>"))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "base")
    settings = {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v", "wi", "wo"]}
    wrapped(model, folder, partial(teach_pairs, folder=folder), settings)


MARKS = ("[CLS]", "[SEP]")
BERT, BERT_MLM = partial(pretrained, "BertModel", "bert"), partial(pretrained, "BertForMaskedLM", "bert")
ROBERTA = partial(pretrained, "RobertaForMaskedLM", "roberta")
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora-bert-qv": ("LoRA on BERT query and value", {"base": BERT, "target_modules": QV}),
    "lora-bert-all": ("LoRA on all layers of BERT", {"base": BERT, "target_modules": "all-linear"}),
    "lora-bert-saved-pooler": (
        "LoRA on BertForMaskedLM, pooler in modules_to_save",
        {"base": BERT_MLM, "target_modules": QV, "modules_to_save": ["pooler", "classifier"]},
    ),
    "lora-bert-lost-pooler": (
        "LoRA on all layers of BertForMaskedLM, over a pooler that no file holds",
        {"base": BERT_MLM, "target_modules": "all-linear"},
    ),
    "lora-bert-mlm-qv": (
        "LoRA on query and value of BertForMaskedLM, whose new pooler no file holds",
        {"base": BERT_MLM, "target_modules": QV},
    ),
    "lora-roberta": ("LoRA on RobertaForMaskedLM", {"base": ROBERTA, "target_modules": QV}),
    "dora-roberta": ("DoRA on RobertaForMaskedLM", {"base": ROBERTA, "target_modules": QV, "use_dora": True}),
    "lora-lost-base": ("LoRA whose named base is gone", {"base": ROBERTA, "target_modules": QV, "lost": True}),
}
for name, (says, settings) in CLASSIFIERS.items():
    make = partial(adapter_classifier, prefix=MARKS, **settings)
    add(
        Kind(
            name,
            f"{says}; SEQ_CLS",
            "classification",
            make,
            text_classes,
            head=True,
            adapter=True,
            lost_base="lost" in settings,
        )
    )
judge = partial(
    adapter_classifier, base=partial(language_model, "llama"), prefix=("<s>", ""), target_modules=["q_proj", "v_proj"]
)
add(
    Kind(
        "lora-llama-classifier",
        "LoRA on Llama; SEQ_CLS",
        "classification",
        judge,
        text_classes,
        head=True,
        adapter=True,
    )
)
SPEAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora-llama": ("LoRA", {}),
    "dora-llama": ("DoRA", {"use_dora": True}),
    "rslora-llama": ("rsLoRA", {"use_rslora": True}),
    "lora-llama-saved-head": ("LoRA with lm_head in modules_to_save", {"modules_to_save": ["lm_head"], "steps": 15}),
    "lora-llama-token-rows": ("LoRA with trained token rows", {"trainable_token_indices": [3, 20, 21]}),
}
for name, (says, settings) in SPEAKERS.items():
    make = partial(adapter_speaker, **settings)
    add(Kind(name, f"{says} on Llama; CAUSAL_LM", "causal", make, causal_labels, adapter=True))
add(Kind("lora-t5", "LoRA on T5; SEQ_2_SEQ_LM", "seq2seq", adapter_translator, seq2seq_labels, adapter=True))
