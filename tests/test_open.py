"""Opening checkpoints: every format, and every way a file can be wrong."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

import gradfix
from gradfix.errors import CorruptInput, UsageError

STATE = {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.tensor(2.0), "c": torch.zeros(0, 3)}


def _same(checkpoint) -> bool:
    return set(checkpoint.names()) == set(STATE) and all(torch.equal(checkpoint.read(n), STATE[n]) for n in STATE)


def test_every_container_opens_to_the_same_tensors_and_fingerprint(tmp_path):
    save_file(STATE, tmp_path / "x.safetensors")
    torch.save(STATE, tmp_path / "x.pt")
    torch.save({"state_dict": {f"module.{n}": t for n, t in STATE.items()}, "epoch": 3}, tmp_path / "wrapped.bin")
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(STATE, folder / "pytorch_model.bin")
    sources = [STATE, tmp_path / "x.safetensors", tmp_path / "x.pt", tmp_path / "wrapped.bin", folder]
    opened = [gradfix.open_checkpoint(source) for source in sources]
    assert all(_same(checkpoint) for checkpoint in opened)
    assert len({checkpoint.fingerprint() for checkpoint in opened}) == 1


def test_chunks_are_the_flat_tensor(tmp_path):
    save_file(STATE, tmp_path / "x.safetensors")
    checkpoint = gradfix.open_checkpoint(tmp_path / "x.safetensors")
    pieces = list(checkpoint.chunks("a.weight", 5))
    assert [len(piece) for piece in pieces] == [5, 5, 2]
    assert torch.equal(torch.cat(pieces), STATE["a.weight"].flatten())


def _index(folder, weight_map) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("path", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", ".."])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, path):
    save_file(STATE, tmp_path / "x.safetensors")
    _index(tmp_path / "f", dict.fromkeys(STATE, path))
    with pytest.raises(CorruptInput, match="points outside its folder"):
        gradfix.open_checkpoint(tmp_path / "f")


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    folder = tmp_path / "f"
    _index(folder, {"a.weight": "s.safetensors", "ghost": "s.safetensors"})
    save_file({"a.weight": STATE["a.weight"]}, folder / "s.safetensors")
    with pytest.raises(CorruptInput, match="disagree about tensor 'ghost'"):
        gradfix.open_checkpoint(folder)
    _index(folder, {"a.weight": "gone.safetensors"})
    with pytest.raises(CorruptInput, match=r"gone\.safetensors, which is not in the folder"):
        gradfix.open_checkpoint(folder)


def test_truncated_safetensors_are_named(tmp_path):
    save_file(STATE, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for size in (0, 7, 20, len(data) - 1):
        (tmp_path / "cut.safetensors").write_bytes(data[:size])
        with pytest.raises(CorruptInput, match=r"cut\.safetensors") as caught:
            gradfix.open_checkpoint(tmp_path / "cut.safetensors")
        assert caught.value.exit_code == 3


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_with_code_is_refused_and_never_runs(tmp_path):
    canary = tmp_path / "canary"
    with open(tmp_path / "evil.bin", "wb") as file:
        pickle.dump({"a": _Evil(str(canary))}, file)
    torch.save({"a": _Evil(str(canary))}, tmp_path / "evil.pt")
    for name in ("evil.bin", "evil.pt"):
        with pytest.raises(CorruptInput, match="never runs code from a checkpoint"):
            gradfix.open_checkpoint(tmp_path / name)
    assert not canary.exists()


def test_sparse_and_foreign_entries_are_refused(tmp_path):
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CorruptInput, match="sparse or quantised"):
        gradfix.open_checkpoint(tmp_path / "sparse.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CorruptInput, match="no state dict; found list"):
        gradfix.open_checkpoint(tmp_path / "list.pt")
    with pytest.raises(CorruptInput, match="entry 'x' is int, not a tensor"):
        gradfix.open_checkpoint({"x": 3})


def test_missing_paths_and_empty_folders_say_what_to_give(tmp_path):
    with pytest.raises(CorruptInput, match="does not exist: give a folder, a weights file or a hub id"):
        gradfix.open_checkpoint(tmp_path / "nothing" / "here" / "at-all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptInput, match="holds no weights"):
        gradfix.open_checkpoint(tmp_path / "empty")
    (tmp_path / "x.txt").write_text("hi")
    with pytest.raises(CorruptInput, match="unknown kind of weights file"):
        gradfix.open_checkpoint(tmp_path / "x.txt")
    with pytest.raises(CorruptInput, match="the hub did not deliver it"):
        gradfix.open_checkpoint("nobody/no-such-model")


def test_an_adapter_needs_its_base(tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="is a LoRA adapter: it needs the base"):
        gradfix.open_checkpoint(tmp_path / "lora")
