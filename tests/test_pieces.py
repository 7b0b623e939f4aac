"""Pieces and the threads that work on them."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, strategies as st

from gradfix.stream.pieces import all_finite, differing, nonzeros, recut
from gradfix.system.processor import PieceWorkers, ahead, one_thread


@given(sizes=st.lists(st.integers(0, 9), max_size=12), size=st.integers(1, 7))
def test_recut_keeps_every_entry_in_order(sizes: list[int], size: int) -> None:
    whole = torch.arange(sum(sizes))
    pieces = list(recut(whole.split(sizes) if sizes else [], size))
    assert torch.equal(torch.cat(pieces) if pieces else whole, whole)
    assert all(len(piece) == size for piece in pieces[:-1]) and all(0 < len(p) <= size for p in pieces[-1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_and_checks(dtype: torch.dtype) -> None:
    piece = torch.tensor([0.0, -0.0, 1.0, -2.0], dtype=dtype)
    assert nonzeros(piece) == 2 and all_finite(piece)
    huge = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(huge)  # its sum is not
    for bad in ("nan", "inf", "-inf"):
        assert not all_finite(torch.cat([piece, torch.tensor([float(bad)], dtype=dtype)]))
    assert not all_finite(torch.tensor([float("inf"), float("-inf")], dtype=dtype))


@given(data=st.data(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_entries_differ_as_numbers_do(data: st.DataObject, dtype: torch.dtype) -> None:
    """Zeros of either sign are equal, numbers of either sign are not."""
    values = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-7, 3.0]), min_size=7, max_size=7)
    left, right = (torch.tensor(data.draw(values), dtype=dtype) for _ in range(2))
    assert differing(left, right) == int((left != right).sum())
    assert nonzeros(left) == int((left != 0).sum())


def test_ahead_is_an_ordered_map_that_runs_little_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(50):
            taken.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        return number * number

    with PieceWorkers() as pool:
        results = ahead(pool, slow, items())
        assert next(results) == 0 and len(taken) < 10
        assert list(results) == [number * number for number in range(1, 50)]


def test_a_failing_piece_fails_the_map() -> None:
    with PieceWorkers() as pool, pytest.raises(ZeroDivisionError):
        list(ahead(pool, lambda number: 1 // number, [2, 1, 0]))


def test_one_thread_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
