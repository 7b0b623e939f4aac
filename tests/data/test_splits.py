"""Few-shot sets and folds are stratified, seeded and nested; overlaps are found by content."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from gradfix.data import check_disjoint, few_shot, folds, load_data, without_overlap
from gradfix.errors import DataError, UsageError
from tiny import toy_images, toy_texts

LABELLED = st.lists(st.sampled_from("abc"), min_size=2, max_size=40).map(
    lambda labels: [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
)


@given(LABELLED, st.integers(1, 6), st.integers(0, 99))
def test_few_shot_takes_so_many_of_each(rows: list[dict[str, str]], per_class: int, seed: int) -> None:
    counts = Counter(row["label"] for row in rows)
    picked = few_shot(rows, per_class, seed, allow_fewer=True)
    assert picked == sorted(set(picked)) == few_shot(rows, per_class, seed, allow_fewer=True)
    taken = Counter(rows[index]["label"] for index in picked)
    assert taken == {label: min(count, per_class) for label, count in counts.items()}
    assert set(picked) <= set(few_shot(rows, per_class + 1, seed, allow_fewer=True))


@given(LABELLED, st.integers(2, 5), st.integers(0, 9))
def test_folds_hold_everything_out_once(rows: list[dict[str, str]], k: int, seed: int) -> None:
    if len(rows) < k:
        with pytest.raises(DataError, match="cannot be cut"):
            folds(rows, k, seed)
        return
    parts = folds(rows, k, seed)
    assert sorted(index for _, held in parts for index in held) == list(range(len(rows)))
    assert all(sorted(fit + held) == list(range(len(rows))) for fit, held in parts)
    for label in {row["label"] for row in rows}:
        sizes = [sum(rows[index]["label"] == label for index in held) for _, held in parts]
        assert max(sizes) - min(sizes) <= 1


def test_another_seed_is_another_draw_and_classes_do_not_disturb_each_other() -> None:
    rows = toy_texts(40)
    assert few_shot(rows, 3, 0) != few_shot(rows, 3, 1)
    only = [index for index in few_shot(rows, 3, 0) if rows[index]["label"] == "positive"]
    renamed = [row if row["label"] == "positive" else {**row, "label": "other"} for row in rows]
    assert only == [i for i in few_shot(renamed, 3, 0) if rows[i]["label"] == "positive"]


def test_a_class_with_too_few_is_named() -> None:
    rows = [*toy_texts(10), {"text": "x", "label": "rare"}]
    with pytest.raises(DataError, match="'rare' has 1 examples, 3 were asked for.*allow fewer"):
        few_shot(rows, 3)
    assert len(few_shot(rows, 3, allow_fewer=True)) == 7
    with pytest.raises(DataError, match="'missing' has 0 examples"):
        few_shot(rows, 1, allow_fewer=True, labels=["rare", "missing"])
    with pytest.raises(UsageError, match="give 1 or more"):
        few_shot(rows, 0)
    with pytest.raises(DataError, match="no examples"):
        few_shot([], 1)
    with pytest.raises(UsageError, match="2 or more"):
        folds(rows, 1)


def test_rows_without_labels_are_one_class() -> None:
    assert len(few_shot([{"prompt": str(i)} for i in range(9)], 4)) == 4


def test_planted_duplicates_are_found_and_both_places_named() -> None:
    data = load_data({"vote": toy_texts(10), "test": toy_texts(10, seed=5)}).splits
    assert check_disjoint(data) == []
    text = data["vote"][3]["text"].upper() + " "
    planted = load_data({"test": [*toy_texts(4, seed=5), {"text": text, "label": "negative"}]}).splits["test"]
    with pytest.raises(DataError, match=r"in vote \(vote\[3\]\) and in test \(test\[4\]\)"):
        check_disjoint({"vote": data["vote"], "test": planted})
    assert without_overlap(planted, data["vote"]) == [0, 1, 2, 3]


def test_duplicates_inside_a_split_are_a_note() -> None:
    rows = toy_texts(5)
    assert check_disjoint({"vote": [*rows, rows[0]]}) == ["vote: 1 of 6 examples repeat an earlier one."]


def test_plain_dictionaries_and_images_work_too() -> None:
    images = toy_images(4)
    with pytest.raises(DataError, match=r"in a \(example 0\) and in b \(example 0\)"):
        check_disjoint({"a": images[:2], "b": [{**images[0], "label": "other"}]})


def crossing(rows: list[dict[str, str]], parts: list[tuple[list[int], list[int]]]) -> list[set[str]]:
    """The words that stand on both sides of each fold, spacing and letter case aside."""
    words = [" ".join(row["text"].lower().split()) for row in rows]
    return [{words[i] for i in fit} & {words[i] for i in held} for fit, held in parts]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=2, max_size=30), st.integers(2, 5))
def test_repeats_stay_in_one_fold(drawn: list[tuple[str, int]], k: int) -> None:
    rows = [
        {"text": ("word  %d" if place % 2 else "Word %d") % number, "label": label}
        for place, (label, number) in enumerate(drawn)
    ]
    different = len({number for _, number in drawn})
    if len(rows) < k or different < 2:
        with pytest.raises(DataError, match=r"cannot be cut|are the same"):
            folds(rows, k)
        return
    parts = folds(rows, k)
    assert len(parts) == min(k, different) and all(fit and held for fit, held in parts)
    assert sorted(index for _, held in parts for index in held) == list(range(len(rows)))
    assert not any(crossing(rows, parts))


def test_folds_without_repeats_are_those_of_the_published_figures() -> None:
    rows = [{"text": f"sample {index}", "label": "ab"[index % 2]} for index in range(10)]
    assert [held for _, held in folds(rows, 3)] == [[4, 6, 7, 9], [0, 2, 3], [1, 5, 8]]
    assert few_shot(rows, 2) == [2, 4, 5, 7]


def test_examples_without_a_known_input_are_never_repeats() -> None:
    parts = folds([{"numbers": index, "label": "a"} for index in range(6)], 3)
    assert [len(held) for _, held in parts] == [2, 2, 2]
