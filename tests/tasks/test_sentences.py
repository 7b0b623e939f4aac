"""sentence-transformers folders: pooling, length and prompt are the folder's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradfix.errors import CorruptInput, UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.sentences import FLAGS, POOLINGS, pool, read_sentences, write_sentences
from tests.tiny import save_tiny, toy_texts

LABELS = {"negative": "a bad film", "positive": "a good film"}


def sentence_folder(
    folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize")
) -> Path:
    save_tiny("bert", folder)
    paths = ["" if kind == "Transformer" else f"{place}_{kind}" for place, kind in enumerate(modules)]
    entries = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path in filter(None, paths):
        (folder / path).mkdir()
    if "Pooling" in modules:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def flags(*on: str) -> dict[str, bool]:
    return {name: word in on for name, word in FLAGS.items()}


def heads(folder: Path, **options: Any) -> torch.Tensor:
    return TASKS["zero-shot"](LABELS, **options).open(folder, dtype=torch.float64).head


@pytest.mark.parametrize("word", POOLINGS)
def test_the_folders_pooling_is_the_default(word: str, tmp_path: Path) -> None:
    old = sentence_folder(tmp_path / "old", flags(word))
    new = sentence_folder(tmp_path / "new", {"pooling_mode": word})
    plain = save_tiny("bert", tmp_path / "plain")
    expected = heads(plain, pooling=word)
    assert torch.equal(heads(old), expected) and torch.equal(heads(new), expected)
    if word not in ("mean", "mean_sqrt_len"):  # these two differ in length alone
        assert not torch.allclose(expected, heads(plain))


def test_a_fine_tune_without_the_files_is_pooled_as_its_base(tmp_path: Path) -> None:
    base = sentence_folder(tmp_path / "base", flags("cls"))
    tuned = save_tiny("bert", tmp_path / "tuned", seed=1)
    with torch.no_grad():
        vectors = []
        for options in ({"head_from": base}, {"base": base}):
            bound = TASKS["zero-shot"](LABELS).open(tuned, **options)
            vectors.append(bound.features(bound.model, bound.collate(toy_texts(3))))
        plain = TASKS["zero-shot"](LABELS, pooling="cls").open(tuned)  # type: ignore[call-arg]
        expected = plain.features(plain.model, plain.collate(toy_texts(3)))
    assert all(torch.equal(vector, expected) for vector in vectors)


def test_poolings_do_what_their_names_say() -> None:
    hidden = torch.tensor([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    found = {word: pool(hidden, mask, word)[0].tolist() for word in POOLINGS}
    assert found["mean"] == [2, 3] and found["cls"] == [1, 4] and found["max"] == [3, 4]
    assert found["lasttoken"] == [3, 2]
    assert found["mean_sqrt_len"] == pytest.approx([4 / 2**0.5, 6 / 2**0.5])
    assert found["weightedmean"] == pytest.approx([7 / 3, 8 / 3])
    assert pool(hidden, mask, "cls+max")[0].tolist() == [1, 4, 3, 4]


def test_several_poolings_stand_one_behind_the_other(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, flags("mean", "cls"))
    assert read_sentences(folder, None).pooling == "cls+mean"
    assert heads(folder).shape[1] == 64


@pytest.mark.parametrize(
    ("pooling", "modules"),
    [
        ({"pooling_mode_attention": True}, ("Transformer", "Pooling")),
        ({"pooling_mode": "attention"}, ("Transformer", "Pooling")),
        (flags("mean"), ("Transformer", "Pooling", "LSTM")),
        ({}, ("Transformer",)),
        ({}, ("Transformer", "Pooling")),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_way_out(
    pooling: dict[str, Any], modules: tuple[str, ...], tmp_path: Path
) -> None:
    folder = sentence_folder(tmp_path, pooling, modules)
    with pytest.raises(UsageError, match="Give --pooling"):
        heads(folder)
    assert heads(folder, pooling="cls").shape == (2, 32)


def dense_folder(folder: Path, modules: tuple[str, ...], **config: Any) -> Path:
    """A model with a dense layer of width 5 in its third place."""
    made = sentence_folder(folder, flags("mean"), modules)
    place = made / f"{modules.index('Dense')}_Dense"
    torch.manual_seed(3)
    save_file({"linear.weight": torch.randn(5, 32), "linear.bias": torch.randn(5)}, place / "model.safetensors")
    about = {
        "in_features": 32,
        "out_features": 5,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (place / "config.json").write_text(json.dumps({**about, **config}))
    return made


@pytest.mark.parametrize("before", [(), ("Normalize",)])
def test_a_dense_layer_is_followed_in_its_place(before: tuple[str, ...], tmp_path: Path) -> None:
    folder = dense_folder(
        tmp_path / "dense", ("Transformer", "Pooling", *before, "Dense", "Normalize"),
        activation_function="torch.nn.modules.activation.Tanh",
    )  # fmt: skip
    pooled = heads(save_tiny("bert", tmp_path / "plain"))
    bound = TASKS["zero-shot"](LABELS).open(folder, dtype=torch.float64)
    (_, weight, bias) = bound.encoder.behind[-1]  # type: ignore[attr-defined]
    plain: Any = TASKS["zero-shot"](LABELS, pooling="mean").open(folder, dtype=torch.float64)  # type: ignore[call-arg]
    with torch.no_grad():
        raw = plain.encoder.embed_prompts(list(LABELS.values()))
        raw = torch.nn.functional.normalize(raw, dim=-1) if before else raw
        expected = torch.nn.functional.normalize(torch.tanh(raw @ weight.double().T + bias.double()), dim=-1)
    torch.testing.assert_close(bound.head, expected)  # type: ignore[attr-defined]
    torch.testing.assert_close(plain.head, pooled)


@pytest.mark.parametrize(
    "config", [{"activation_function": "torch.nn.Softplus"}, {"module_input_name": "token_embeddings"}]
)
def test_a_dense_layer_of_another_kind_is_refused_with_a_way_out(config: dict[str, str], tmp_path: Path) -> None:
    folder = dense_folder(tmp_path, ("Transformer", "Pooling", "Dense"), **config)
    with pytest.raises(UsageError, match="Give --pooling"):
        heads(folder)
    assert heads(folder, pooling="cls").shape == (2, 32)


def test_a_pooling_that_was_asked_for_is_what_the_output_says(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path, ("Transformer", "Pooling", "Dense", "Normalize"))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    own = read_sentences(folder, "cls")
    before = (folder / "modules.json").read_bytes()
    write_sentences(folder, own, 32, 9)
    assert (folder / "modules.json").read_bytes() == before
    write_sentences(folder, own, 32, 9, "cls")
    found = read_sentences(folder, None)
    assert (found.pooling, found.behind, found.max_length) == ("cls", (), 5)
    kinds = [one["type"].rsplit(".", 1)[-1] for one in json.loads((folder / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"] and not (folder / "2_Dense").exists()


def test_damaged_modules_are_named(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, flags("mean"))
    (folder / "modules.json").write_text("[1]")
    with pytest.raises(CorruptInput, match=r"modules\.json"):
        heads(folder)


def test_length_and_case_are_the_folders(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, flags("mean"))
    about = {"max_seq_length": 5, "do_lower_case": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(about))
    bound = TASKS["zero-shot"](LABELS).open(folder)
    rows = [{"text": "GOOD good good good good good", "label": "positive"}]
    batch = bound.collate(rows)
    assert batch["input_ids"].shape[1] == 5
    assert torch.equal(batch["input_ids"], bound.collate([{**rows[0], "text": "good " * 6}])["input_ids"])
    longer = TASKS["zero-shot"](LABELS, max_length=7).open(folder)  # type: ignore[call-arg]
    assert longer.collate(rows)["input_ids"].shape[1] == 7


def test_a_default_prompt_stands_before_every_text_and_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    plain = save_tiny("bert", tmp_path / "plain")
    rows = toy_texts(3)
    vectors = {}
    for name, include in (("counted", True), ("hidden", False)):
        folder = sentence_folder(tmp_path / name, {**flags("mean"), "include_prompt": include})
        prompts = {"prompts": {"query": "the film of "}, "default_prompt_name": "query"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        bound = TASKS["zero-shot"](LABELS).open(folder, dtype=torch.float64)
        with torch.no_grad():
            vectors[name] = bound.features(bound.model, bound.collate(rows))
    bare: Any = TASKS["zero-shot"](LABELS).open(plain, dtype=torch.float64)
    asked = [{**row, "text": f"the film of {row['text']}"} for row in rows]
    batch = bare.collate(asked)
    with torch.no_grad():
        assert torch.equal(vectors["counted"], bare.features(bare.model, batch))
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        hidden = bare.model(**inputs).last_hidden_state
    mask = batch["attention_mask"].clone()
    mask[:, :4] = 0  # [CLS] the film of
    assert torch.equal(vectors["hidden"], pool(hidden, mask, "mean"))
