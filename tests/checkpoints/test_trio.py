"""The trio: every tensor of target and fine-tune has one fate, with a kind and a reason."""

from __future__ import annotations

import pytest
import torch

import gradfix
from gradfix.checkpoints.trio import Fate, Trio
from gradfix.errors import UsageError
from gradfix.vectors.taskvector import TaskVector

W = torch.arange(6.0).reshape(2, 3)


def states() -> tuple[dict[str, torch.Tensor], ...]:
    base = {"enc.w": W, "enc.position_ids": torch.arange(3), "lm_head.bias": torch.ones(2)}
    tuned = {"enc.w": W + 1, "enc.position_ids": torch.arange(3), "score.weight": torch.ones(4)}
    target = {"enc.w": W + 2, "enc.copy": W + 2, "enc.new": torch.ones(3), "bn.running_mean": torch.ones(2)}
    return base, tuned, target


def test_every_tensor_has_a_fate_and_a_reason() -> None:
    trio = Trio.open(*states(), head="copy")
    fates = {name: (fate.fate, fate.kind, fate.reason) for name, fate in trio.fates.items()}
    assert fates == {
        "enc.w": (Fate.TRANSPORTED, "transported", ""),
        "enc.copy": (Fate.TIED, "transported", "tied to enc.w"),
        "enc.new": (Fate.ONLY_IN_TARGET, "copied", "only in the target"),
        "bn.running_mean": (Fate.ONLY_IN_TARGET, "copied", "only in the target"),
        "score.weight": (Fate.HEAD_COPIED, "copied", "head of the fine-tune, copied from the fine-tune"),
        "enc.position_ids": (Fate.SPARE_BUFFER, "skipped", "a buffer"),
    }
    assert trio.moved == ["enc.w", "enc.copy"] and trio.tied == {"enc.copy": "enc.w"}
    assert trio.heads == ["score.weight"] and set(trio.copied) == {
        "enc.new",
        "bn.running_mean",
        "score.weight",
    }
    assert Trio.open(*states(), head="skip").fates["score.weight"].kind == "skipped"


def test_the_manifest_tells_the_fates_of_the_trio(tmp_path) -> None:
    base, tuned, target = states()
    trio = Trio.open(base, tuned, target, head="copy")
    report = gradfix.transport_checkpoint(
        base=base, tuned=tuned, target=target, out=tmp_path / "out", mask="none", head="copy", force=True
    )
    assert {name: entry["fate"] for name, entry in report.tensors.items()} == {
        name: fate.kind for name, fate in trio.fates.items()
    }
    assert report.tensors["enc.copy"]["reason"] == "tied to enc.w"


def test_the_task_vector_of_a_trio_speaks_the_targets_names() -> None:
    base = {"enc.w": W, "enc.v": W[0]}
    tuned = {"enc.w": W + 1, "enc.v": W[0] + 1}
    trio = Trio.open(base, tuned, {f"bert.{name}": tensor + 2 for name, tensor in base.items()})
    assert set(TaskVector.of(trio)) == {"bert.enc.w", "bert.enc.v"}
    assert trio.sources["base"].names() == list(base)
    assert set(trio.fingerprints()) == {"base", "tuned", "target"}


def test_an_unknown_option_is_named(tmp_path) -> None:
    base, tuned, target = states()
    with pytest.raises(UsageError, match="no option called 'overwrit'.* Did you mean 'overwrite'"):
        gradfix.transport_checkpoint(
            base=base, tuned=tuned, target=target, out=tmp_path / "out", overwrit=True
        )
