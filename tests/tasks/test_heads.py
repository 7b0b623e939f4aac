"""Heads that are not where the config says: inside an adapter, in a bare file, lent to other shapes, or new."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix.checkpoints.folder import save_like
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, DataError, IncompatibleCheckpoints, UsageError
from gradfix.tasks import TASKS
from tests.tiny import IMAGE_LABELS, VOCAB, save_tiny, save_tokenizer, toy_images, toy_texts

THREE = {str(index): "" for index in range(3)}
ROWS = [{**row, "label": str(index % 3)} for index, row in enumerate(toy_texts(9))]
OTHERS = ("cat", "dog", "hen", "cow")


def adapter(folder: Path, base: Path, classes: int = 3, **settings: Any) -> Any:
    """What peft saves of a sequence classifier, with numbers in it that no initialisation gives."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes)
    options = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings}
    wrapped = get_peft_model(model, LoraConfig(r=2, **options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def masked_lm(folder: Path) -> Path:
    """A base without a pooler."""
    from transformers import BertConfig, BertForMaskedLM

    config = json.loads((save_tiny("bert", folder) / "config.json").read_text())
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**{k: v for k, v in config.items() if k != "architectures"})).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(bound: Any) -> torch.Tensor:
    return bound.logits(bound.model, bound.collate(ROWS))


def test_an_adapter_is_scored_with_the_head_inside_it(tmp_path: Path) -> None:
    """Three classes in the adapter, two in the config of its base."""
    base = save_tiny("bert", tmp_path / "base")
    model = adapter(tmp_path / "tuned", base)
    bound = TASKS["classification"](THREE).open(tmp_path / "tuned")
    batch = bound.collate(ROWS)
    shown = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        expected = model(**shown).logits
    assert torch.allclose(logits_of(bound), expected, atol=1e-5)


def test_an_adapter_lends_its_head(tmp_path: Path) -> None:
    base, target = (save_tiny("bert", tmp_path / "base"), save_tiny("bert", tmp_path / "target", seed=5))
    model = adapter(tmp_path / "tuned", base)
    bound = TASKS["classification"](THREE).open(target, head_from=tmp_path / "tuned", base=base)
    weights = dict(bound.model.named_parameters())
    head = model.base_model.model.classifier.modules_to_save["default"]
    assert torch.equal(weights["classifier.weight"], head.weight)
    assert not any(name.startswith("classifier") for name in bound.trainable())


def test_an_adapter_whose_base_is_gone_takes_the_one_given(tmp_path: Path) -> None:
    base = save_tiny("bert", tmp_path / "base")
    adapter(tmp_path / "tuned", base)
    before = logits_of(TASKS["classification"](THREE).open(tmp_path / "tuned"))
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptInput, match="Give the base too"):
        TASKS["classification"](THREE).open(tmp_path / "tuned")
    bound = TASKS["classification"](THREE).open(tmp_path / "tuned", base=tmp_path / "elsewhere")
    assert torch.equal(logits_of(bound), before)


def test_names_beside_an_adapter_are_read_and_nameless_classes_say_what_to_do(tmp_path: Path) -> None:
    base = save_tiny("bert", tmp_path / "base")
    adapter(tmp_path / "tuned", base)
    named = {"bad": "", "fair": "", "good": ""}
    with pytest.raises(DataError, match=r"no names.*numbers.*id2label"):
        TASKS["classification"](named).open(tmp_path / "tuned")
    names = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(names))
    assert TASKS["classification"](named).open(tmp_path / "tuned").labels == list(named)


def test_names_beside_an_adapter_of_two_classes_are_read_as_well(tmp_path: Path) -> None:
    """A base says nothing of classes, and two are what its config then has by default."""
    base, target = save_tiny("bert", tmp_path / "base"), save_tiny("bert", tmp_path / "target", seed=5)
    named = {"bad": "", "good": ""}
    adapter(tmp_path / "tuned", base, classes=2)
    with pytest.raises(DataError, match=r"is no class of .*tuned.*no names.*id2label"):
        TASKS["classification"](named).open(target, head_from=tmp_path / "tuned", base=base)
    (tmp_path / "tuned" / "config.json").write_text(json.dumps({"id2label": {"0": "bad", "1": "good"}}))
    for source, lender in ((tmp_path / "tuned", None), (target, tmp_path / "tuned")):
        bound = TASKS["classification"](named).open(source, head_from=lender, base=base)
        assert bound.labels == list(named) and bound.model.config.id2label == {0: "bad", 1: "good"}


def test_a_pooler_in_modules_to_save_comes_along_and_a_lost_one_is_named(tmp_path: Path) -> None:
    base = masked_lm(tmp_path / "base")
    model = adapter(tmp_path / "kept", base, modules_to_save=["pooler", "classifier"])
    bound = TASKS["classification"](THREE).open(tmp_path / "kept")
    pooler = model.base_model.model.bert.pooler.modules_to_save["default"].dense.weight
    assert torch.equal(dict(bound.model.named_parameters())["bert.pooler.dense.weight"], pooler)
    adapter(tmp_path / "lost", base)
    for source, lender in ((tmp_path / "lost", None), (base, tmp_path / "lost")):
        with pytest.raises(IncompatibleCheckpoints, match=r"pooler.*random.*modules_to_save"):
            TASKS["classification"](THREE).open(source, head_from=lender, base=base)


