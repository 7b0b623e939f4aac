"""Inputs without labels."""

from __future__ import annotations

import json

import pytest

from gradfix.data import load_unlabelled
from gradfix.errors import DataError


def test_inputs_need_no_label_column_and_the_test_split_is_left_out(tmp_path):
    (tmp_path / "pool.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [row["text"] for row in load_unlabelled(tmp_path / "pool.jsonl")] == ["one", "two"]
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": split, "label": "x"}) + "\n")
    assert [row["text"] for row in load_unlabelled(folder)] == ["train"]


def test_a_missing_text_column_lists_what_is_there(tmp_path):
    (tmp_path / "pool.jsonl").write_text('{"sentence": "one"}\n')
    with pytest.raises(DataError, match="'sentence'"):
        load_unlabelled(tmp_path / "pool.jsonl")
    assert load_unlabelled(tmp_path / "pool.jsonl", text_column="sentence")[0]["text"] == "one"
