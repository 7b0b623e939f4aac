"""How long a text may be, by the model's own word, and what is said when one was longer."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

from gradfix.tasks import TASKS, base
from gradfix.tasks.base import A_PASS, Batch, alike
from gradfix.tasks.scoring import evaluate
from gradfix.training.distil import in_stretches
from tests.tasks.families import CASES
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
def test_the_shortest_of_what_tokenizer_and_model_say_is_the_default(family: str, task: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    model_max_length(folder, 10**30)
    own = TASKS[task](LABELS).open(folder)
    width = own.collate(LONG)["input_ids"].shape[-1]
    config = own.model.config
    held = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 512
    assert width == min(held, own.collate([{"text": "good " * 200, "label": "positive"}])["input_ids"].shape[-1])
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


@given(st.lists(st.integers(1, 60), max_size=9))
def test_stretches_are_the_cheapest_of_all_ways_to_cut(lengths: list[int]) -> None:
    def price(parts: list[list[int]]) -> int:
        return sum(len(part) * max(part) + A_PASS for part in parts)

    found = alike(lengths)
    assert sorted(place for part in found for place in part) == list(range(len(lengths)))
    inorder = sorted(lengths)
    assert [lengths[place] for part in found for place in part] == inorder
    ways = [
        [inorder[first:last] for first, last in pairwise([0, *cuts, len(lengths)])]
        for count in range(len(lengths))
        for cuts in combinations(range(1, len(lengths)), count)
    ]
    assert price([[lengths[place] for place in part] for part in found]) == min(map(price, ways), default=0)


@pytest.mark.parametrize("family", ["zero-shot", "classification"])
def test_stretches_change_neither_answers_nor_gradients(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.task == family and not case.images)
    bound = case.open(case.save(tmp_path), torch.float64)
    rows = [{**row, "text": " ".join([row["text"]] * (1 + 5 * (n % 3)))} for n, row in enumerate(case.rows(12))]
    whole = bound.collate(rows)
    passes: list[int] = []

    def answered(price: int) -> tuple[Tensor, list[Tensor], dict[str, float]]:
        monkeypatch.setattr(base, "A_PASS", price)
        bound.model.zero_grad()
        before = len(passes)
        found = in_stretches(bound.model, whole, ask)
        passes.append(len(passes) - before)
        functional.cross_entropy(found, whole["labels"]).backward()
        gradients = [p.grad.clone() for p in bound.model.parameters() if p.grad is not None]
        return found.detach(), gradients, evaluate(bound.model, bound, bound.scoring_batches(rows, 12))

    def ask(batch: Batch) -> Tensor:
        passes.append(0)
        return bound.logits(bound.model, batch)

    one, several = answered(10**6), answered(1)
    assert passes[1] == 1 and passes[-1] >= 3
    torch.testing.assert_close(one[0], several[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(one[1], several[1], rtol=0, atol=1e-12)
    assert one[2] == pytest.approx(several[2])
