"""The embedding task: pairs, prompts and votes that do not depend on the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix.data import load_data, load_unlabelled
from gradfix.errors import DataError
from gradfix.tasks import TASKS
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.retrieval import MAIN, RECALL, RECIPROCAL, SPEARMAN
from gradfix.tasks.scoring import evaluate
from gradfix.training.finetuning import finetune
from gradfix.votes.collect import collect_votes
from tests.tasks.test_sentences import flags, sentence_folder
from tests.tiny import save_tiny, toy_topics, write_rows

PAIRS = [
    {"query": "where is my card", "positive": "cards come by post", "negatives": ["rates change daily"]},
    {"query": "what is the rate", "positive": "rates change daily"},
    {"query": "send money home", "positive": "a transfer takes a day", "negatives": "cards come by post"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("bert", tmp_path_factory.mktemp("models") / "bert")


def opened(folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> EmbeddingBound:
    return TASKS["embedding"]({}, **options).open(folder, dtype=dtype)  # type: ignore[call-arg,return-value]


def pairs(tmp_path: Path, rows: list[dict[str, Any]] = PAIRS) -> list[Any]:
    write_rows(tmp_path, "train", rows)
    return load_data(tmp_path / "train.jsonl").splits["train"]


@pytest.mark.parametrize("kind", ["label", "pair"])
def test_votes_do_not_depend_on_the_batches(kind: str, folder: Path, tmp_path: Path) -> None:
    bound = opened(folder)
    rows = bound.linked(toy_topics(6) if kind == "label" else pairs(tmp_path))
    votes = [
        collect_votes(bound.model, bound.loss, bound.batches(rows, size), engine=engine)
        for size, engine in ((1, "loop"), (3, "loop"), (3, "batched"))
    ]
    still = ("key.bias", "embeddings")  # rounding noise, and rows of tokens
    for name in votes[0]:
        if not any(word in name for word in still):
            assert torch.equal(votes[0][name], votes[1][name])
            assert (votes[0][name] != votes[2][name]).float().mean() < 0.01, name


def test_the_loss_is_the_contrast_of_a_pair_with_its_negatives(folder: Path, tmp_path: Path) -> None:
    bound = opened(folder)
    rows = pairs(tmp_path)
    losses = bound.loss(bound.model, bound.collate(rows))
    known = {"document": ["cards come by post", "rates change daily", "a transfer takes a day"]}
    for row, loss in zip(PAIRS, losses, strict=True):
        texts = [("query", row["query"]), ("document", row["positive"])]
        texts += [("document", text) for text in known["document"] if text != row["positive"]]
        vectors = bound.vectors(bound.model, texts)
        near = 20 * vectors[0] @ vectors[1:].T
        assert loss.item() == pytest.approx((torch.logsumexp(near, 0) - near[0]).item(), abs=1e-10)


def test_fine_tuning_by_contrast_raises_the_score(folder: Path) -> None:
    bound = opened(folder, torch.float32)
    test = toy_topics(40, seed=9)
    before = evaluate(bound.model, bound, bound.scoring_batches(test))
    finetune(bound, toy_topics(60), steps=25, batch_size=24, lr=3e-3)
    after = evaluate(bound.model, bound, bound.scoring_batches(test))
    assert after["accuracy"] > before["accuracy"] + 15 and bound.measure == MAIN
    assert {RECALL, RECIPROCAL} <= set(after) and after["samples"] == 40


def test_graded_pairs_are_scored_by_rank(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"text": f"good film {i}", "text_pair": f"{'good' if i % 2 else 'bad'} x {i}", "grade": i % 2} for i in range(8)
    ]
    bound = opened(folder, torch.float32)
    loaded = pairs(tmp_path, rows)
    score = evaluate(bound.model, bound, bound.scoring_batches(loaded))
    assert bound.measure == SPEARMAN and -100 <= score["accuracy"] <= 100
    finetune(bound, loaded, steps=25, batch_size=8, lr=3e-3)
    assert evaluate(bound.model, bound, bound.scoring_batches(loaded))["accuracy"] > 80


def test_queries_and_documents_stand_behind_their_prompts(folder: Path, tmp_path: Path) -> None:
    home = sentence_folder(tmp_path / "e5", flags("mean"))
    prompts = {"query": "query: ", "passage": "passage: "}
    (home / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    bound, plain = opened(home), opened(folder)
    expected = [("text", f"{prompt}good film") for prompt in ("query: ", "passage: ", "passage: ")]
    found = bound.vectors(bound.model, [(role, "good film") for role in ("query", "document", "text")])
    torch.testing.assert_close(found, plain.vectors(plain.model, expected), rtol=0, atol=1e-12)
    default = {"prompts": {**prompts, "all": "all: "}, "default_prompt_name": "all"}
    (home / "config_sentence_transformers.json").write_text(json.dumps(default))
    bound = opened(home)
    torch.testing.assert_close(
        bound.vectors(bound.model, [("text", "good film")]), plain.vectors(plain.model, [("text", "all: good film")])
    )


def test_a_prompt_that_does_not_count_is_left_out_of_the_mean(tmp_path: Path) -> None:
    home = sentence_folder(tmp_path / "model", {**flags("mean"), "include_prompt": False})
    (home / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "a good "}}))
    bound = opened(home)
    tokens = bound.encoder.read([("query", "film of x"), ("document", "film of x")])
    hidden = bound.model(tokens["input_ids"], tokens["attention_mask"]).last_hidden_state
    count = int(tokens["attention_mask"][0].sum())
    expected = torch.nn.functional.normalize(hidden[0, 3:count].mean(0), dim=-1)
    torch.testing.assert_close(bound.embed(bound.model, tokens)[0], expected)


def test_pairs_are_read_with_their_negatives_and_alone_as_texts(tmp_path: Path) -> None:
    rows = pairs(tmp_path)
    assert rows[0]["text"] == PAIRS[0]["query"] and rows[0]["text_pair"] == PAIRS[0]["positive"]
    assert rows[2]["negatives"] == ["cards come by post"]
    assert len(load_unlabelled(tmp_path / "train.jsonl")) == 3
    bare = load_data([{"text": "a"}, {"text": "b"}], bare=True)
    assert bare.labels == {} and "label" not in bare.splits["train"][0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a", "positive": ""}], "'positive' is empty"),
        ([{"query": "a", "positive": "b", "negatives": 3}], "must be a text or a list"),
        ([{"query": "a", "positive": "b", "negatives": [""]}], "'negatives' is empty"),
        ([{"text": "a", "text_pair": "b", "grade": "high"}], "'high' is no number"),
        ([{"text": "a", "text_pair": "b", "grade": "inf"}], "not finite"),
    ],
)
def test_a_damaged_pair_gets_a_line(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        pairs(tmp_path, rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "one text per label makes no pairs"),
        ([{"text": "a"}, {"text": "b"}], "says nothing about its neighbours"),
        ([{"text": "a", "label": "x"}] * 3, "3 times the same text"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "nothing in the examples is a negative"),
    ],
)
def test_examples_that_make_no_pairs_get_a_line(rows: list[dict[str, Any]], message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message):
        opened(folder).collate(rows)