def test_a_bare_file_takes_config_and_tokenizer_from_its_base(tmp_path: Path) -> None:
    base, tuned = (save_tiny("bert", tmp_path / "base"), save_tiny("bert_classifier", tmp_path / "tuned", seed=1))
    labels, numbers = {"negative": "", "positive": ""}, {"0": "", "1": ""}
    rows = toy_texts(6)
    whole = TASKS["classification"](labels).open(tuned)
    torch.save(whole.model.state_dict(), tmp_path / "tuned.pt")
    with pytest.raises(UsageError, match="folder"):
        TASKS["classification"](numbers).open(tmp_path / "tuned.pt")
    bound = TASKS["classification"](numbers).open(tmp_path / "tuned.pt", base=base)
    numbered = [{**row, "label": str(list(labels).index(row["label"]))} for row in rows]
    with torch.no_grad():
        ours = bound.logits(bound.model, bound.collate(numbered))
        theirs = whole.logits(whole.model, whole.collate(rows))
    assert torch.equal(ours, theirs)


def test_a_bare_file_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    base = save_tiny("bert_classifier", tmp_path / "base")
    state = open_checkpoint(base).state()
    del state["bert.encoder.layer.0.output.dense.weight"]
    torch.save(state, tmp_path / "tuned.pt")
    with pytest.raises(CorruptInput, match="lacks 1 tensors"):
        TASKS["classification"]({"negative": "", "positive": ""}).open(tmp_path / "tuned.pt", base=base)


@pytest.mark.parametrize("prefixed", [True, False])
def test_an_adapted_pooler_that_no_file_holds_is_named(prefixed: bool, tmp_path: Path) -> None:
    base = masked_lm(tmp_path / "base")
    if not prefixed:
        from transformers import BertModel

        BertModel.from_pretrained(base, add_pooling_layer=False).save_pretrained(base)
    adapter(tmp_path / "tuned", base, target_modules="all-linear")
    with pytest.raises(IncompatibleCheckpoints, match=r"adapts the pooler.*random.*modules_to_save"):
        open_checkpoint(tmp_path / "tuned", base=base)


@pytest.mark.parametrize(("kind", "auto"), [("roberta", "text"), ("vit", "images")])
def test_bare_encoders_with_a_pooler_take_a_head(kind: str, auto: str, tmp_path: Path) -> None:
    """Their classifiers have no pooler: that of the file is left aside, not taken for another model."""
    from transformers import AutoConfig, AutoModel

    folder = tmp_path / "base"
    if auto == "images":
        config = AutoConfig.from_pretrained(save_tiny("vit", folder))
        labels, rows = dict.fromkeys(IMAGE_LABELS, ""), toy_images(3)
    else:
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = AutoConfig.for_model(kind, vocab_size=len(VOCAB), **shape)
        save_tokenizer(folder, "<s>", "</s>")
        labels, rows = {"negative": "", "positive": ""}, toy_texts(4)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    assert "pooler.dense.weight" in open_checkpoint(folder).names()
    bound = TASKS["classification"](labels, new_head=0).open(folder)
    assert bound.loss(bound.model, bound.collate(rows)).isfinite().all()
    assert any("pooler" in note for note in bound.notes)


@pytest.mark.parametrize("family", ["vit", "timm"])
@pytest.mark.parametrize("others", [OTHERS, OTHERS[:3]])
def test_a_new_head_replaces_one_of_other_classes(family: str, others: tuple[str, ...], tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base", labels=others)
    labels = dict.fromkeys(IMAGE_LABELS, "")
    with pytest.raises(DataError, match="--new-head"):
        TASKS["classification"](labels).open(base)
    first, again, other = (TASKS["classification"](labels, new_head=seed).open(base) for seed in (1, 1, 2))
    head = sorted(first.classifier.head())
    drawn = [[dict(bound.model.named_parameters())[name] for name in head] for bound in (first, again, other)]
    stored = open_checkpoint(base)
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1]))
    assert not all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[2]))
    weight = next(name for name in head if name.endswith("weight"))
    assert not torch.equal(drawn[0][head.index(weight)][:1], stored.read(weight)[:1])
    save_like(stored, first.model, tmp_path / "out", extras=first.save_extras)
    back = TASKS["classification"](labels).open(tmp_path / "out")
    rows = toy_images(6)
    with torch.no_grad():
        ours, theirs = (bound.logits(bound.model, bound.collate(rows)) for bound in (first, back))
    assert torch.equal(ours, theirs)


def test_a_head_that_has_the_classes_is_kept(tmp_path: Path) -> None:
    base = save_tiny("bert_classifier", tmp_path / "base")
    labels = {"negative": "", "positive": ""}
    own = TASKS["classification"](labels).open(base)
    kept = TASKS["classification"](labels, new_head=0).open(base)
    name = "classifier.weight"
    assert torch.equal(dict(own.model.named_parameters())[name], dict(kept.model.named_parameters())[name])
    assert any("was kept" in note for note in kept.notes)


@pytest.mark.parametrize("family", ["vit", "timm"])
def test_a_lent_head_replaces_one_of_another_size(family: str, tmp_path: Path) -> None:
    target = save_tiny(family, tmp_path / "target", labels=OTHERS)
    tuned = save_tiny(family, tmp_path / "tuned", seed=1)
    labels = dict.fromkeys(IMAGE_LABELS, "")
    bound = TASKS["classification"](labels).open(target, head_from=tuned, base=target)
    own = TASKS["classification"](labels).open(tuned)
    for name in own.classifier.head():
        assert torch.equal(dict(bound.model.named_parameters())[name], dict(own.model.named_parameters())[name])
    assert not set(own.classifier.head()) & set(bound.trainable())


def test_an_adapters_own_tokenizer_is_used(tmp_path: Path) -> None:
    base = save_tiny("bert", tmp_path / "base")
    adapter(tmp_path / "tuned", base)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "tuned" / file.name)
    config = tmp_path / "tuned" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 7}))
    assert TASKS["classification"](THREE).open(tmp_path / "tuned").classifier.max_length == 7
