"""Classes are matched by name, heads may be lent, and the family's own loader agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradfix.checkpoints.folder import save_like
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, DataError, IncompatibleCheckpoints, UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import evaluate
from gradfix.training.finetuning import finetune
from tiny import IMAGE_LABELS, TEXT_LABELS, save_tiny, toy_images, toy_texts

TEXT = {label: label for label in TEXT_LABELS}
IMAGES = {label: label for label in IMAGE_LABELS}
FAMILIES = [("bert_classifier", TEXT), ("vit", IMAGES), ("timm", IMAGES)]


def rows_of(labels: dict[str, str], count: int = 6) -> list[dict[str, object]]:
    return toy_images(count) if labels is IMAGES else toy_texts(count)


@pytest.mark.parametrize(("family", "labels"), FAMILIES)
def test_the_order_of_the_datas_labels_does_not_matter(
    family: str, labels: dict[str, str], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    rows = rows_of(labels)
    names = list(labels)
    one = TASKS["classification"](labels).open(folder, dtype=torch.float64)
    other = TASKS["classification"](dict(reversed(labels.items()))).open(folder, dtype=torch.float64)
    with torch.no_grad():
        left, right = one.collate(rows), other.collate(rows)
        torch.testing.assert_close(
            one.loss(one.model, left), other.loss(other.model, right), rtol=0, atol=1e-12
        )
        said = [names[i] for i in one.predict(one.model, left)]
        assert said == [names[::-1][i] for i in other.predict(other.model, right)]


def test_transformers_and_timm_agree_about_the_logits(tmp_path: Path) -> None:
    import timm
    from transformers import (
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    text = save_tiny("bert_classifier", tmp_path / "bert")
    bound = TASKS["classification"](TEXT).open(text)
    model = AutoModelForSequenceClassification.from_pretrained(text).eval()
    tokens = AutoTokenizer.from_pretrained(text)("a good film", return_tensors="pt")
    with torch.no_grad():
        mine = bound.logits(bound.model, bound.collate([{"text": "a good film", "label": "positive"}]))
        torch.testing.assert_close(mine, model(**tokens).logits)
    rows = toy_images(2)
    vit = save_tiny("vit", tmp_path / "vit")
    bound = TASKS["classification"](IMAGES).open(vit)
    batch = bound.collate(rows)
    model = AutoModelForImageClassification.from_pretrained(vit).eval()
    with torch.no_grad():
        torch.testing.assert_close(bound.logits(bound.model, batch), model(batch["pixel_values"]).logits)
    folder = save_tiny("timm", tmp_path / "timm")
    bound = TASKS["classification"](IMAGES).open(folder)
    batch = bound.collate(rows)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(bound.logits(bound.model, batch), model(batch["pixel_values"]))


def test_pairs_of_texts_are_tokenised_as_pairs(tmp_path: Path) -> None:
    bound = TASKS["classification"](TEXT).open(save_tiny("bert_classifier", tmp_path))
    batch = bound.collate([{"text": "a good film", "text_pair": "bad", "label": "negative"}])
    assert (batch["input_ids"] == 5).sum() == 2  # two separators


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("bert_classifier", tmp_path / "named")
    with pytest.raises(DataError, match=r"'Positive' is no class .*Did you mean 'positive'"):
        TASKS["classification"]({"Positive": "", "negative": ""}).open(folder)
    bare = save_tiny("bert_classifier", tmp_path / "bare", labels=["LABEL_0", "LABEL_1"])
    assert TASKS["classification"]({"1": "", "0": ""}).open(bare).labels == ["1", "0"]
    with pytest.raises(DataError, match="'negative' is no class"):
        TASKS["classification"](TEXT).open(bare)
    with pytest.raises(UsageError, match="at least two labels"):
        TASKS["classification"]({"a": "a"})


def test_a_subset_of_the_classes_is_scored_among_itself(tmp_path: Path) -> None:
    bound = TASKS["classification"]({"blue": "", "red": ""}).open(save_tiny("vit", tmp_path))
    rows = [row for row in toy_images(6) if row["label"] != "green"]
    assert bound.logits(bound.model, bound.collate(rows)).shape == (4, 2)


def test_a_frozen_head_neither_votes_nor_learns(tmp_path: Path) -> None:
    for family, labels in FAMILIES:
        folder = save_tiny(family, tmp_path / family)
        free = TASKS["classification"](labels).open(folder)
        bound = TASKS["classification"](labels, freeze_head=True).open(folder)
        head = set(free.trainable()) - set(bound.trainable())
        assert head and all(name.split(".")[0] in ("classifier", "head") for name in head)
        before = {name: p.detach().clone() for name, p in bound.model.named_parameters()}
        finetune(bound, rows_of(labels, 12), steps=2, batch_size=6, lr=1e-2)
        after = dict(bound.model.named_parameters())
        assert {name for name in before if torch.equal(before[name], after[name])} >= head
        assert not all(torch.equal(before[name], after[name]) for name in bound.trainable())


def test_a_bare_encoder_asks_for_a_head_and_takes_a_lent_one(tmp_path: Path) -> None:
    bare, tuned = (
        save_tiny("bert", tmp_path / "bare"),
        save_tiny("bert_classifier", tmp_path / "tuned", seed=1),
    )
    with pytest.raises(IncompatibleCheckpoints, match=r"no classification head.*--head copy.*new_head"):
        TASKS["classification"](TEXT).open(bare)
    with pytest.raises(IncompatibleCheckpoints, match="neither"):
        TASKS["classification"](TEXT).open(bare, head_from=bare)
    bound = TASKS["classification"](TEXT).open(bare, head_from=tuned)
    own = TASKS["classification"](TEXT).open(tuned)
    weights, theirs = dict(bound.model.named_parameters()), dict(own.model.named_parameters())
    assert torch.equal(weights["classifier.weight"], theirs["classifier.weight"])
    assert not torch.equal(weights["bert.embeddings.word_embeddings.weight"],
                           theirs["bert.embeddings.word_embeddings.weight"])  # fmt: skip
    assert not any(name.startswith("classifier") for name in bound.trainable())
    assert "the head is that of" in bound.notes[-1]
    assert TASKS["classification"](TEXT).open(tuned, head_from=bare).trainable() == own.trainable()


def test_a_new_head_comes_from_its_seed_and_is_saved_with_its_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    bare = save_tiny("bert", tmp_path / "bare")
    labels = {"good": "", "fair": "", "bad": ""}
    one, two, three = (TASKS["classification"](labels, new_head=seed).open(bare) for seed in (1, 1, 2))
    heads = [dict(bound.model.named_parameters())["classifier.weight"] for bound in (one, two, three)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape[0] == 3
    save_like(open_checkpoint(bare), one.model, tmp_path / "out", extras=one.save_extras)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert list(model.config.id2label.values()) == list(labels)
    assert TASKS["classification"](labels).open(tmp_path / "out").trainable() == one.trainable()


@pytest.mark.parametrize(("family", "labels"), FAMILIES)
def test_what_is_saved_scores_the_same_when_opened_again(
    family: str, labels: dict[str, str], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "base")
    task = TASKS["classification"](labels)
    bound = task.open(folder)
    finetune(bound, rows_of(labels, 12), steps=3, batch_size=6, lr=1e-3)
    save_like(open_checkpoint(folder), bound.model, tmp_path / "out", extras=bound.save_extras)
    again = task.open(tmp_path / "out")
    held = rows_of(labels, 9)
    assert evaluate(again.model, again, again.batches(held)) == evaluate(
        bound.model, bound, bound.batches(held)
    )


def test_timm_reads_what_was_saved(tmp_path: Path) -> None:
    import timm

    folder = save_tiny("timm", tmp_path / "base")
    bound = TASKS["classification"](IMAGES).open(folder)
    finetune(bound, toy_images(12), steps=2, batch_size=6, lr=1e-3)
    save_like(open_checkpoint(folder), bound.model, tmp_path / "out", extras=bound.save_extras)
    theirs = dict(timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in bound.model.named_parameters())


def test_a_timm_model_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("timm", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architecture": "vit_of_nobody"}))
    with pytest.raises(CorruptInput, match=r"timm cannot build this model .*vit_of_nobody"):
        TASKS["classification"](IMAGES).open(folder)


def test_a_decoder_classifies_its_last_real_token(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from tiny import _llama_shape, save_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        **_llama_shape(), id2label=dict(enumerate(TEXT)), label2id={"negative": 0, "positive": 1}
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "<s>")
    bound = TASKS["classification"](TEXT).open(tmp_path, dtype=torch.float64)
    rows = [{"text": "good", "label": "positive"}, {"text": "a much longer bad film", "label": "negative"}]
    together = bound.loss(bound.model, bound.collate(rows))
    alone = torch.cat([bound.loss(bound.model, bound.collate([row])) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
