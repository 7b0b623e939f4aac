"""How long a text may be, by the model's own word, and what is said when one was longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix.tasks import TASKS
from tests.tiny import VOCAB, save_tiny, save_tokenizer, toy_texts

LABELS = {"negative": "bad", "positive": "good"}
LONG = [{"text": "good " * 200, "label": "positive"}, {"text": "bad", "label": "negative"}]


def roberta(folder: Path) -> Path:
    """66 rows of positions, of which the first two are never a text's."""
    from transformers import RobertaConfig, RobertaModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=len(VOCAB), max_position_embeddings=66, pad_token_id=1, **shape)
    RobertaModel(config).save_pretrained(folder)
    save_tokenizer(folder, "<s>", "</s>")
    return folder


def model_max_length(folder: Path, length: int) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))


@pytest.mark.parametrize("task", ["zero-shot", "classification"])
def test_positions_behind_the_padding_are_not_counted(task: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"new_head": 0} if task == "classification" else {}
    bound = TASKS[task](LABELS, **options).open(roberta(tmp_path))  # type: ignore[call-arg]
    batch = bound.collate(LONG)
    assert batch["input_ids"].shape[1] == 64
    assert bound.loss(bound.model, batch).isfinite().all()
    assert bound.cuts() == ("1 of 2 texts were cut at 64 tokens",)


@pytest.mark.parametrize(("family", "task"), [("bert", "zero-shot"), ("gpt2", "causal"), ("t5", "seq2seq")])
def test_the_shortest_of_what_tokenizer_and_model_say_is_the_default(
    family: str, task: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    model_max_length(folder, 10**30)
    own = TASKS[task](LABELS).open(folder)
    width = own.collate(LONG)["input_ids"].shape[-1]
    config = own.model.config
    held = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 512
    assert width == min(
        held, own.collate([{"text": "good " * 200, "label": "positive"}])["input_ids"].shape[-1]
    )
    model_max_length(folder, 20)
    short = TASKS[task](LABELS).open(folder)
    assert short.collate(LONG)["input_ids"].shape[-1] == 20
    assert short.cuts() and "at 20 tokens" in short.cuts()[0]
    assert TASKS[task](LABELS, max_length=12).open(folder).collate(LONG)["input_ids"].shape[-1] == 12  # type: ignore[call-arg]


def test_a_text_is_counted_once_however_often_it_is_seen(tmp_path: Path) -> None:
    bound = TASKS["zero-shot"](LABELS, max_length=6).open(save_tiny("bert", tmp_path))  # type: ignore[call-arg]
    assert bound.cuts() == ()
    rows = [{"text": "good good", "label": "positive"}, {"text": "bad " * 9, "label": "negative"}]
    for _ in range(3):
        bound.collate(rows)
    assert bound.cuts() == ("1 of 2 texts were cut at 6 tokens",)


def test_a_text_that_just_fits_was_not_cut(tmp_path: Path) -> None:
    bound = TASKS["zero-shot"](LABELS, max_length=6).open(save_tiny("bert", tmp_path))  # type: ignore[call-arg]
    batch = bound.collate([{"text": "good " * 4, "label": "positive"}])
    assert batch["input_ids"].shape[1] == 6 and bound.cuts() == ()


def test_prompts_of_labels_are_counted_apart(tmp_path: Path) -> None:
    prompts = {"negative": "bad " * 30, "positive": "good"}
    bound = TASKS["zero-shot"](prompts, max_length=12).open(save_tiny("bert", tmp_path))  # type: ignore[call-arg]
    assert bound.cuts() == ("1 of 2 label prompts were cut at 12 tokens",)


def test_free_answers_are_measured_by_exact_match(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    assert TASKS["causal"]().open(folder).measure == "exact match"
    assert TASKS["causal"](LABELS).open(folder).measure == "accuracy"
    bound = TASKS["causal"](LABELS, scoring="generate").open(folder)  # type: ignore[call-arg]
    assert bound.measure == "exact match" and bound.collate(toy_texts(2))
