"""Checkpoints that do not go together and outputs that are in the way: named, and nothing is written."""

from __future__ import annotations

import pytest
import torch

import gradfix
from gradfix.errors import CorruptInput, GradfixError, IncompatibleCheckpoints, OutputError, UnsafeResult, UsageError
from gradfix.vectors.signvotes import SignVotes
from trio import draw_state, draw_votes, make_trio, read_folder, save_folder


@pytest.fixture
def trio(tmp_path):
    return make_trio(tmp_path)


def _fails(trio, tmp_path, error: type[GradfixError], match: str, code: int, **changes) -> None:
    arguments = {**trio, "votes": draw_votes(2), "out": tmp_path / "out", **changes}
    present = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(error, match=match) as caught:
        gradfix.transport_checkpoint(**arguments)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    left = [p for p in tmp_path.rglob("*") if p not in present and not p.name.endswith(".lock")]
    assert left == []


def test_tuned_equal_to_base_is_refused(trio, tmp_path):
    _fails(trio, tmp_path, UnsafeResult, "the task vector is zero", 6, tuned=trio["base"])
    with pytest.raises(UnsafeResult, match="the task vector is zero"):
        gradfix.TaskVector.between(trio["base"], trio["base"])


def test_missing_tensor_is_refused(trio, tmp_path):
    state = draw_state(3)
    del state["norm.weight"]
    odd = save_folder(tmp_path / "odd", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "lacks 1 tensors of its base .* 'norm.weight'", 4, tuned=odd)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "lacks 1 tensors .* not the same architecture", 4, target=odd)


def test_other_shapes_are_refused(trio, tmp_path):
    state = {**draw_state(3), "layers.0.weight": torch.zeros(300, 71)}
    odd = save_folder(tmp_path / "odd", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, r"'layers.0.weight' is \[300, 70\] .* \[300, 71\]", 4, target=odd)
    rows = save_folder(tmp_path / "rows", {**draw_state(3), "layers.0.weight": torch.zeros(310, 70)})
    _fails(trio, tmp_path, IncompatibleCheckpoints, "the vocabularies differ", 4, target=rows)


@pytest.mark.parametrize("role", ["base", "tuned", "target"])
def test_nan_in_an_input_names_tensor_and_file(trio, tmp_path, role):
    state = read_folder(trio[role])
    state["layers.0.bias"][7] = float("nan")
    odd = save_folder(tmp_path / "odd", state)
    _fails(trio, tmp_path, CorruptInput, "tensor 'layers.0.bias' of .*odd holds NaN or Inf", 3, **{role: odd})


@pytest.mark.parametrize("inside", ["", "sub", "a/b"])
def test_output_inside_an_input_is_refused(trio, tmp_path, inside):
    _fails(trio, tmp_path, OutputError, "inputs are never modified", 8, out=trio["target"] / inside)


def test_output_reached_through_a_link_is_refused(trio, tmp_path):
    (tmp_path / "link").symlink_to(trio["base"])
    _fails(trio, tmp_path, OutputError, "inputs are never modified", 8, out=tmp_path / "link" / "out")


def test_non_empty_output_needs_overwrite_and_is_swapped_whole(trio, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    _fails(trio, tmp_path, OutputError, "--overwrite", 8)
    assert (out / "precious.txt").read_text() == "mine"
    gradfix.transport_checkpoint(**trio, votes=draw_votes(2), out=out, overwrite=True)
    assert not (out / "precious.txt").exists()
    gradfix.verify(out)


def test_votes_of_another_target_are_refused(trio, tmp_path):
    probe = {"layers.0.bias": draw_state(1)["layers.0.bias"][:8].double().tolist()}
    right = SignVotes(dict(draw_votes(2)), 5, probe=probe)
    right.save(tmp_path / "votes.safetensors")
    gradfix.transport_checkpoint(**trio, votes=tmp_path / "votes.safetensors", out=tmp_path / "good")
    wrong = SignVotes(dict(draw_votes(2)), 5, probe={"layers.0.bias": [9.0] * 8})
    _fails(trio, tmp_path, IncompatibleCheckpoints, "taken on other weights", 4, votes=wrong)
    hashed = SignVotes(dict(draw_votes(2)), 5, target_hash="files:0000")
    _fails(trio, tmp_path, IncompatibleCheckpoints, "taken on other weights", 4, votes=hashed)


def test_not_descended_is_refused_unless_forced(trio, tmp_path):
    stranger = save_folder(tmp_path / "stranger", draw_state(77))
    _fails(trio, tmp_path, IncompatibleCheckpoints, "of its norm: not a fine-tune", 4, tuned=stranger)
    gradfix.transport_checkpoint(**{**trio, "tuned": stranger}, votes=draw_votes(2), out=tmp_path / "out", force=True)


def test_an_update_lost_in_rounding_is_refused(tmp_path):
    base = {"w": torch.full((64,), 256.0, dtype=torch.bfloat16)}
    tuned = {"w": torch.full((64,), 256.0, dtype=torch.float32) + 1e-3}
    folders = {
        "base": save_folder(tmp_path / "base", {"w": base["w"].float()}),
        "tuned": save_folder(tmp_path / "tuned", tuned),
        "target": save_folder(tmp_path / "target", base),
    }
    votes = SignVotes({"w": torch.ones(64, dtype=torch.int8)}, 1)
    _fails(
        folders, tmp_path, UnsafeResult, "rounding .* absorbs the whole update; use --out-dtype fp32", 6, votes=votes
    )
    report = gradfix.transport_checkpoint(**folders, votes=votes, out=tmp_path / "out", dtype="fp32")
    assert report.survived == 1.0


def test_all_dropped_is_refused(trio, tmp_path):
    tau = gradfix.TaskVector.between(trio["base"], trio["tuned"])
    against = SignVotes({n: (-t.sign()).to(torch.int8) for n, t in tau.items()}, 1)
    _fails(trio, tmp_path, UnsafeResult, "the mask keeps 0.00%", 6, votes=against)


def test_a_head_only_the_fine_tune_has_follows_the_policy(trio, tmp_path):
    state = {**read_folder(trio["tuned"]), "head.weight": torch.ones(2, 3)}
    headed = save_folder(tmp_path / "headed", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "--head copy .* or --head skip", 4, tuned=headed)
    given = {**trio, "tuned": headed, "votes": draw_votes(2)}
    gradfix.transport_checkpoint(**given, out=tmp_path / "copy", head="copy")
    gradfix.transport_checkpoint(**given, out=tmp_path / "skip", head="skip")
    assert torch.equal(read_folder(tmp_path / "copy")["head.weight"], torch.ones(2, 3))
    assert "head.weight" not in read_folder(tmp_path / "skip")
    assert gradfix.verify(tmp_path / "skip")["counts"]["skipped"] == 1


def test_quantised_weights_are_refused_by_name(trio, tmp_path):
    state = {**read_folder(trio["target"]), "layers.0.weight": torch.zeros(300, 70, dtype=torch.int8)}
    odd = save_folder(tmp_path / "odd", state)
    _fails(trio, tmp_path, IncompatibleCheckpoints, "'layers.0.weight' .* quantised", 4, target=odd)


def test_masks_that_need_votes_say_so(trio, tmp_path):
    _fails(trio, tmp_path, UsageError, "needs votes: make them with `gradfix vote`", 2, votes=None)
    _fails(trio, tmp_path, UsageError, "need a seed", 2, mask="random")
