"""Equal hashes of a data set mean equal examples; the content hash is the one that folds disguises."""

from __future__ import annotations

from typing import Any

import torch

from gradfix.data import Dataset, load_data
from gradfix.data.rows import content_hash, exact_hash
from tiny import toy_images


def hashes(*rows: dict[str, Any]) -> dict[str, str]:
    return load_data(list(rows)).hashes()


def talk(question: str, answer: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def test_letters_and_answers_count_in_the_hashes_of_a_data_set() -> None:
    assert hashes(talk("a film", "good")) == hashes(talk("a film", "good"))
    assert hashes(talk("a film", "good")) != hashes(talk("a film", "bad"))
    assert hashes(talk("a film", "good")) != hashes(talk("A film", "good"))
    asked = {"prompt": "a", "completion": "b"}
    assert hashes(asked) != hashes({**asked, "completion": "B"})
    rows = [{"text": "a film", "label": "x"}, {"text": "no film", "label": "y"}]
    assert hashes(*rows) != hashes({**rows[0], "text": "a  film"}, rows[1])
    assert hashes(*rows) != hashes({**rows[0], "label": "y"}, {**rows[1], "label": "x"})


def test_the_content_hash_still_folds_what_the_exact_one_tells_apart() -> None:
    left, right = talk("a film", "good"), talk("A  film", "bad")
    assert content_hash(left) == content_hash(right) and exact_hash(left) != exact_hash(right)


def test_plain_rows_and_pixels_as_numbers_have_hashes_too() -> None:
    image = torch.arange(12.0).view(3, 2, 2)
    rows = [{"image": image, "label": "x"}, {"image": image + 1, "label": "x"}]
    assert content_hash(rows[0]) == content_hash({"image": image.clone()}) != content_hash(rows[1])
    picture = toy_images(1)[0]
    found = [Dataset({"train": [row]}, {}, "").hashes() for row in (*rows, picture)]  # type: ignore[list-item]
    assert len({part["train"] for part in found}) == 3
