"""Models that answer in words, and the same decoders as sequence classifiers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.journeys.encoders import tune_classifier
from tests.journeys.kinds import Kind, add, copy_files, save_pair, seeded, tower
from tests.journeys.scorers import causal_exact, causal_labels, seq2seq_labels, text_classes
from tests.journeys.toys import fit, read_rows, tokenised, write_chats, write_texts
from tests.tiny import VOCAB, save_tokenizer

ENDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
DECODER: dict[str, Any] = {
    **tower(num_key_value_heads=2, max_position_embeddings=128),
    "vocab_size": len(VOCAB),
    **ENDS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "qwen2": {**DECODER, "tie_word_embeddings": True},
    "gemma": {**DECODER, "head_dim": 8, "initializer_range": 0.2},
    "gpt2": {"vocab_size": len(VOCAB), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.1,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 3, "eos_token_id": 3},
    "t5": {"vocab_size": len(VOCAB), "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
           "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0},
    "bart": {"vocab_size": len(VOCAB), "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
             "init_std": 0.1, "dropout": 0.0, **ENDS, "decoder_start_token_id": 3, "forced_eos_token_id": 3},
}  # fmt: skip
PREFIX = {"llama": "<s>", "gemma": "<s>", "qwen2": "", "gpt2": ""}


def language_model(model_type: str, auto: str = "AutoModelForCausalLM") -> Any:
    import transformers

    seeded()
    return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type]))


def speech(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompt and answer as one sequence; only the answer and its end are learned."""
    asked, said = [], []
    for row in rows:
        if "messages" in row:
            *question, _ = row["messages"]
            start = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            asked.append(tokenizer(start, add_special_tokens=False)["input_ids"])
            said.append(tokenizer(whole[len(start) :], add_special_tokens=False)["input_ids"])
        else:
            asked.append(tokenizer(row["text"])["input_ids"])
            answer = tokenizer(f" {row['label']}", add_special_tokens=False)["input_ids"]
            said.append([*answer, tokenizer.eos_token_id])
    width = max(len(a) + len(s) for a, s in zip(asked, said))
    pad = [width - len(a) - len(s) for a, s in zip(asked, said)]
    return {
        "input_ids": torch.tensor([a + s + [0] * p for a, s, p in zip(asked, said, pad)]),
        "attention_mask": torch.tensor([[1] * len(a + s) + [0] * p for a, s, p in zip(asked, said, pad)]),
        "labels": torch.tensor([[-100] * len(a) + s + [-100] * p for a, s, p in zip(asked, said, pad)]),
    }


def teach(model: Any, folder: Path, steps: int = 40, lr: float = 5e-3) -> None:
    """Train a causal model on the toy answers."""
    from transformers import AutoTokenizer

    batch = speech(AutoTokenizer.from_pretrained(folder / "base"), read_rows(folder / "data", "train"))
    fit(model, lambda: model(**batch).loss, steps=steps, lr=lr)


def teach_pairs(model: Any, folder: Path, steps: int = 60) -> None:
    """Train an encoder-decoder on the toy answers."""
    from transformers import AutoTokenizer

    tokenizer, rows = AutoTokenizer.from_pretrained(folder / "base"), read_rows(folder / "data", "train")
    inputs = tokenised(tokenizer, rows)
    inputs.pop("token_type_ids", None)
    labels = tokenizer(text_target=[row["label"] for row in rows], padding=True, return_tensors="pt")["input_ids"]
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    fit(model, lambda: model(**inputs, labels=labels).loss, steps=steps)


def finish(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "tuned")
    copy_files(folder / "base", folder / "tuned", "tokenizer*", "special_tokens*", "chat_template*")


def speaker(folder: Path, model_type: str, chat: bool = False, dtype: torch.dtype = torch.float32) -> None:
    from transformers import AutoModelForCausalLM

    (write_chats if chat else write_texts)(folder / "data")
    model = language_model(model_type).to(dtype)
    save_pair(folder, model, partial(save_tokenizer, prefix=PREFIX[model_type], chat=chat))
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    teach(model, folder, lr=3e-3 if model_type in ("qwen2", "gemma") else 5e-3)
    finish(model.to(dtype), folder)


def translator(folder: Path, model_type: str) -> None:
    from transformers import AutoModelForSeq2SeqLM

    write_texts(folder / "data")
    prefix = "<s>" if model_type == "bart" else ""
    save_pair(
        folder,
        language_model(model_type, "AutoModelForSeq2SeqLM"),
        partial(save_tokenizer, prefix=prefix, suffix="</s>"),
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "base")
    teach_pairs(model, folder)
    finish(model, folder)


def judge(folder: Path, model_type: str) -> None:
    """A language model turned sequence classifier: the base is the language model."""
    write_texts(folder / "data")
    save_pair(folder, language_model(model_type), partial(save_tokenizer, prefix=PREFIX[model_type]))
    tune_classifier(folder)


for name in ("t5", "bart"):
    says = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration"}[name]
    add(Kind(name, says, "seq2seq", partial(translator, model_type=name), seq2seq_labels))
SPEAKERS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
for name, says in SPEAKERS.items():
    add(Kind(name, f"{says}, labels as answers", "causal", partial(speaker, model_type=name), causal_labels))
add(Kind("llama-chat", "LlamaForCausalLM, free answers in a chat", "causal",
         partial(speaker, model_type="llama", chat=True), causal_exact))  # fmt: skip
for name, says in SPEAKERS.items():
    add(Kind(f"{name}-classifier", f"{says}; sequence classifier", "classification",
             partial(judge, model_type=name), text_classes, head=True))  # fmt: skip
