"""One algorithm for new hashes, and the old one for what was written with it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import gradfix
from gradfix.checkpoints.hashes import ContentHash, FileHash, InputHashes, OrderedHash, hash_file, holds
from gradfix.checkpoints.identity import is_target, target_fingerprint
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.weights import Renamed
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.vectors.signvotes import SignVotes

SHAPES = {"a": (20, 30), "b": (7,), "c": (11, 3)}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def roles(tmp_path: Path) -> dict[str, Path]:
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    states = {
        "base": base,
        "tuned": {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in base.items()},
        "target": {n: torch.randn(t.shape, generator=draw) for n, t in base.items()},
    }
    for role, state in states.items():
        (tmp_path / role).mkdir()
        save_file(state, tmp_path / role / "model.safetensors", {"format": "pt"})
    return {role: tmp_path / role for role in states}


def votes_of(target_hash: str) -> SignVotes:
    draw = torch.Generator().manual_seed(1)
    signs = {n: torch.randint(-3, 4, s, generator=draw).to(torch.int8) for n, s in SHAPES.items()}
    return SignVotes(signs, 3, target_hash=target_hash)


@given(parts=st.lists(st.binary(max_size=50), max_size=8))
def test_a_hash_of_parts_is_the_hash_of_the_whole(parts: list[bytes]) -> None:
    content, older = ContentHash(), ContentHash("sha256")
    for part in parts:
        content.update(part)
        older.update(part)
    assert content.text() == "blake3:" + blake3(b"".join(parts)).hexdigest()
    assert older.text() == hashlib.sha256(b"".join(parts)).hexdigest()


def test_files_are_held_to_the_algorithm_they_were_recorded_with(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(700_001))
    assert hash_file(path) == "blake3:" + blake3(path.read_bytes()).hexdigest()
    recorded = (hash_file(path), sha256(path))
    assert all(holds(path, known) for known in recorded)
    path.write_bytes(b"else")
    assert not any(holds(path, known) for known in recorded)
    with pytest.raises(CorruptInput, match="hashed with 'md6', which this gradfix does not know"):
        holds(path, "md6:00")


def test_ranges_out_of_order_cost_a_second_reading_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    hashed = FileHash(path)
    hashed.update(50, bytes(range(50, 100)))
    hashed.update(0, bytes(range(50)))
    assert hashed.text() == hash_file(path)


@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_parts_from_several_threads_are_hashed_in_the_file_s_order(
    data: st.DataObject, sizes: list[int]
) -> None:
    """In any order, some of them twice; hashes of beginnings are those of the bytes."""
    whole = bytes(range(sum(sizes)))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [(end - size, whole[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    hashed = OrderedHash(ends)
    for part in data.draw(st.permutations([*parts, *data.draw(st.lists(st.sampled_from(parts)))])):
        hashed.update(*part)
    for end in ends:
        assert hashed.text(end) == "blake3:" + blake3(whole[:end]).hexdigest()


def test_every_view_of_a_file_is_hashed_while_it_is_read(roles, monkeypatch) -> None:
    whole = open_checkpoint(roles["base"])
    names = whole.names()
    for view in (whole, Renamed(whole, {n: n for n in names}), Renamed(whole, {f"x.{n}": n for n in names})):
        hashes = InputHashes([view])
        pieces = {name: list(hashes.chunks(view, name, 17)) for name in view.names()}
        assert all(torch.equal(torch.cat(p), view.read(n).reshape(-1)) for n, p in pieces.items())
        with monkeypatch.context() as patch:
            patch.setattr("gradfix.checkpoints.hashes.hash_file", None)  # a second reading would fail
            found = hashes.of(view)
        assert found == {"model.safetensors": hash_file(roles["base"] / "model.safetensors")}


def test_folders_of_older_versions_still_verify(roles, tmp_path) -> None:
    out = tmp_path / "out"
    gradfix.transport_checkpoint(**roles, mask="none", out=out)
    manifest = json.loads((out / "gradfix.json").read_text())
    assert all(value.startswith("blake3:") for value in manifest["outputs"].values())
    manifest["outputs"] = {file: sha256(out / file) for file in manifest["outputs"]}
    (out / "gradfix.json").write_text(json.dumps(manifest))
    gradfix.verify(out)
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    with pytest.raises(CorruptInput, match=r"model.safetensors has changed"):
        gradfix.verify(out)


def test_votes_of_older_versions_are_still_tied_to_their_target(roles, tmp_path) -> None:
    older = "files:" + sha256(roles["target"] / "model.safetensors")[:32]
    target = open_checkpoint(roles["target"])
    assert is_target(older, target) and is_target(target_fingerprint(target), target)
    votes_of(older).save(tmp_path / "votes.safetensors")
    gradfix.transport_checkpoint(**roles, votes=tmp_path / "votes.safetensors", out=tmp_path / "out")
    assert gradfix.verify(tmp_path / "out")["votes"]["target_hash"] == older
    other = "files:" + sha256(roles["base"] / "model.safetensors")[:32]
    with pytest.raises(IncompatibleCheckpoints, match="other weights"):
        gradfix.transport_checkpoint(**roles, votes=votes_of(other), out=tmp_path / "other")


def test_older_and_newer_votes_meet_where_the_target_is_known(roles, tmp_path) -> None:
    newer = target_fingerprint(open_checkpoint(roles["target"]))
    right, wrong = ("files:" + sha256(roles[role] / "model.safetensors")[:32] for role in ("target", "base"))

    def merge(first: str, second: str, out: str) -> None:
        vectors = [Vector(roles["base"], roles["tuned"], votes_of(name)) for name in (first, second)]
        merge_checkpoints(
            target=roles["target"],
            vectors=vectors,
            method="mean",
            order="merge_then_mask",
            out=tmp_path / out,
        )

    merge(right, newer, "mixed")
    merge(newer, newer, "new")
    assert load(tmp_path / "mixed") == load(tmp_path / "new")
    for first, second in ((wrong, newer), (newer, wrong), (wrong, right)):
        with pytest.raises(IncompatibleCheckpoints, match="other weights|different weights"):
            merge(first, second, "refused")
    with pytest.raises(IncompatibleCheckpoints, match="of an older gradfix"):
        votes_of(right) + votes_of(newer)
    with pytest.raises(IncompatibleCheckpoints, match="different weights"):
        votes_of(right) + votes_of(wrong)
    assert (votes_of(newer) + votes_of(newer)).target_hash == newer


def load(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
