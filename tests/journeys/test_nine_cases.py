"""Nine things that went wrong for people with ordinary checkpoints, each as a test of what must happen instead."""

from __future__ import annotations

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.commands import COMMANDS, Journey, Outcome, transport, typed
from tests.journeys.encoders import CONFIGS, pretrained, tune_encoder
from tests.journeys.kinds import load_all, save_pair
from tests.journeys.scorers import is_adapter, loaded, text_classes, text_encoder, tokenizer_of
from tests.journeys.toys import PROMPTS, SIZES, splits
from tests.journeys.walking import POINTS, built, walk
from tests.tiny import save_tokenizer, write_rows

pytestmark = pytest.mark.usefixtures("short_lessons")


def journey_of(name: str, stable: Path, outputs: Path) -> Journey:
    return Journey(load_all()[name], built(name, stable), outputs)


def loud(outcome: Outcome, pattern: str) -> bool:
    """Refused, or done with a note that says so; the words must be there in either case."""
    return bool(re.search(pattern, outcome.printed, re.I))


def sources(out: Path) -> dict[str, str]:
    return {name: (out / name).read_text(encoding="utf-8") for name in ("gradfix.json", "README.md")}


@pytest.mark.parametrize("kind", ["bert-bare", "bert-mlm", "roberta-mlm", "llama-classifier"])
def test_case_1_an_adapter_written_with_a_copied_head_is_complete(kind: str, stable: Path, tmp_path: Path) -> None:
    journey = journey_of(kind, stable, tmp_path)
    outcome = COMMANDS["out-lora"](journey)
    assert outcome.code == 0 and outcome.out is not None, outcome.message
    config = json.loads((outcome.out / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["task_type"] == "SEQ_CLS"
    head = "score" if kind == "llama-classifier" else "classifier"
    assert head in (config["modules_to_save"] or ())
    tokenizer_of(outcome.out)
    assert text_classes(outcome.out, journey.home / "data") == pytest.approx(
        outcome.report["test_after"]["accuracy"], abs=POINTS
    )


@pytest.mark.parametrize("kind", ["lora-bert-qv", "lora-bert-all", "lora-llama-classifier", "lora-lost-base"])
def test_case_2_an_adapter_with_its_head_inside_moves(kind: str, stable: Path, tmp_path: Path) -> None:
    found = walk(kind, "naive", stable, tmp_path)
    assert found.state == "works", found.why


def test_case_2_a_lost_pooler_is_named(stable: Path, tmp_path: Path) -> None:
    found = walk("lora-bert-lost-pooler", "naive", stable, tmp_path)
    assert found.state == "refused" and "pooler" in found.why, found


@pytest.mark.parametrize("method", ["best", "few_shot", "one_step"])
def test_case_3_training_methods_take_a_pooler_only_the_fine_tune_has(
    method: str, stable: Path, tmp_path: Path
) -> None:
    journey = journey_of("bert-no-pooler", stable, tmp_path)
    outcome = transport("--method", method)(journey)
    assert outcome.code == 0 and outcome.out is not None, outcome.message
    assert journey.score(outcome.out, "target") == pytest.approx(outcome.report["test_after"]["accuracy"], abs=POINTS)


@pytest.mark.parametrize("kind", ["distilbert-mlm", "modernbert-mlm", "vit-bare", "roberta-bare"])
@pytest.mark.parametrize("command", ["transport", "naive"])
def test_case_4_ordinary_bases_are_not_refused(kind: str, command: str, stable: Path, tmp_path: Path) -> None:
    found = walk(kind, command, stable, tmp_path)
    assert found.state == "works", found.why


def test_case_5_compare_runs_where_only_the_fine_tune_has_a_head(stable: Path, tmp_path: Path) -> None:
    found = walk("bert-bare", "compare", stable, tmp_path)
    assert found.state == "works", found.why


def test_case_5_compare_does_without_a_test_split(stable: Path, tmp_path: Path) -> None:
    journey = journey_of("bert-headed", stable, tmp_path)
    rows = splits()
    write_rows(tmp_path / "data", "train", [*rows["train"], *rows["validation"]])
    words = (
        "compare",
        *journey.trio,
        "--data",
        tmp_path / "data",
        "--task",
        "classification",
        "--shots",
        3,
        "--device",
        "cpu",
    )
    outcome = typed(*words, "--methods", "naive", "--no-finetune-target", report=tmp_path / "found.json")
    assert outcome.code == 0, outcome.message
    assert all(row.get("accuracy") is None for row in outcome.report["rows"])
    assert outcome.report["verdict"]["text"]
    assert loud(outcome, r"no test (split|examples|data)")


def long_texts(folder: Path, words: int) -> None:
    """The words that decide stand at the end, behind many that do not."""
    draw = random.Random(0)
    for split, rows in splits().items():
        padded = [{**row, "text": " ".join([*draw.choices("xyzq", k=words), row["text"]])} for row in rows]
        write_rows(folder, split, padded)


@pytest.fixture(scope="module")
def long_mails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zero-shot encoder that takes 160 tokens, and texts of about 100."""
    folder = tmp_path_factory.mktemp("long")
    long_texts(folder / "data", 90)
    (folder / "data" / "task.json").write_text(json.dumps({"labels": PROMPTS}), encoding="utf-8")
    short = dict(CONFIGS["bert"])
    CONFIGS["bert"]["max_position_embeddings"] = 160
    try:
        model = pretrained("BertModel", "bert")
    finally:
        CONFIGS["bert"].update(short)
    save_pair(folder, model, partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tune_encoder(folder, "mean", longest=160)
    return folder


def test_case_6_the_models_own_limit_is_the_default_length(long_mails: Path, tmp_path: Path) -> None:
    words = (
        "--data",
        long_mails / "data",
        "--task",
        "zero-shot",
        "--head-from",
        long_mails / "base",
        "--device",
        "cpu",
    )
    outcome = typed("evaluate", "--model", long_mails / "tuned", *words, report=tmp_path / "score.json")
    assert outcome.code == 0, outcome.message
    measured = text_encoder(longest=160)(long_mails / "tuned", long_mails / "data", long_mails / "base")
    assert outcome.report["accuracy"] == pytest.approx(measured, abs=POINTS)
    assert not loud(outcome, r"\bcut\b")


def test_case_6_cut_texts_are_counted_in_terminal_manifest_and_card(long_mails: Path, tmp_path: Path) -> None:
    home, out = long_mails, tmp_path / "out"
    trio = ("--base", home / "base", "--tuned", home / "tuned", "--target", home / "target")
    words = ("transport", *trio, "--data", home / "data", "--task", "zero-shot", "--method", "naive", "--alpha", 1)
    outcome = typed(*words, "--shots", 3, "--max-length", 32, "--force", "--out", out, "--device", "cpu", out=out)
    assert outcome.code == 0, outcome.message
    said = rf"\d+ of \d+ .*cut.* 32\b|cut.*\d+ of \d+.* 32\b|{SIZES['test']} of {SIZES['test']}.*32"
    assert loud(outcome, said)
    for name, text in sources(out).items():
        assert re.search(said, text), name


def test_case_7_exact_match_is_named_where_it_is_the_measure(stable: Path, tmp_path: Path) -> None:
    outcome = COMMANDS["best"](journey_of("llama-chat", stable, tmp_path))
    assert outcome.code == 0 and outcome.out is not None, outcome.message
    assert loud(outcome, r"exact match")
    assert all(re.search(r"exact match", text, re.I) for text in sources(outcome.out).values())


def test_case_8_another_number_of_layers_is_not_passed_over(stable: Path, tmp_path: Path) -> None:
    """Two layers onto four, matched by index: an error or a feature, never silence."""
    from transformers import AutoConfig, BertForSequenceClassification

    journey = journey_of("bert-headed", stable, tmp_path)
    config = AutoConfig.from_pretrained(journey.home / "target")
    config.num_hidden_layers = 4
    BertForSequenceClassification(config).save_pretrained(tmp_path / "deep")
    save_tokenizer(tmp_path / "deep", "[CLS]", "[SEP]")
    words = (
        "transport",
        *journey.trio[:4],
        "--target",
        tmp_path / "deep",
        *journey.task,
        "--method",
        "naive",
        "--shots",
        3,
    )
    outcome = typed(*words, "--out", tmp_path / "out", out=tmp_path / "out")
    assert outcome.code in (0, 4)
    assert loud(outcome, r"layers"), outcome.printed


@pytest.mark.parametrize("method", [("--alpha", "1"), ("--method", "naive", "--alpha", "1"), ("--method", "best")])
def test_case_9_a_target_that_is_the_fine_tune_itself_is_noticed(
    method: tuple[str, ...], stable: Path, tmp_path: Path
) -> None:
    journey = journey_of("bert-headed", stable, tmp_path)
    shutil.copytree(journey.tuned, tmp_path / "again")
    for target in (journey.tuned, tmp_path / "again"):
        words = ("transport", *journey.trio[:4], "--target", target, *journey.task, *method, "--shots", 3)
        outcome = typed(*words, "--out", tmp_path / "out", "--overwrite", out=tmp_path / "out")
        assert outcome.code in (0, 2, 4, 6)
        assert loud(outcome, r"target.*(is|equals|same).*(fine-tune|tuned)"), outcome.printed


def many_classes(folder: Path, count: int = 40) -> None:
    """One example of each class, and texts that say nothing about it."""
    from transformers import BertConfig, BertForSequenceClassification

    names = [f"class {index}" for index in range(count)]
    draw = random.Random(1)
    for split, times in (("train", 1), ("test", 1)):
        write_rows(folder / "data", split, [
            {"text": f"{split} {' '.join(draw.choices('xyzqabc', k=5))} {index}", "label": name}
            for index, name in enumerate(names * times)
        ])  # fmt: skip
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model = BertForSequenceClassification(BertConfig(**CONFIGS["bert"], **classes))
    save_pair(folder, model, partial(save_tokenizer, prefix="[CLS]", suffix="[SEP]"))
    tuned: Any = loaded("AutoModelForSequenceClassification", folder / "base")
    for parameter in tuned.parameters():
        parameter.data.mul_(1.3)
    tuned.save_pretrained(folder / "tuned")
    save_tokenizer(folder / "tuned", "[CLS]", "[SEP]")


def test_case_9_a_rising_few_shot_loss_does_not_ship_in_silence(tmp_path: Path) -> None:
    many_classes(tmp_path)
    out = tmp_path / "out"
    trio = ("--base", tmp_path / "base", "--tuned", tmp_path / "tuned", "--target", tmp_path / "target")
    words = (
        "transport",
        *trio,
        "--data",
        tmp_path / "data",
        "--task",
        "classification",
        "--shots",
        1,
        "--device",
        "cpu",
    )
    outcome = typed(
        *words, "--method", "naive", "--alpha", 1, "--no-check", "--out", out, out=out, report=tmp_path / "found.json"
    )
    if outcome.code == 0:
        assert outcome.report["fewshot_loss_after"] > outcome.report["fewshot_loss_before"], "the test's own premise"
    assert outcome.code in (0, 6)
    assert loud(outcome, r"(note|gradfix): .*loss.*(rises|rose|goes from|went from|higher|up)"), outcome.printed


def test_the_default_method_is_best(stable: Path, tmp_path: Path) -> None:
    journey = journey_of("bert-headed", stable, tmp_path)
    default, best = COMMANDS["transport"](journey), COMMANDS["best"](journey)
    assert default.out is not None and best.out is not None
    files = [(outcome.out / "model.safetensors").read_bytes() for outcome in (default, best)]
    assert files[0] == files[1]


def test_a_head_only_the_fine_tune_has_is_asked_about(stable: Path, tmp_path: Path) -> None:
    """Without --head the choice is the user's: every command that moves says what the choices are."""
    journey = journey_of("distilbert-mlm", stable, tmp_path)
    words = (*journey.trio, *journey.task, "--shots", 3)
    for command in (("transport", "--out", tmp_path / "out"), ("compare", "--methods", "naive")):
        outcome = typed(command[0], *words, *command[1:])
        assert outcome.code == 4 and "--head copy" in outcome.message, outcome.message
    assert not (tmp_path / "out").exists()


def test_an_adapter_output_is_no_full_model(stable: Path, tmp_path: Path) -> None:
    outcome = COMMANDS["out-lora"](journey_of("llama", stable, tmp_path))
    assert outcome.out is not None and is_adapter(outcome.out), outcome.message
