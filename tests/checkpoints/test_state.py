"""Intermediate state: every damaged byte is noticed before a run goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradfix.checkpoints.interrupted import State, save_state
from gradfix.errors import CorruptInput

TENSORS = {
    "a": torch.arange(6, dtype=torch.int16).view(2, 3),
    "b": torch.tensor([0.5, -0.0, float("nan")]),
    "c": torch.zeros(0, 4, dtype=torch.bfloat16),
    "d": torch.tensor(3, dtype=torch.int64),
}
ABOUT = {"format": "test", "key": "k", "done": "7"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_state(tmp_path / "state", TENSORS, ABOUT)
    return tmp_path / "state"


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {
        name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist() if t.numel() else [])
        for name, t in tensors.items()
    }


def test_it_comes_back_as_it_was(path: Path) -> None:
    state = State(path)
    assert state.about == ABOUT
    assert as_bytes(dict(state.items())) == as_bytes(TENSORS)


def test_no_damage_goes_unseen(path: Path) -> None:
    """Each byte in turn: refused, or (a blank in the header) nothing has changed."""
    whole, seen = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            state = State(path)
            found = dict(state.items())
        except CorruptInput:
            seen += 1
        else:
            assert (state.about, as_bytes(found)) == (ABOUT, as_bytes(TENSORS))
    assert seen > 0.9 * len(whole)


@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_half_a_file_is_refused(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptInput, match="is damaged. Delete it and run the same command again"):
        dict(State(path).items())
