"""Retrievers moved end to end: from texts alone, with labels, with pairs; the index that is kept; what is refused."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gradfix
from gradfix.cli import run
from gradfix.commands.setting import used_note
from gradfix.data import load_data
from gradfix.methods.results import Results
from gradfix.tasks.embedding import EmbeddingBound, EmbeddingTask
from gradfix.tasks.scoring import evaluate
from gradfix.training import relations
from gradfix.training.oldindex import agreement, keep_index, linear, orthogonal
from gradfix.training.relations import Relations, divergences, gone_on, rotation, sharpness
from tests.stage import setup
from tests.tasks.test_sentences import flags, sentence_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrievers")
    setup("retrieval", folder)
    return folder


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def short_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where learning is not the question."""
    monkeypatch.setattr(relations, "Relating", partial(relations.Relating, steps=20))


def transport(*words: object, code: int = 0) -> None:
    trio = ("--base", "minilm", "--tuned", "minilm-support", "--task", "embedding")
    words = (*trio, *(() if "--target" in words else ("--target", "new-base")), *words)
    assert run(["transport", *map(str, words), "--quiet"]) == code, words


def opened(folder: str | Path, **options: Any) -> EmbeddingBound:
    return EmbeddingTask({}, **options).open(folder)


def score(folder: str) -> float:
    run(
        ["evaluate", "--model", folder, "--data", "questions", "--task", "embedding", "--json", "score.json", "--quiet"]
    )
    return float(json.loads(Path("score.json").read_text())["accuracy"])


def test_texts_alone_move_it_and_the_old_index_is_searched(here: Path) -> None:
    transport("--data", "questions", "--shots", 0, "--unlabelled", "texts.jsonl", "--keep-index", "--out", "alone",
              "--json", "alone.json", "--report", "alone.html")  # fmt: skip
    result = json.loads(Path("alone.json").read_text())
    assert score("alone") == pytest.approx(result["test_after"]["accuracy"], abs=1e-3)
    gain = score("minilm-support") - score("new-base")
    assert score("alone") - score("new-base") > 0.5 * gain
    assert result["measure"] == "nDCG@10" and {"recall@10", "MRR"} <= set(result["test_after"])
    kept = result["keep_index"]
    assert kept["kept"] > 0.8 and kept["recall_old"] == pytest.approx(kept["kept"] * kept["recall_own"])
    card, page = Path("alone/README.md").read_text(), Path("alone.html").read_text()
    assert "test nDCG@10" in card and "keep-index" in card and "MRR" in page and "recall@10" in page
    assert "(KL divergence)" in page and "(KL divergence) (%)" not in page
    assert 'library_name: "sentence-transformers"\npipeline_tag: sentence-similarity\n' in card
    assert run(["verify", "alone", "--quiet"]) == 0


