"""The algebra of task vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

import gradfix
from gradfix.errors import IncompatibleCheckpoints

seeds = st.integers(0, 10_000)


def _vector(seed: int) -> gradfix.TaskVector:
    g = torch.Generator().manual_seed(seed)
    return gradfix.TaskVector({"a": torch.randn(3, 2, generator=g).double(), "b": torch.randn(4, generator=g).double()})


def _equal(left, right) -> bool:
    return set(left) == set(right) and all(torch.allclose(left[n], right[n], atol=1e-12) for n in left)


@given(seeds, seeds, seeds)
def test_vector_space(x, y, z):
    a, b, c = _vector(x), _vector(y), _vector(z)
    assert _equal(a + b, b + a)
    assert _equal((a + b) + c, a + (b + c))
    assert _equal(a - a, 0 * a)
    assert _equal(2.5 * (a + b), 2.5 * a + 2.5 * b)
    opposite = -a
    assert _equal(-opposite, a)
    assert a.dot(b) == pytest.approx(b.dot(a))
    assert a.norm() ** 2 == pytest.approx(a.dot(a))
    assert (3 * a).cosine(a) == pytest.approx(1)


def test_values_are_not_shared_with_the_operands():
    a = _vector(0)
    b = a + a
    assert b["a"] is not a["a"]
    with pytest.raises(TypeError):
        a["a"] = torch.zeros(1)


def test_no_key_is_dropped_in_silence():
    a = _vector(0)
    with pytest.raises(IncompatibleCheckpoints, match="differ in 1 tensor names, first 'b'"):
        a + gradfix.TaskVector({"a": a["a"]})
    with pytest.raises(IncompatibleCheckpoints, match=r"'b' is \(4,\) in one vector and \(5,\)"):
        a + gradfix.TaskVector({"a": a["a"], "b": torch.zeros(5)})


def test_between_takes_paths_states_and_modules(tmp_path):
    base, tuned = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_file(dict(base.state_dict()), tmp_path / "base.safetensors")
    torch.save({"state_dict": tuned.state_dict()}, tmp_path / "tuned.pt")
    expected = {n: (p - dict(base.named_parameters())[n]).detach() for n, p in tuned.named_parameters()}
    for left in (base, base.state_dict(), tmp_path / "base.safetensors"):
        for right in (tuned, tuned.state_dict(), tmp_path / "tuned.pt"):
            assert _equal(gradfix.TaskVector.between(left, right), expected)


def test_low_precision_checkpoints_give_float32_vectors():
    base = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    tuned = {"w": torch.tensor([1.0078125], dtype=torch.bfloat16)}
    tau = gradfix.TaskVector.between(base, tuned)
    assert tau["w"].dtype is torch.float32
    assert float(tau["w"]) == 0.0078125


def test_save_and_load(tmp_path):
    a = _vector(3)
    a.save(tmp_path / "tau.safetensors")
    assert _equal(gradfix.TaskVector.load(tmp_path / "tau.safetensors"), a)


def test_notebook_view_escapes_names():
    vector = gradfix.TaskVector({"<script>alert(1)</script>": torch.ones(2)})
    assert "<script>" not in vector._repr_html_()
    assert "&lt;script&gt;" in vector._repr_html_()
