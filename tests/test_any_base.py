"""From any base to any base: other depths, widths, vocabularies and architectures, by the same command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import gradfix
from gradfix.align.correspondence import Correspondence
from gradfix.checkpoints.trio import Trio
from gradfix.commands.configs import InspectConfig, TransportConfig
from gradfix.commands.inspect import run_inspect
from gradfix.commands.merge import run_merge
from gradfix.commands.transport import run_transport
from gradfix.data import load_data
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging.recipes import MergeRecipe, load_recipe
from gradfix.methods.comparison import compare
from gradfix.methods.results import Results
from gradfix.report import to_markdown, write_report
from gradfix.tasks.classification import Classification
from gradfix.tasks.scoring import evaluate
from gradfix.tasks.zero_shot import ZeroShot
from gradfix.training.finetuning import finetune
from tests.tiny import _BERT, TEXT_LABELS, save_tiny, save_tokenizer, toy_texts, write_rows

LABELS = {label: label for label in TEXT_LABELS}


def encoder(folder: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    hf.BertModel(hf.BertConfig(**{**_BERT, **changes})).save_pretrained(folder)
    save_tokenizer(folder, "[CLS]", "[SEP]")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("any-base")
    encoder(home / "base", 0)
    encoder(home / "same", 1)
    encoder(home / "deeper", 2, num_hidden_layers=4)
    encoder(home / "wider", 3, hidden_size=48, intermediate_size=64)
    torch.manual_seed(4)
    modern = hf.ModernBertConfig(
        vocab_size=_BERT["vocab_size"], hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    hf.ModernBertModel(modern).save_pretrained(home / "modern")
    save_tokenizer(home / "modern", "[CLS]", "[SEP]")
    for split, count, seed in (("train", 60, 1), ("test", 40, 3)):
        write_rows(home / "data", split, toy_texts(count, seed))
    write_rows(home, "more", [{"text": row["text"]} for row in toy_texts(60, 9)])
    bound = ZeroShot(LABELS).open(home / "base")
    finetune(bound, toy_texts(60, 1), steps=40, batch_size=16, lr=3e-3)
    hf.utils.logging.disable_progress_bar()
    bound.model.save_pretrained(home / "tuned")
    bound.save_extras(home / "tuned")
    save_tokenizer(home / "tuned", "[CLS]", "[SEP]")
    return home


def asked(world: Path, target: str, out: Path, **options: Any) -> TransportConfig:
    given = {"shots": 2, "task": "zero-shot", "check": False, "force": True, "device": "cpu", **options}
    return TransportConfig(
        base=str(world / "base"), tuned=str(world / "tuned"), target=str(world / target), data=str(world / "data"),
        out=str(out), **given,
    )  # fmt: skip


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("method", ["best", "bico", "theseus", "bico_veto"])
@pytest.mark.parametrize("target", ["same", "deeper", "wider", "modern"])
def test_one_command_reaches_every_shape(world: Path, tmp_path: Path, target: str, method: str) -> None:
    result = run_transport(asked(world, target, tmp_path / "out", method=method))
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    assert len(manifest["details"]["correspondence"]["hash"]) == 64
    assert ("another_shape" in manifest["details"]) == (target != "same")
    model = hf.AutoModel.from_pretrained(tmp_path / "out")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert result.test_after is not None
    if method == "best":
        assert manifest["details"]["start"] in ("none", "plain", "coordinates")
        assert "coordinates" in manifest["details"]["starts"]


@pytest.mark.parametrize("method", ["naive", "gradfix", "transfusion"])
def test_methods_that_add_weight_to_weight_refuse_by_name(world: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(IncompatibleCheckpoints, match=rf"{method} adds .* 4 layers instead of 2 .*--method best"):
        run_transport(asked(world, "deeper", tmp_path / "out", method=method))
    assert not (tmp_path / "out").exists()


def test_more_layers_are_never_taken_in_silence(world: Path) -> None:
    with pytest.raises(IncompatibleCheckpoints, match="4 layers instead of 2"):
        Trio.open(world / "base", world / "tuned", world / "deeper")
    assert "4 layers" in str(Trio.open(world / "base", world / "tuned", world / "deeper", across=True).apart)
    assert Trio.open(world / "base", world / "tuned", world / "same", across=True).apart is None


@pytest.mark.usefixtures("short_lessons")
def test_compare_leaves_out_what_needs_matching_weights(world: Path) -> None:
    results = compare(
        base=world / "base", tuned=world / "tuned", target=world / "wider", data=world / "data", task="zero-shot",
        methods=["naive", "few_shot", "bico", "best"], shots=[2], validation="none", finetune=False,
    )  # fmt: skip
    assert {row["method"] for row in results.rows} == {"zero_shot", "few_shot", "bico", "best"}
    assert any("naive was left out" in note and "--method best" in note for note in results.notes)


def test_inspect_says_what_answers_to_what(world: Path, tmp_path: Path) -> None:
    found = run_inspect(InspectConfig(checkpoints=tuple(str(world / n) for n in ("base", "tuned", "deeper"))))
    assert "layers (target <- base): 0 <- 0, 1 <- 0, 2 <- 1, 3 <- 1" in found.correspondence["says"]
    assert any("what answers to what" in title for title, _, _ in found.tables(False))
    assert any("another shape" in note for note in found.notes)
    (tmp_path / "what.json").write_text(json.dumps(found.as_json()))
    assert Correspondence.load(tmp_path / "what.json").hash == found.correspondence["hash"]


@pytest.mark.usefixtures("short_lessons")
def test_the_teacher_alone_needs_no_labels(world: Path, tmp_path: Path) -> None:
    more = str(world / "more.jsonl")
    result = run_transport(asked(world, "deeper", tmp_path / "out", method="best", shots=0, unlabelled=more))
    assert result.fewshot_loss_before is None
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(UsageError, match="--shots 0 is for --method best"):
        run_transport(asked(world, "deeper", tmp_path / "two", method="best", shots=0))
    with pytest.raises(UsageError, match="--shots 0 is for --method best"):
        run_transport(asked(world, "deeper", tmp_path / "two", method="few_shot", shots=0))


@pytest.mark.usefixtures("short_lessons")
def test_a_turned_vector_needs_no_labels_either(world: Path, tmp_path: Path) -> None:
    more = str(world / "more.jsonl")
    results = [
        run_transport(asked(world, "deeper", tmp_path / f"out{shots}", method="bico", shots=shots, unlabelled=more))
        for shots in (0, 2)
    ]
    assert [result.regime for result in results] == ["recipe", "recipe"]
    assert results[0].alpha > 0


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize(("target", "shots"), [("deeper", 2), ("wider", 0), ("modern", 2)])
def test_an_adapter_comes_out_across_shapes(world: Path, tmp_path: Path, target: str, shots: int) -> None:
    from peft import PeftModel

    more = str(world / "more.jsonl")
    result = run_transport(
        asked(world, target, tmp_path / "out", method="best", out_lora=8, shots=shots, unlabelled=more)
    )
    bound = ZeroShot(LABELS).open(world / target)
    bound.model = PeftModel.from_pretrained(hf.AutoModel.from_pretrained(world / target), tmp_path / "out").eval()
    found = evaluate(bound.model, bound, bound.scoring_batches(load_data(world / "data").splits["test"]))
    assert result.test_before is not None and result.test_after is not None
    assert found["accuracy"] == pytest.approx(result.test_after["accuracy"]) != result.test_before["accuracy"]
    assert found["loss"] == pytest.approx(result.test_after["loss"], rel=1e-4)


def test_tiny_family_is_still_one_shape(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "tuned", "target")):
        save_tiny("llama", tmp_path / name, seed)
    assert Trio.open(tmp_path / "base", tmp_path / "tuned", tmp_path / "target").apart is None


def test_an_adapter_goes_in_across_shapes(world: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    bound = ZeroShot(LABELS).open(world / "base")
    tuned = get_peft_model(bound.model, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"]))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    for batch in bound.batches(toy_texts(480, 1), 16):
        bound.loss(tuned.base_model.model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(tmp_path / "adapter")
    config = asked(world, "wider", tmp_path / "out", method="best", unlabelled=str(world / "more.jsonl"))
    result = run_transport(replace(config, tuned=str(tmp_path / "adapter"), seed=1))
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    assert "coordinates" in manifest["details"]["starts"]
    moved = ZeroShot(LABELS).open(tmp_path / "out", head_from=world / "wider")
    found = evaluate(moved.model, moved, moved.scoring_batches(load_data(world / "data").splits["test"]))
    assert result.test_before is not None and result.test_after is not None
    assert found["accuracy"] == pytest.approx(result.test_after["accuracy"])
    assert found["accuracy"] >= result.test_before["accuracy"] + 20


@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("order", ["plain", "mask_then_merge"])
def test_vectors_of_other_shapes_are_merged_onto_one_target(world: Path, tmp_path: Path, order: str) -> None:
    bound = ZeroShot(LABELS).open(world / "wider")
    finetune(bound, toy_texts(60, 1), steps=10, batch_size=16, lr=3e-3)
    bound.model.save_pretrained(tmp_path / "wide-tuned")
    own = {"base": str(world / "wider"), "tuned": str(tmp_path / "wide-tuned"), "data": str(world / "data")}
    other = {"base": str(world / "base"), "tuned": str(world / "tuned"), "data": str(world / "data")}
    recipe = {
        "target": str(world / "wider"),
        "vectors": [own, other],
        "method": "mean",
        "task": "zero-shot",
        "shots": 2,
    }
    recipe |= {"alpha": 0.5, "order": order, "device": "cpu", "out": str(tmp_path / "out")}
    (tmp_path / "merge.yml").write_text(json.dumps(recipe))
    result = run_merge(load_recipe(tmp_path / "merge.yml"))
    manifest = gradfix.verify(tmp_path / "out")
    (across,) = manifest["details"]["across"]
    assert across["coordinates"] == "bico" and len(across["correspondence"]["hash"]) == 64
    assert any("rewritten by bico" in note for note in manifest["notes"]) and result.tasks
    model = hf.AutoModel.from_pretrained(tmp_path / "out")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    del other["data"]
    with pytest.raises(IncompatibleCheckpoints, match="another shape .* Give this vector `data`"):
        run_merge(MergeRecipe(**{**recipe, "vectors": (own, other), "order": None}), overwrite=True)


@pytest.fixture(scope="module")
def classifier(world: Path) -> Path:
    """A fine-tune with a head that its bare base does not have."""
    bound = Classification(LABELS, new_head=0).open(world / "base")
    finetune(bound, toy_texts(60, 1), steps=40, batch_size=16, lr=3e-3)
    bound.model.save_pretrained(world / "classifier")
    bound.save_extras(world / "classifier")
    save_tokenizer(world / "classifier", "[CLS]", "[SEP]")
    return world / "classifier"


def headed(world: Path, classifier: Path, target: str, out: Path, **options: Any) -> TransportConfig:
    config = asked(world, target, out, task="classification", head="copy", max_length=24, **options)
    return replace(config, tuned=str(classifier))


def right(folder: Path) -> float:
    model, read = (kind.from_pretrained(folder) for kind in (hf.AutoModelForSequenceClassification, hf.AutoTokenizer))
    rows = toy_texts(40, 3)
    with torch.no_grad():
        found = model(**read([row["text"] for row in rows], return_tensors="pt", padding=True)).logits.argmax(-1)
    return 2.5 * sum(model.config.id2label[int(i)] == row["label"] for i, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("target", ["deeper", "wider", "modern"])
def test_a_head_that_fits_is_copied_and_another_is_made_and_taught(
    world: Path, classifier: Path, tmp_path: Path, target: str
) -> None:
    result = run_transport(headed(world, classifier, target, tmp_path / "out", method="best"))
    assert result.test_after is not None and result.test_after["accuracy"] == right(tmp_path / "out") > 90
    fates = json.loads((tmp_path / "out" / "gradfix.json").read_text())["tensors"]
    fits = target == "deeper"
    assert any("A new head is put on" in note for note in result.notes) != fits
    assert ("copied from the fine-tune" in fates["classifier.weight"]["reason"]) == fits
    assert ("a new head" in fates["classifier.weight"]["reason"]) != fits


@pytest.mark.usefixtures("short_lessons")
def test_a_targets_own_head_stays_where_the_tuned_one_does_not_fit(
    world: Path, classifier: Path, tmp_path: Path
) -> None:
    bound = Classification(LABELS, new_head=5).open(world / "wider")
    bound.model.save_pretrained(tmp_path / "own")
    save_tokenizer(tmp_path / "own", "[CLS]", "[SEP]")
    config = replace(headed(world, classifier, "wider", tmp_path / "out", method="best"), target=str(tmp_path / "own"))
    result = run_transport(config)
    assert any("the target's own stays" in note for note in result.notes)
    assert result.test_after is not None and result.test_after["accuracy"] == right(tmp_path / "out")


@pytest.mark.usefixtures("short_lessons")
def test_a_new_head_goes_into_an_adapter_and_into_a_comparison(world: Path, classifier: Path, tmp_path: Path) -> None:
    run_transport(headed(world, classifier, "wider", tmp_path / "out", method="best", out_lora=4))
    assert "classifier" in json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"]
    results = compare(
        base=world / "base", tuned=classifier, target=world / "wider", data=world / "data", task="classification",
        head="copy", methods=["zero_shot"], shots=[2], validation="none", finetune=False,
        task_options={"max_length": 24},
    )  # fmt: skip
    assert any("A new head is put on" in note for note in results.notes)


def test_without_a_word_about_the_head_nothing_is_moved(world: Path, classifier: Path, tmp_path: Path) -> None:
    config = replace(headed(world, classifier, "wider", tmp_path / "out", method="best"), head="error")
    with pytest.raises(IncompatibleCheckpoints, match="Choose --head copy"):
        run_transport(config)


def compared(world: Path, **options: Any) -> Results:
    return compare(**{
        "base": world / "base", "tuned": world / "tuned", "target": world / "same", "data": world / "data",
        "task": "zero-shot", "shots": [0], "unlabelled": str(world / "more.jsonl"), "finetune": False,
        "methods": ["naive", "gradfix", "bico", "best"], "task_options": {"max_length": 24}, **options,
    })  # fmt: skip


def test_no_labels_leave_the_methods_that_need_none(world: Path, tmp_path: Path) -> None:
    results = compared(world)
    assert [row["method"] for row in results.rows] == ["zero_shot", "bico", "best"]
    assert any("without labels naive, gradfix cannot run" in note for note in results.notes)
    rows = {row["method"]: row for row in results.rows}
    assert {row["regime"] for row in results.rows} == {"answers"} and {row["samples"] for row in results.rows} == {0}
    assert rows["best"]["accuracy"] > rows["zero_shot"]["accuracy"]
    assert rows["best"]["validation_accuracy"] > rows["zero_shot"]["validation_accuracy"]
    assert results.verdict["method"] == "best"
    assert "the old fine-tune's answers to the unlabelled inputs" in results.verdict["text"]
    results.save(tmp_path / "found.json")
    assert "0 labelled examples per class" in to_markdown(Results.load(tmp_path / "found.json"))
    assert "chosen by the old fine-tune" in write_report(results, tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("short_lessons")
def test_what_was_compared_without_labels_is_what_ships(world: Path, tmp_path: Path) -> None:
    more = str(world / "more.jsonl")
    config = asked(world, "same", tmp_path / "out", method="best", shots=0, unlabelled=more, max_length=24)
    result, (row,) = run_transport(config), [r for r in compared(world).rows if r["method"] == "best"]
    assert result.test_after is not None and result.test_after["loss"] == pytest.approx(row["test_loss"], rel=1e-5)


@pytest.mark.usefixtures("short_lessons")
def test_budgets_with_and_without_labels_stand_side_by_side(world: Path) -> None:
    results = compared(world, shots=[0, 2], methods=["one_step", "bico"], target=world / "wider")
    found = [(row["shots"], row["method"], row["regime"]) for row in results.rows]
    assert found == [
        (0, "zero_shot", "answers"), (0, "bico", "answers"),
        (2, "zero_shot", "few_shot"), (2, "one_step", "few_shot"), (2, "bico", "few_shot"),
    ]  # fmt: skip
    assert results.verdict["shots"] == 2


def test_no_labels_want_inputs_to_ask_about(world: Path) -> None:
    with pytest.raises(UsageError, match="0 examples per class need unlabelled inputs"):
        compared(world, unlabelled=None)
