"""Every kind of source gives the same rows; every refusal names the place."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from gradfix.data import Dataset, load as load_module, load_data, rows as rows_module
from gradfix.data.files import READERS
from gradfix.data.load import load_hub
from gradfix.errors import DataError, UsageError
from tiny import toy_images, toy_texts, write_rows

ROWS = [{"text": "a good film", "label": "positive"}, {"text": "a bad, bad film", "label": "negative"}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows in any of the formats."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import csv

        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def texts(dataset: Dataset, split: str = "train") -> list[tuple[str, str]]:
    return [(row["text"], row["label"]) for row in dataset.splits[split]]


@pytest.mark.parametrize("suffix", list(READERS))
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    dataset = load_data(write(tmp_path / f"train{suffix}", ROWS))
    assert texts(dataset) == [(row["text"], row["label"]) for row in ROWS]
    assert dataset.labels == {"negative": "negative", "positive": "positive"}
    assert dataset.kind == "text"
    assert dataset.hashes() == load_data(ROWS).hashes()


def test_a_folder_has_splits_and_prompts(tmp_path: Path) -> None:
    for name in ("train.jsonl", "val.csv", "test.parquet"):
        write(tmp_path / name, ROWS)
    (tmp_path / "task.json").write_text('{"labels": {"positive": "I love it", "negative": "I hate it"}}')
    dataset = load_data(tmp_path)
    assert list(dataset.splits) == ["train", "validation", "test"]
    assert dataset.labels == {"positive": "I love it", "negative": "I hate it"}
    assert load_data(tmp_path / "val.csv").labels == dataset.labels
    assert dataset.pick("validation") == dataset.splits["validation"]
    assert len(load_data(tmp_path, splits=["test"]).splits) == 1
    with pytest.raises(DataError, match="Did you mean 'test'"):
        load_data(tmp_path, splits=["tst"])


def test_templates_multiply_the_prompts(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    task = {"labels": {"positive": ["good", "fine"], "negative": "bad"}, "templates": ["a {} film", "{}!"]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    labels = load_data(tmp_path).labels
    assert labels["positive"] == ["a good film", "a fine film", "good!", "fine!"]
    assert labels["negative"] == ["a bad film", "bad!"]


def test_strings_stay_strings(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("text,label\na,NA\nb,01\nc,1\n", encoding="utf-8-sig")
    assert list(load_data(path).labels) == ["01", "1", "NA"]


def test_numbers_and_booleans_become_strings() -> None:
    rows = [{"text": "a", "label": value} for value in (3, True, 2.0, "x")]
    assert [row["label"] for row in load_data(rows).splits["train"]] == ["3", "true", "2", "x"]


def test_a_multi_line_csv_field_keeps_the_line_numbers_right(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('text,label\n"two\nlines",a\n\nplain,b\n', encoding="utf-8")
    assert [row.where for row in load_data(path).splits["train"]] == [f"{path}:2", f"{path}:5"]


def test_class_names_of_parquet_and_hub_datasets(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    made = datasets.Dataset.from_list([{"text": "a", "label": 1}, {"text": "b", "label": 0}], features=features)
    made.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    for dataset in (load_data(tmp_path), load_data({"train": made})):
        assert [row["label"] for row in dataset.splits["train"]] == ["positive", "negative"]
        assert list(dataset.labels) == ["negative", "positive"]
    odd = made.cast_column("label", datasets.Value("int64")).map(lambda row: {"label": row["label"] - 1})
    with pytest.raises(DataError, match="no label in column"):
        load_data({"train": odd.cast(features)})
    kept = load_data({"train": odd.cast(features)}, drop_unlabelled=True)
    assert len(kept.splits["train"]) == 1 and "1 of 2 rows" in kept.notes[0]


def test_the_hub_path_reads_a_folder_in_the_hubs_layout(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS)
    through_datasets = load_data(load_hub(str(tmp_path)))
    directly = load_data(tmp_path)
    assert texts(through_datasets) == texts(directly) == [(row["text"], row["label"]) for row in ROWS]
    assert list(directly.splits) == ["train", "test"]


def test_a_hub_name_that_cannot_be_had_is_a_data_error() -> None:
    with pytest.raises(DataError, match="the hub did not deliver"):
        load_data("nobody/nothing-here")
    with pytest.raises(DataError, match="does not exist"):
        load_data("no/such/folder/at/all")


def test_image_folders_with_and_without_splits(tmp_path: Path) -> None:
    rows = toy_images(6)
    for split in ("train", "test"):
        write_rows(tmp_path, split, rows)
    dataset = load_data(tmp_path)
    assert {name: len(part) for name, part in dataset.splits.items()} == {"train": 6, "test": 6}
    assert list(dataset.labels) == ["blue", "green", "red"] and dataset.kind == "image"
    assert dataset.splits["train"][0]["image"].size == (16, 16)
    assert load_data(tmp_path / "train").labels == dataset.labels


def test_images_in_tables_are_paths_or_bytes(tmp_path: Path) -> None:
    image = toy_images(1)[0]["image"]
    image.save(tmp_path / "a.png")
    as_bytes = (tmp_path / "a.png").read_bytes()
    rows = [{"picture": "a.png", "label": "x"}, {"picture": "a.png", "label": "y"}]
    by_path = load_data(write(tmp_path / "train.jsonl", rows), image_column="picture")
    struct = [{"picture": {"bytes": as_bytes, "path": None}, "label": label} for label in "xy"]
    by_bytes = load_data(struct, image_column="picture")
    assert by_path.hashes() == by_bytes.hashes()
    rows[0]["picture"] = "b.png"
    path = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=r"train.jsonl:1.*b.png does not exist"):
        load_data(path, image_column="picture")


def test_conversations_need_no_label() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    dataset = load_data([{"messages": talk}])
    assert dataset.labels == {} and dataset.kind == "messages"
    assert load_data([{"prompt": "a", "completion": "b"}]).kind == "prompt"
    with pytest.raises(DataError, match="must be the assistant's"):
        load_data([{"messages": talk[:1]}])
    with pytest.raises(DataError, match="needs a role"):
        load_data([{"messages": [{"content": "x"}]}])
    with pytest.raises(DataError, match="there is no answer: the columns are 'prompt'"):
        load_data([{"prompt": "a"}])


def test_text_from_other_columns() -> None:
    rows = [{"premise": "p", "hypothesis": "h", "label": label} for label in "xy"]
    pair = load_data(rows, text_column=["premise", "hypothesis"]).splits["train"][0]
    assert (pair["text"], pair["text_pair"]) == ("p", "h")
    filled = load_data(rows, text_template="{premise} so {hypothesis}?").splits["train"][0]
    assert filled["text"] == "p so h?"
    with pytest.raises(DataError, match=r"no column 'premis'.*Did you mean 'premise'"):
        load_data(rows, text_template="{premis}")
    with pytest.raises(UsageError, match="cannot be filled"):
        load_data(rows, text_template="{premise")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "label": "x"}\n{"text": ', r"train.jsonl:2: this line is not JSON"),
        ("[1, 2]", r"train.jsonl:1: expected an object"),
        ('{"text": "a", "label": null}', r"train.jsonl:1: no label in column 'label'"),
        ('{"text": "a", "label": -100}', r"train.jsonl:1: no label"),
        ('{"text": "a", "label": ["x"]}', r"train.jsonl:1: the label is list"),
        ('{"text": "a", "label": "x"}\n{"text": 5, "label": "y"}', r"train.jsonl:2: column 'text' holds int"),
        ('{"text": " ", "label": "x"}', r"train.jsonl:1: column 'text' is empty"),
        ('{"text": "\\ud800", "label": "x"}', r"train.jsonl:1: column 'text' is not valid Unicode"),
        ("", r"is empty"),
        ("[" * 100_000, r"train.jsonl:1: this line is not JSON"),
        ('{"txt": "a", "label": "x"}', r"no column 'text'; the columns are: 'txt', 'label'. Did you mean 'txt'"),
        ('{"text": "a", "lable": "x"}', r"no column 'label'; .*Did you mean 'lable'"),
        ('{"text": "a", "label": "x"}', r"every row has the label 'x'"),
    ],
)
def test_bad_lines_are_refused_with_their_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_data(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,label\na,x\nb\n", r"train.csv:3: 1 fields, but the header has 2"),
        (b"text,label\na,x\n\xff\xfe,y\n", r"train.csv:3: not UTF-8"),
        (b"text,text\na,b\n", r"train.csv:1: the column 'text' appears twice"),
        (b'text,label\n"open,x\n', r"train.csv:2: not CSV"),
        (b"text,label\n", r"is empty"),
        (b"", r"is empty"),
        (b"text,label\na,\nb,x\n", r"train.csv:2: no label"),
    ],
)
def test_bad_csv_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(path)


def test_a_label_outside_the_set_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [*ROWS, {"text": "c", "label": "positiv"}])
    with pytest.raises(DataError, match=r"train.jsonl:3: label 'positiv'.*Did you mean 'positive'.*'text'"):
        load_data(path, labels={"positive": "", "negative": ""})


def test_a_column_that_is_no_label_lists_the_others() -> None:
    rows = [{"text": f"t{i}", "label": f"id{i}", "mood": "ab"[i % 2]} for i in range(30)]
    with pytest.raises(DataError, match=r"30 different values in 30 rows.*'mood'"):
        load_data(rows)
    assert list(load_data(rows, label_column="mood").labels) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold an object"),
        ('{"lables": {}}', "Did you mean 'labels'"),
        ('{"labels": {"a": 3}}', "maps each label"),
        ('{"labels": {"a": "x", "b": "y"}, "templates": ["no braces"]}', "with {} in them"),
        ('{"label_column": 3}', "must be a string"),
    ],
)
def test_a_bad_task_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "task.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_data(tmp_path)


def test_two_files_for_one_split_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "train.csv", ROWS)
    with pytest.raises(DataError, match="both claim to be one split"):
        load_data(tmp_path)


def test_empty_folders_and_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data"):
        load_data(tmp_path)
    (tmp_path / "train.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="unknown kind of data file"):
        load_data(tmp_path / "train.xlsx")
    with pytest.raises(DataError, match="is empty"):
        load_data([])


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet"):
        load_data(path)


def test_damaged_images_are_found_while_loading(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, "train", toy_images(4))
    victim = sorted(folder.rglob("*.png"))[2]
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{victim.name}: the image cannot be decoded"):
        load_data(tmp_path)
    assert load_data(tmp_path, check_images=False).splits
    victim.write_bytes(b"no image at all")
    with pytest.raises(DataError, match="unknown or damaged format"):
        load_data(tmp_path)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_PIXELS", 15 * 16)
    write_rows(tmp_path, "train", toy_images(3))
    with pytest.raises(DataError, match="claims 16 x 16 pixels"):
        load_data(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="far too large"):
        load_data(tmp_path)


def test_the_content_hash_sees_through_disguise_but_not_the_label() -> None:
    def content(**row: Any) -> str:
        return load_data([{"label": "x", **row}, {**row, "label": "y"}]).splits["train"][0].content

    assert content(text="A good\tFilm ") == content(text="a  good film", label="z")
    assert content(text="a good film") != content(text="a goodfilm")
    image = toy_images(1)[0]["image"]
    assert content(image=image) == content(image=image.convert("RGBA"))
    assert content(image=image) != content(image=toy_images(1, seed=1)[0]["image"])


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_mutated_lines_never_escape_as_another_error(tmp_path_factory: Any, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    good = b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'
    for suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
        path = folder / f"train{suffix}"
        path.write_bytes(good + b"\n".join(lines))
        with contextlib.suppress(DataError):
            load_data(path)


def test_python_rows_keep_their_place_when_loaded_twice() -> None:
    rows = load_data(toy_texts(4)).splits["train"]
    again = load_data(rows).splits["train"]
    assert [row.where for row in again] == [row.where for row in rows] == [f"train[{i}]" for i in range(4)]
    with pytest.raises(DataError, match="not int"):
        load_data([1, 2])  # type: ignore[list-item]


def test_a_long_csv_field_is_read_and_the_global_limit_comes_back(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    path = write(tmp_path / "train.csv", [{"text": "x" * (before + 1), "label": "a"}, {"text": "y", "label": "b"}])
    assert len(load_data(path).splits["train"][0]["text"]) == before + 1
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("imdb", ("imdb", None, None)),
        ("owner/name", ("owner/name", None, None)),
        ("nyu-mll/glue:sst2", ("nyu-mll/glue", "sst2", None)),
        ("owner/name:part@v1.0", ("owner/name", "part", "v1.0")),
    ],
)
def test_hub_names_carry_config_and_revision(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None, str | None]
) -> None:
    asked = []

    def fake(name: str, config: str | None, revision: str | None) -> dict[str, Any]:
        asked.append((name, config, revision))
        return {"train": ROWS, "validation_matched": ROWS}

    monkeypatch.setattr(load_module, "load_hub", fake)
    assert list(load_data(source).splits) == ["train", "validation_matched"] and asked == [expected]
