"""The measures of searches against a naive count, and what is no search."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr

from gradfix.errors import DataError
from gradfix.tasks.retrieval import MAIN, RECALL, RECIPROCAL, search, searches, spearman


def rows(count: int, labels: int) -> list[dict[str, str]]:
    return [{"text": f"text {i}", "label": str(i % labels)} for i in range(count)]


def naive(near: torch.Tensor, right: set[int], itself: set[int]) -> tuple[float, float, float]:
    """nDCG@10, recall@10 and the reciprocal rank of one search, counted by hand."""
    order = [place for place in near.argsort(descending=True).tolist() if place not in itself]
    gain = sum(1 / math.log2(rank + 2) for rank, place in enumerate(order[:10]) if place in right)
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(10, len(right))))
    first = next(rank for rank, place in enumerate(order) if place in right)
    return gain / ideal, len(right & set(order[:10])) / len(right), 1 / (first + 1)


@pytest.mark.parametrize("labels", [2, 7, 20])
def test_searches_by_label_are_counted_as_by_hand(labels: int) -> None:
    examples = rows(41, labels)
    known = searches(examples)
    vectors = torch.nn.functional.normalize(
        torch.randn(41, 5, dtype=torch.double, generator=torch.Generator().manual_seed(labels)), dim=-1
    )
    found = search(known, vectors, 0.05)
    for row, example in enumerate(examples):
        right = {i for i, other in enumerate(examples) if other["label"] == example["label"] and i != row}
        expected = naive(vectors @ vectors[row], right, {row})
        got = [float(found.measures[name][row]) for name in (MAIN, RECALL, RECIPROCAL)]
        assert got == pytest.approx(expected, abs=1e-12)


def test_pairs_search_all_documents_and_never_their_own_words() -> None:
    examples = [
        {"text": "a", "text_pair": "x", "negatives": ["y", "a"]},
        {"text": "b", "text_pair": "z"},
        {"text": "b", "text_pair": "w"},
    ]
    known = searches(examples)
    documents = [known.texts[place][1] for place in known.corpus]
    assert sorted(documents) == ["a", "w", "x", "y", "z"]
    assert known.notes == ("1 of 2 queries are in the corpus word for word; each is left out of its own ranking",)
    places = {text: place for place, text in enumerate(known.texts)}
    vectors = torch.eye(len(known.texts), dtype=torch.double)
    vectors[places["query", "a"]] = vectors[places["document", "a"]] + 0.5 * vectors[places["document", "x"]]
    found = search(known, vectors, 0.05)
    assert float(found.measures[MAIN][0]) == 1 and float(found.measures[RECIPROCAL][0]) == 1
    assert known.wanted[1] == known.wanted[2] == {places["document", "z"], places["document", "w"]}


def test_a_text_that_is_alone_with_its_label_is_not_counted() -> None:
    known = searches([*rows(6, 2), {"text": "alone", "label": "odd"}])
    found = search(known, torch.randn(7, 3), 0.05)
    assert math.isnan(found.measures[MAIN][6]) and found.first[6] == -1
    assert "1 of 7 texts have no partner" in known.notes[0]


def test_grades_are_compared_by_rank() -> None:
    examples = [{"text": f"a{i}", "text_pair": f"b{i}", "grade": float(i % 4)} for i in range(9)]
    known = searches(examples)
    vectors = torch.randn(18, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    value, near = spearman(known, vectors)
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    cosines = [float(unit[2 * i] @ unit[2 * i + 1]) for i in range(9)]
    assert near.tolist() == pytest.approx(cosines)
    assert value == pytest.approx(spearmanr(cosines, [i % 4 for i in range(9)]).statistic)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"text": "one", "label": "a"}], "only one text"),
        ([{"text": "same", "label": "a"}, {"text": " same ", "label": "b"}], "2 times the same text"),
        ([{"text": "a", "label": "a"}, {"text": "b", "label": "b"}], "no text has a partner"),
        ([{"text": "a"}, {"text": "b"}], "without a label or a positive"),
        ([{"text": "a", "text_pair": "a"}, {"text": "b", "text_pair": "c"}], "the same text word for word"),
        ([{"text": "a", "text_pair": "b"}, {"text": "c"}], "no positive for this query"),
        ([{"text": "a", "text_pair": "b", "grade": 1.0}, {"text": "c", "text_pair": "d", "grade": 1.0}], "same grade"),
        ([{"text": "a", "text_pair": "b", "grade": 1.0}, {"text": "c", "text_pair": "d"}], "one is missing"),
    ],
)
def test_what_is_no_search_gets_a_line(examples: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        searches(examples)
