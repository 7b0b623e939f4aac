"""Outputs that would replace an input: refused before anything is written, whatever kind of input it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gradfix
from gradfix.errors import OutputError
from gradfix.merging.folders import Vector, merge_checkpoints
from tests.reliability.world import hashes
from tests.trio import draw_votes, make_trio


def folder_with_votes(home: Path, kind: str) -> tuple[Path, Path]:
    """An output that exists, and votes that lie in it, under their own name or a link."""
    out = home / "run"
    out.mkdir()
    draw_votes(0).save(out / "votes.safetensors")
    return out, out / "votes.safetensors" if kind == "file" else _linked(home, out)


def _linked(home: Path, out: Path) -> Path:
    (home / "link.safetensors").symlink_to(out / "votes.safetensors")
    return home / "link.safetensors"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_votes_inside_the_output_of_a_transport(tmp_path: Path, kind: str) -> None:
    roles = make_trio(tmp_path)
    out, votes = folder_with_votes(tmp_path, kind)
    before = hashes(tmp_path)
    with pytest.raises(OutputError, match="overlaps the input .*safetensors"):
        gradfix.transport_checkpoint(**roles, votes=str(votes), out=out, overwrite=True)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_votes_inside_the_output_of_a_merge(tmp_path: Path, kind: str) -> None:
    roles = make_trio(tmp_path)
    out, votes = folder_with_votes(tmp_path, kind)
    before = hashes(tmp_path)
    with pytest.raises(OutputError, match="overlaps the input .*safetensors"):
        merge_checkpoints(
            target=roles["target"], vectors=[Vector(roles["base"], roles["tuned"], votes)], out=out,
            method="mean", order="mask_then_merge", overwrite=True,
        )  # fmt: skip
    assert hashes(tmp_path) == before


def test_votes_beside_the_output_are_no_obstacle(tmp_path: Path) -> None:
    roles = make_trio(tmp_path)
    out, votes = folder_with_votes(tmp_path, "file")
    shutil.move(votes, tmp_path / "votes.safetensors")
    gradfix.transport_checkpoint(**roles, votes=tmp_path / "votes.safetensors", out=out, overwrite=True, force=True)
    assert (out / "gradfix.json").is_file()
