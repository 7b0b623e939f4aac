"""Only the asked-for input reaches a model; columns that merely share a name with one are left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradfix.cli import run
from gradfix.data import check_disjoint, load_data, load_unlabelled
from gradfix.data.rows import INPUTS
from gradfix.errors import DataError
from tiny import toy_images, write_rows

TALK = [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": "b"}]
STRANGERS: dict[str, Any] = {"text_pair": 5, "image": "http://example.org/1.png", "messages": TALK, "prompt": {"id": 1}}


def rows(column: str, **more: Any) -> list[dict[str, Any]]:
    return [{column: f"words {i}", "label": "ab"[i % 2], **more} for i in range(4)]


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("options", [{"text_column": "question"}, {"text_template": "{question}"}], ids=str)
def test_only_the_asked_for_column_is_an_input(stranger: str, options: dict[str, str]) -> None:
    data = load_data(rows("question", **{stranger: STRANGERS[stranger]}), **options)
    assert data.kind == "text" and check_disjoint(data.splits) == []
    assert [[name for name in INPUTS if name in row] for row in data.splits["train"]] == [["text"]] * 4
    assert data.splits["train"][1].content == load_data(rows("text")).splits["train"][1].content


@pytest.mark.parametrize("stranger", ["image", "messages", "prompt"])
def test_a_default_text_is_the_only_input(stranger: str) -> None:
    data = load_data(rows("text", **{stranger: STRANGERS[stranger]}))
    assert data.kind == "text" and stranger not in data.splits["train"][0]
    assert data.hashes() == load_data(rows("text")).hashes()
    found = load_unlabelled(rows("text", **{stranger: STRANGERS[stranger]}))
    assert stranger not in found[0]


def test_an_asked_for_image_is_the_only_input() -> None:
    picture = toy_images(1)[0]["image"]
    data = load_data(rows("text", image=picture, messages=TALK), image_column="image")
    assert data.kind == "image" and not {"text", "messages"} & set(data.splits["train"][0])


def test_an_id_called_prompt_hides_no_leak() -> None:
    parts = {}
    for split, words in (("few", "x"), ("test", "y")):
        texts = [{"sentence": text, "prompt": f"{split}-{text}", "label": text} for text in ("same", words)]
        parts[split] = load_data(texts, text_column="sentence").splits["train"]
    with pytest.raises(DataError, match=r"in few \(train\[0\]\) and in test \(train\[0\]\)"):
        check_disjoint(parts)


def test_a_pair_stands_beside_a_default_text_and_is_text() -> None:
    pair = load_data(rows("text", text_pair="more")).splits["train"][0]
    assert (pair["text"], pair["text_pair"]) == ("words 0", "more")
    for nothing in (None, "", " "):
        assert "text_pair" not in load_data(rows("text", text_pair=nothing)).splits["train"][0]
    assert "text_pair" not in load_data(rows("text", text_pair="more"), text_column="text").splits["train"][0]
    with pytest.raises(DataError, match=r"train\[0\]: column 'text_pair' holds int, not text"):
        load_data(rows("text", text_pair=5))


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_a_null_in_a_template_is_refused_with_its_row(nothing: object) -> None:
    pairs = [{"p": "x", "h": nothing if i == 1 else f"h{i}", "label": "ab"[i % 2]} for i in range(4)]
    with pytest.raises(DataError, match=r"train\[1\]: column 'h' is empty.*Fill it in or remove the row"):
        load_data(pairs, text_template="{p} therefore {h}")
    assert load_data(pairs, text_template="only {p}").splits["train"][1]["text"] == "only x"


def test_an_image_task_on_a_text_says_how_to_name_the_image(tmp_path: Path) -> None:
    from gradfix.tasks import TASKS
    from tiny import save_tiny

    bound = TASKS["zero-shot"]({"a": "a", "b": "b"}).open(save_tiny("clip", tmp_path))
    examples = load_data(rows("text", image=toy_images(1)[0]["image"])).splits["train"]
    with pytest.raises(DataError, match=r"train\[0\]: this task needs the column 'image'.*--image-column"):
        bound.collate(examples)


def picture_folders(home: Path, *splits: str) -> Path:
    for split in splits:
        write_rows(home, split, toy_images(6))
    return home


def test_a_folder_beside_the_splits_is_named(tmp_path: Path) -> None:
    home = picture_folders(tmp_path, "train", "test")
    for empty in ("notes", ".cache"):
        (home / empty).mkdir()
    assert list(load_data(home).splits) == ["train", "test"]
    masks = home / "masks"
    masks.mkdir()
    toy_images(1)[0]["image"].save(masks / "x.png")
    with pytest.raises(DataError, match=r"'masks' stands beside the split 'test'.*Move it away"):
        load_data(home)
    words = ["evaluate", "--model", "none", "--data", str(home), "--task", "zero-shot"]
    assert run(words) == 5


def test_a_class_may_be_called_like_a_split(tmp_path: Path) -> None:
    home = picture_folders(tmp_path, "all") / "all"
    shutil.move(home / "red", home / "train")
    data = load_data(home)
    assert list(data.splits) == ["train"] and list(data.labels) == ["blue", "green", "train"]


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    home = picture_folders(tmp_path, "train", "val", "validation")
    with pytest.raises(DataError, match="'val' and 'validation' both claim to be one split"):
        load_data(home)


def test_a_question_column_is_what_the_command_line_votes_on(tmp_path: Path) -> None:
    """Two sets that differ in an unused column alone give the same votes."""
    from gradfix import SignVotes
    from tiny import save_tiny

    model = save_tiny("llama", tmp_path / "model")
    found = []
    for name, more in (("plain", {}), ("beside", {"messages": TALK})):
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps(row) for row in rows("question", **more)]
        (folder / "train.jsonl").write_text("\n".join(lines))
        out = tmp_path / f"{name}.safetensors"
        words = ["vote", "--target", model, "--data", folder, "--task", "causal", "--shots", 1, "--out", out]
        assert run([*map(str, words), "--text-column", "question", "--quiet"]) == 0
        found.append(SignVotes.load(out))
    assert all((found[0][name] == found[1][name]).all() for name in found[0])