def test_the_map_is_the_module(here: Path) -> None:
    if not Path("alone").is_dir():
        transport("--unlabelled", "texts.jsonl", "--keep-index", "--out", "alone")
    matrix = load_file("alone/keep_index.safetensors")["map"]
    assert torch.equal(load_file("alone/keep_index/model.safetensors")["linear.weight"], matrix)
    config = json.loads(Path("alone/keep_index/config.json").read_text())
    assert matrix.shape == (config["out_features"], config["in_features"]) and config["bias"] is False
    models = pytest.importorskip("sentence_transformers.models")
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer("alone")
    texts = ["where is my card", "send money"]
    plain = torch.as_tensor(model.encode(texts))
    bound = opened("alone")
    found = bound.vectors(bound.model, [("text", text) for text in texts])
    torch.testing.assert_close(torch.nn.functional.normalize(plain, dim=-1), found.detach(), rtol=0, atol=1e-5)
    model.append(models.Dense.load("alone/keep_index"))
    torch.testing.assert_close(torch.as_tensor(model.encode(texts)), plain @ matrix.T, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("short_relations")
def test_what_the_new_base_says_of_itself_stays(here: Path) -> None:
    target = sentence_folder(here / "e5-like", {**flags("cls"), "include_prompt": True})
    about = {"prompts": {"query": "query: ", "passage": "passage: "}}
    (target / "config_sentence_transformers.json").write_text(json.dumps(about))
    (target / "2_Normalize").mkdir(exist_ok=True)
    transport("--unlabelled", "texts.jsonl", "--target", "e5-like", "--out", "e5-moved")
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (here / "e5-moved" / name).read_bytes() == (target / name).read_bytes()
    own = opened("e5-moved").encoder.own
    assert own.pooling == "cls" and own.prompt_for("query") == "query: " and own.prompt_for("text") == "passage: "


def test_labels_are_learned_from(here: Path) -> None:
    dataset = load_data("questions")
    bound, teacher = opened("new-base"), opened("minilm-support")
    tau = gradfix.TaskVector.between("minilm", "minilm-support").subset(bound.trainable())
    few = dataset.splits["train"][:20]
    found = gradfix.best(bound, tau, few, teacher=teacher)
    loss = bound.loss(bound.model, bound.collate(few)).mean().item()
    gradfix.apply(bound.model, found.update)
    assert bound.loss(bound.model, bound.collate(few)).mean().item() < 0.7 * loss
    assert found.start == "plain" or found.verdict == "taught"


@pytest.mark.usefixtures("short_relations")
def test_pairs_are_taken_as_well(here: Path) -> None:
    transport("--data", "pairs.jsonl", "--shots", 8, "--unlabelled", "texts.jsonl", "--out", "paired", "--force")


def test_another_width_and_depth_is_no_hindrance(here: Path) -> None:
    from transformers import BertConfig, BertModel

    shutil.copytree("new-base", "wider", dirs_exist_ok=True)
    config = BertConfig.from_pretrained("new-base")
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 40, 3, 64
    torch.manual_seed(5)
    BertModel(config).save_pretrained("wider")
    transport("--data", "questions", "--shots", 0, "--unlabelled", "texts.jsonl", "--target", "wider", "--keep-index",
              "--out", "wide", "--json", "wide.json")  # fmt: skip
    result = json.loads(Path("wide.json").read_text())
    assert result["test_after"]["accuracy"] > result["test_before"]["accuracy"] + 5
    assert load_file("wide/keep_index.safetensors")["map"].shape == (32, 40)


@pytest.mark.usefixtures("short_relations")
def test_an_adapter_comes_out_without_labels(here: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModel

    transport("--data", "questions", "--shots", 0, "--unlabelled", "texts.jsonl", "--out-lora", 4, "--out", "lora",
              "--json", "lora.json")  # fmt: skip
    bound, said = opened("new-base"), json.loads(Path("lora.json").read_text())
    test = load_data("questions").splits["test"]
    bound.model = PeftModel.from_pretrained(AutoModel.from_pretrained("new-base"), "lora").eval()
    found = evaluate(bound.model, bound, bound.scoring_batches(test))
    assert found["accuracy"] == pytest.approx(said["test_after"]["accuracy"], abs=1e-3)
    assert found["accuracy"] > said["test_before"]["accuracy"]
    bound.model = AutoModel.from_pretrained("lora").eval()  # by the base that the adapter names
    assert evaluate(bound.model, bound, bound.scoring_batches(test))["accuracy"] == pytest.approx(found["accuracy"])
    library = pytest.importorskip("sentence_transformers")
    texts = [("text", "where is my card"), ("text", "send money")]
    vectors = torch.as_tensor(library.SentenceTransformer("lora").encode([text for _, text in texts]))
    expected = bound.vectors(bound.model, texts).detach()
    torch.testing.assert_close(torch.nn.functional.normalize(vectors, dim=-1), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("short_relations")
def test_without_labels_the_old_models_neighbours_choose(here: Path) -> None:
    words = ["compare", "--base", "minilm", "--tuned", "minilm-support", "--target", "new-base", "--task", "embedding",
             "--data", "questions", "--shots", "0", "--unlabelled", "texts.jsonl", "--methods", "naive", "bico", "best",
             "--json", "none.json", "--quiet"]  # fmt: skip
    assert run(words) == 0
    results = json.loads(Path("none.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert {row["regime"] for row in rows.values()} == {"answers"} and "naive" not in rows
    assert rows["best"]["validation_accuracy"] > rows["bico"]["validation_accuracy"] > 0
    bound, teacher = opened("new-base"), opened("minilm-support")
    texts = list(dict.fromkeys(json.loads(line)["text"] for line in Path("texts.jsonl").read_text().splitlines()))
    near = [(v := b.vectors(b.model, [("text", t) for t in texts]).detach()) @ v.T for b in (teacher, bound)]
    top = [(n - 9 * torch.eye(len(texts))).topk(10).indices.tolist() for n in near]
    gain = [1 / math.log2(place + 2) for place in range(10)]
    mine = [sum(g for g, i in zip(gain, ours) if i in theirs) / sum(gain) for theirs, ours in zip(*top)]
    assert rows["zero_shot"]["validation_accuracy"] == pytest.approx(100 * sum(mine) / len(mine), abs=1e-3)


def test_masks_vote_by_contrast_and_compare_speaks_of_searches(here: Path) -> None:
    transport("--data", "questions", "--shots", 3, "--mask", "agree", "--alpha", 1, "--out", "masked", "--force")
    words = ["compare", "--base", "minilm", "--tuned", "minilm-support", "--target", "new-base", "--task", "embedding",
             "--data", "questions", "--shots", "3", "--methods", "naive", "gradfix", "--json", "c.json",
             "--report", "c.html", "--quiet"]  # fmt: skip
    assert run(words) == 0
    results = json.loads(Path("c.json").read_text())
    assert "nDCG@10" in results["verdict"]["text"] and results["rows"][0]["measures"].keys() == {"recall@10", "MRR"}
    table = Results.load("c.json").table()
    assert table[0][2:5] == ["nDCG@10", "recall@10", "MRR"]
    assert "| nDCG@10 | recall@10 | MRR |" in Path("c.md").read_text()


@pytest.mark.parametrize(
    ("rows", "message"),
    [([{"text": "only one"}], "there is only one text"), ([{"text": "the same"}] * 30, "30 times the same text")],
)
def test_texts_without_neighbours_get_a_line(
    rows: list[dict[str, str]], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    transport("--unlabelled", "odd.jsonl", "--out", "never", code=5)
    assert message in capsys.readouterr().err and not Path("never").exists()


def test_too_few_texts_for_a_map_are_refused_before_the_lessons(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradfix.methods.trained.best", lambda *_, **__: pytest.fail("the lessons began"))
    Path("three.jsonl").write_text("".join(json.dumps({"text": f"card {i}"}) + "\n" for i in range(3)))
    transport("--unlabelled", "three.jsonl", "--keep-index", "--out", "never", code=5)
    assert "there are 3: give 20 or more" in capsys.readouterr().err and not Path("never").exists()


def test_a_pair_of_one_text_is_refused_where_it_is_learned_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("pairs.jsonl").read_text().splitlines()[:6]
    Path("own.jsonl").write_text("\n".join([*lines, json.dumps({"query": "a card", "positive": "a card"})]))
    transport("--data", "own.jsonl", "--shots", 7, "--unlabelled", "texts.jsonl", "--out", "never", code=5)
    said = capsys.readouterr().err
    assert "own.jsonl:7" in said and "the same text word for word" in said


def test_notes_speak_of_labels_where_there_are_some(here: Path) -> None:
    texts, pairs = (load_data(name, bare=True).splits["train"] for name in ("texts.jsonl", "pairs.jsonl"))
    assert used_note(0, texts, False) == []
    assert used_note(8, pairs, False) == [f"using 8 of {len(pairs)} labelled examples; --shots K takes K of them"]
    labelled = load_data("questions").splits["train"]
    assert used_note(3, labelled, True) == [
        f"using 3 of {len(labelled)} labelled examples; --shots K takes K per class"
    ]


def test_what_only_retrievers_have_is_refused_elsewhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transport", "--base", "minilm", "--tuned", "minilm-support", "--target", "new-base", "--out", "never"]
    assert run([*words, "--task", "zero-shot", "--data", "questions", "--keep-index"]) == 2
    assert "--keep-index is for --task embedding" in capsys.readouterr().err
    assert run([*words, "--task", "zero-shot", "--unlabelled", "texts.jsonl"]) == 2
    assert "--data is missing" in capsys.readouterr().err


def test_divergences_are_those_of_the_definition() -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.nn.functional.normalize(torch.randn(9, width, dtype=torch.double, generator=draw), dim=-1)
        for width in (5, 3)
    )
    rows = torch.tensor([4, 0, 7])
    for row, value in zip(rows.tolist(), divergences(student, teacher, rows, 0.1, 2.0), strict=True):
        others = [i for i in range(9) if i != row]
        wanted = torch.softmax(teacher[others] @ teacher[row] / 0.1, 0)
        found = torch.softmax(2 * student[others] @ student[row] / 0.1, 0)
        assert value.item() == pytest.approx((wanted * (wanted / found).log()).sum().item(), abs=1e-12)
    assert sharpness(teacher, teacher, 0.1) == (1.0, pytest.approx(0.0, abs=1e-12))


def test_the_teachers_vectors_go_on_the_way_the_fine_tune_took(here: Path) -> None:
    base, tuned = opened("minilm"), opened("minilm-support")
    texts = [("plain", "where is my card"), ("plain", "the transfer did not arrive"), ("plain", "a new phone")]
    before, after = (bound.vectors(bound.model, texts) for bound in (base, tuned))
    weights = dict(base.model.named_parameters())
    old: Any = SimpleNamespace(tau={name: p.detach() - weights[name] for name, p in tuned.model.named_parameters()})
    lesson = Relations({}, tuned.encoder.read(texts), after, torch.zeros(0, 0, dtype=torch.bool))
    found = gone_on(lesson, tuned, old, 0.5).vectors
    torch.testing.assert_close(found, torch.nn.functional.normalize(1.5 * after - 0.5 * before, dim=-1))
    torch.testing.assert_close(tuned.vectors(tuned.model, texts), after, rtol=0, atol=0)


def test_a_rotation_is_found_and_kept() -> None:
    draw = torch.Generator().manual_seed(0)
    ours = torch.nn.functional.normalize(torch.randn(60, 8, dtype=torch.double, generator=draw), dim=-1)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.double, generator=draw)).Q
    theirs = ours @ turn.T
    torch.testing.assert_close(orthogonal(ours, theirs), turn, rtol=0, atol=1e-9)
    torch.testing.assert_close(linear(ours, theirs, 0.1), turn, rtol=0, atol=1e-9)
    torch.testing.assert_close(rotation(ours, theirs), turn, rtol=0, atol=1e-9)
    assert agreement(ours @ turn.T, theirs, torch.arange(60) < 12) == 1


def test_few_texts_make_no_map(here: Path) -> None:
    bound = opened("new-base")
    with pytest.raises(gradfix.errors.DataError, match="there are 3: give 20 or more"):
        keep_index(bound, bound, [{"text": f"text {i}"} for i in range(3)])
