"""Causal losses look at the answer only; templates, truncation and the three ways to score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix.errors import DataError, UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import evaluate
from gradfix.training.finetuning import finetune
from tiny import VOCAB, save_tiny, toy_texts

LABELS = {"negative": "it is bad", "positive": "good"}
TALK = {"messages": [{"role": "user", "content": "a good film"}, {"role": "assistant", "content": "so it is"}]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt2", tmp_path_factory.mktemp("gpt2"))


def naive_loss(folder: Path, asked: list[int], said: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = torch.tensor([asked + said])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(asked) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(said)).reshape(1)


def ids(text: str) -> list[int]:
    return [VOCAB.index(word) for word in text.split()]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_loss_is_on_the_completion_only(model: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    bound = TASKS["causal"]().open(folder, dtype=torch.float64)
    row = {"prompt": "a good film", "completion": "the photo"}
    first = ["<s>"] if model == "llama" else []
    asked, said = ids(" ".join([*first, "a good film"])), ids("the photo </s>")
    padded = bound.collate([row, {"prompt": "a " * 20, "completion": "bad " * 9}])
    found = bound.loss(bound.model, padded)[:1]
    torch.testing.assert_close(found, naive_loss(folder, asked, said), rtol=0, atol=1e-10)


def test_a_conversation_goes_through_the_chat_template(llama: Path) -> None:
    bound = TASKS["causal"]().open(llama, dtype=torch.float64)
    batch = bound.collate([TALK])
    answer = batch["input_ids"][0, 0][batch["answer_mask"][0, 0].bool()]
    shown = bound.tokenizer.decode(answer)
    assert shown.replace(" ", "") == "soitis</s>"
    whole = bound.tokenizer.decode(batch["input_ids"][0, 0]).replace(" ", "")
    assert whole == "<s>user:agoodfilm</s><s>assistant:soitis</s>"


def test_labels_can_answer_texts_prompts_and_conversations(llama: Path) -> None:
    bound = TASKS["causal"](LABELS).open(llama, dtype=torch.float64)
    rows: list[dict[str, Any]] = [
        {"text": "a film", "label": "positive"},
        {"prompt": "a film", "label": "positive"},
        {"messages": TALK["messages"][:1], "label": "positive"},
    ]
    batch = bound.collate(rows)
    assert batch["input_ids"].shape[:2] == (3, 2)
    losses = bound.loss(bound.model, batch)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[:1], naive_loss(llama, ids("<s> a film"), ids("good </s>")), rtol=0, atol=1e-10)


def test_exact_is_what_greedy_generation_would_say(gpt2: Path) -> None:
    rows = [{"prompt": row["text"], "completion": row["label"]} for row in toy_texts(64)]
    held = [{"prompt": row["text"], "completion": row["label"]} for row in toy_texts(20, seed=9)]
    exact = TASKS["causal"](scoring="exact").open(gpt2)
    spoken = TASKS["causal"](scoring="generate").open(gpt2)
    for bound in (exact, spoken):
        finetune(bound, rows, steps=60, batch_size=32, lr=3e-3)
    left = exact.predict(exact.model, exact.collate(held))
    right = spoken.predict(spoken.model, spoken.collate(held))
    assert torch.equal(left, right) and (left == 0).float().mean() > 0.8
    assert evaluate(spoken.model, spoken, spoken.batches(held))["accuracy"] > 80


def test_the_mean_loss_is_over_the_answer_tokens(gpt2: Path) -> None:
    mean, total = (TASKS["causal"](loss=loss).open(gpt2, dtype=torch.float64) for loss in ("mean", "sum"))
    rows = [{"prompt": "a", "completion": "film"}, {"prompt": "good", "completion": "the photo of red"}]
    means, sums = (bound.loss(bound.model, bound.collate(rows)) for bound in (mean, total))
    torch.testing.assert_close(means * torch.tensor([2, 5]), sums)


def test_a_long_prompt_loses_its_beginning_never_its_answer(gpt2: Path) -> None:
    bound = TASKS["causal"](max_length=8).open(gpt2)
    batch = bound.collate([{"prompt": "x y z a b c d e f good", "completion": "bad film"}])
    assert batch["input_ids"][0, 0].tolist() == ids("c d e f good bad film </s>")
    with pytest.raises(DataError, match="the answer has 10 tokens"):
        bound.collate([{"prompt": "a", "completion": "bad " * 9}])


def test_an_answer_without_a_prompt_starts_from_the_first_token(gpt2: Path) -> None:
    bound = TASKS["causal"]().open(gpt2)
    batch = bound.collate([{"prompt": "", "completion": "bad"}])
    assert batch["input_ids"][0, 0].tolist() == ids("<s> bad </s>")


def test_what_cannot_be_asked_is_refused(gpt2: Path, llama: Path) -> None:
    bound = TASKS["causal"]().open(gpt2)
    with pytest.raises(DataError, match="no chat template"):
        bound.collate([TALK])
    with pytest.raises(DataError, match="needs messages"):
        bound.collate([{"label": "x"}])
    with pytest.raises(DataError, match="no completion and no label set"):
        bound.collate([{"prompt": "a"}])
    with pytest.raises(UsageError, match="no closed label set"):
        bound.logits(bound.model, bound.collate([{"prompt": "a", "completion": "b"}]))
    with pytest.raises(UsageError, match="needs a label set"):
        TASKS["causal"](scoring="likelihood")
    with pytest.raises(UsageError, match="Did you mean 'exact'"):
        TASKS["causal"](scoring="exat")
    twisted = TASKS["causal"]().open(llama)
    twisted.tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="rewrites the question"):
        twisted.collate([TALK])
