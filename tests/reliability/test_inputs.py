"""Files and examples as strangers make them: nothing runs, nothing unfolds, values stay what they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import gradfix
from gradfix.data import load_data
from gradfix.errors import CorruptInput
from tests.reliability.world import World, say

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


def test_a_pickle_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    """Four bytes that unfold to a terabyte, and tensors without any data."""
    torch.save({"w": torch.zeros(1).expand(1 << 20, 1 << 18)}, tmp_path / "views.pt")
    with pytest.raises(CorruptInput, match="'w' claims 274,877,906,944 entries that the file does not hold"):
        gradfix.open_checkpoint(tmp_path / "views.pt")
    torch.save({"w": torch.zeros(3, device="meta")}, tmp_path / "meta.pt")
    with pytest.raises(CorruptInput, match=r"meta\.pt"):
        gradfix.open_checkpoint(tmp_path / "meta.pt")


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    import zipfile

    torch.save({"w": torch.zeros(3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for record in whole.infolist():
            data = bytes(50_000_000) if record.filename.endswith("data.pkl") else whole.read(record)
            bomb.writestr(record.filename, data, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(CorruptInput, match=r"bomb\.pt: record .* is compressed or larger than the file"):
        gradfix.open_checkpoint(tmp_path / "bomb.pt")


def test_flipped_bits_of_a_pickle_are_noticed(tmp_path: Path) -> None:
    """torch does not look at checksums in files that it maps."""
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[data.index(torch.tensor([500.0, 501.0]).numpy().tobytes())] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CorruptInput, match=r"record '.*data/0' has another checksum"):
        gradfix.open_checkpoint(tmp_path / "w.pt")


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CorruptInput, match="no regular file"):
        gradfix.open_checkpoint(tmp_path / "x.safetensors")


def test_names_no_system_can_hold(tmp_path: Path) -> None:
    with pytest.raises(CorruptInput, match="does not exist"):
        gradfix.open_checkpoint("x" * 5000)
    (tmp_path / "gradfix.json").write_text(json.dumps({"outputs": {"y" * 5000: "0", "z\0": "0"}}))
    with pytest.raises(CorruptInput, match="is missing"):
        gradfix.verify(tmp_path)


def test_postscript_is_never_decoded(tmp_path: Path) -> None:
    """Under whatever name: an interpreter would run what is in it."""
    from gradfix.errors import DataError

    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(DataError, match=r"x\.png: this is not an image any more"):
        load_data(tmp_path)


@pytest.mark.parametrize("template", ["{text:>999999999}", "{text.__class__}", "{text[0]}", "{text!r}"])
def test_a_template_that_comes_with_the_data_names_columns_only(tmp_path: Path, template: str) -> None:
    from gradfix.errors import UsageError

    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.json").write_text(json.dumps({"text_template": template}))
    with pytest.raises(UsageError, match="use plain column names"):
        load_data(tmp_path)


def test_a_parquet_file_that_claims_a_billion_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    from gradfix.errors import DataError

    parquet.write_table(pyarrow.table({"text": ["a"] * 1000, "label": ["x"] * 1000}), tmp_path / "train.parquet")
    monkeypatch.setattr("gradfix.data.files.MAX_ROWS", 999)
    with pytest.raises(DataError, match=r"train.parquet claims 1,000 rows, more than 999. Take a sample"):
        load_data(tmp_path / "train.parquet")


def test_code_in_a_checkpoint_is_not_copied_along(world: World) -> None:
    (world.target / "modeling_own.py").write_text("x = 1")
    (world.target / "cache.pkl").write_bytes(b"x")
    assert say(world.arguments()).code == 0
    assert not {"modeling_own.py", "cache.pkl"} & {path.name for path in world.out.iterdir()}


def test_code_named_by_a_known_model_does_not_run_either(world: World) -> None:
    """The family's own classes are used where there are any; the named ones are never imported."""
    canary = world.home / "canary"
    code = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n"
    (world.target / "evil.py").write_text(code)
    for file, names in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        path = world.target / file
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    said = say(world.arguments())
    assert said.code in (0, 3), said
    assert not canary.exists()
    assert "evil.py" not in [path.name for path in world.out.glob("*")]


def test_csv_values_stay_strings(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b"\xef\xbb\xbftext,label\r\nNA,01\r\n1e5,NA\r\n")
    rows = load_data(tmp_path / "train.csv").pick("train")
    assert [(row["text"], row["label"]) for row in rows] == [("NA", "01"), ("1e5", "NA")]
    assert [row.where.rsplit(":", 1)[1] for row in rows] == ["2", "3"]


def test_allow_fewer_takes_what_there_is(world: World) -> None:
    said = say(world.arguments("select", target=None, shots=7, allow_fewer=True, out=world.home / "ids.json"))
    assert said.code == 0
    assert len(json.loads((world.home / "ids.json").read_text())) == 12
