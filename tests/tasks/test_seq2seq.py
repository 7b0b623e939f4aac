"""Seq2seq losses are transformers' own; the likeliest label is what brute force finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradfix.errors import UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import evaluate
from gradfix.training.finetuning import finetune
from tiny import save_tiny, toy_texts

LABELS = {"negative": "it is bad", "positive": "good"}  # of different lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("t5", tmp_path_factory.mktemp("t5"))


def test_the_loss_is_transformers_own_sample_by_sample(folder: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = toy_texts(5)
    expected, lengths = [], []
    with torch.no_grad():
        for row in rows:
            answer = tokenizer(text_target=LABELS[row["label"]], return_tensors="pt")["input_ids"]
            expected.append(model(**tokenizer(row["text"], return_tensors="pt"), labels=answer).loss)
            lengths.append(answer.numel())
    mean = TASKS["seq2seq"](LABELS).open(folder, dtype=torch.float64)
    total = TASKS["seq2seq"](LABELS, loss="sum").open(folder, dtype=torch.float64)
    found = mean.loss(mean.model, mean.collate(rows))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-10)
    summed = total.loss(total.model, total.collate(rows))
    torch.testing.assert_close(summed, found * torch.tensor(lengths), rtol=0, atol=1e-10)


def test_logits_are_log_likelihoods_of_the_texts(folder: Path) -> None:
    bound = TASKS["seq2seq"](LABELS, loss="sum").open(folder, dtype=torch.float64)
    rows = toy_texts(3)
    logits = bound.logits(bound.model, bound.collate(rows))
    for column, label in enumerate(LABELS):
        losses = bound.loss(bound.model, bound.collate([{**row, "label": label} for row in rows]))
        torch.testing.assert_close(logits[:, column], -losses, rtol=0, atol=1e-10)


def test_generation_agrees_once_the_task_is_learned(folder: Path) -> None:
    rows, held = toy_texts(96), toy_texts(30, seed=9)
    spoken = TASKS["seq2seq"](LABELS, scoring="generate").open(folder)
    assert evaluate(spoken.model, spoken, spoken.batches(held))["accuracy"] < 50  # says no label at all yet
    finetune(spoken, rows, steps=60, batch_size=32, lr=1e-2)
    batch = spoken.collate(held)
    assert set(spoken.generate(spoken.model, batch)) <= set(LABELS.values())
    assert evaluate(spoken.model, spoken, [batch])["accuracy"] > 90


def test_labels_must_be_told_apart() -> None:
    with pytest.raises(UsageError, match="two labels share"):
        TASKS["seq2seq"]({"a": "x", "b": "x"})
    with pytest.raises(UsageError, match="needs exactly one"):
        TASKS["seq2seq"]({"a": ["x", "y"], "b": "z"})
    with pytest.raises(UsageError, match="at least two"):
        TASKS["seq2seq"]({"a": "x"})
    with pytest.raises(UsageError, match="Did you mean 'mean'"):
        TASKS["seq2seq"](LABELS, loss="maen")
    with pytest.raises(UsageError, match="Did you mean 'generate'"):
        TASKS["seq2seq"](LABELS, scoring="generat")
