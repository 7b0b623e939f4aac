"""The trio: every tensor of target and fine-tune has one fate, with a kind and a reason."""

from __future__ import annotations

import pytest
import torch

import gradfix
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Fate, Trio
from gradfix.errors import IncompatibleCheckpoints, UsageError
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
    assert trio.heads == ["score.weight"] and set(trio.copied) == {"enc.new", "bn.running_mean", "score.weight"}
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
        gradfix.transport_checkpoint(base=base, tuned=tuned, target=target, out=tmp_path / "out", overwrit=True)


def with_heads(base: int, tuned: int, target: int | None) -> tuple[dict[str, torch.Tensor], ...]:
    rows = (base, tuned, target)
    bodies = [{"enc.w": W + step} for step in range(3)]
    return tuple(b if n is None else {**b, "classifier.weight": torch.ones(n, 3)} for b, n in zip(bodies, rows))


@pytest.mark.parametrize("rows", [(5, 2, 5), (2, 2, 5), (5, 2, 2), (2, 2, None)])
def test_a_head_of_other_classes_follows_the_policy_for_heads(rows, tmp_path) -> None:
    states = with_heads(*rows)
    with pytest.raises(IncompatibleCheckpoints, match="classifier.weight.*--head copy"):
        Trio.open(*states)
    trio = Trio.open(*states, head="copy")
    assert trio.moved == ["enc.w"] and trio.heads == ["classifier.weight"]
    assert set(TaskVector.of(trio)) == {"enc.w"}
    base, tuned, target = states
    gradfix.transport_checkpoint(
        base=base, tuned=tuned, target=target, out=tmp_path / "out", mask="none", head="copy", force=True
    )
    written = open_checkpoint(tmp_path / "out")
    assert torch.equal(written.read("classifier.weight"), tuned["classifier.weight"])
    assert Trio.open(*states, head="skip").fates["classifier.weight"].fate is Fate.HEAD_SKIPPED


def test_a_table_of_another_vocabulary_is_no_head() -> None:
    states = [{"enc.w": W + n, "lm_head.weight": torch.ones(4 + n, 3)} for n in range(3)]
    with pytest.raises(IncompatibleCheckpoints, match="vocabularies differ"):
        Trio.open(*states, head="copy")


def test_what_lies_outside_the_class_body_is_a_head(tmp_path) -> None:
    """DistilBERT's language head has names of its own; the config says which class it is."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, hidden_dim=8)
    for role, kind in (("base", DistilBertForMaskedLM), ("tuned", DistilBertForSequenceClassification)):
        kind(config).save_pretrained(tmp_path / role)
    trio = Trio.open(tmp_path / "base", tmp_path / "tuned", tmp_path / "base", head="copy")
    assert trio.fates["vocab_transform.weight"].fate is Fate.DROPPED_HEAD
    assert trio.fates["pre_classifier.weight"].fate is Fate.HEAD_COPIED
