"""Plain `gradfix compare`, every method, on every family of models: it ends well and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradfix.cli import run
from gradfix.methods.changed import changed_examples
from gradfix.methods.verdicts import judge
from tests.stage import setup, texts, tune

pytestmark = pytest.mark.usefixtures("short_lessons")
FAMILIES = {
    "clip": ("clip", "clip-old", "clip-old-colours", "clip-new", "photos", "zero-shot"),
    "t5": ("t5", "t5-old", "t5-old-nli", "t5-new", "nli", "seq2seq"),
    "llm with messages": ("llm", "llm-old", "llm-old-support", "llm-new", "tickets", "causal"),
    "llm with labels": ("llm", "llm-old", "llm-old-support", "llm-new", "reviews", "causal"),
    "bert": ("bert", "with-head", "tuned", "new-with-head", "reviews", "classification"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_runs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, base, tuned, target, data, task = FAMILIES[family]
    setup(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    if family == "llm with labels":
        texts(Path(data))
    if family == "bert":
        for source, out in (("bert-old", base), ("bert-new", target)):
            tune(Path(source), Path(out), Path(data), task, "--new-head", "--steps", 1)
        tune(Path(base), Path(tuned), Path(data), task)
    words = ["compare", "--base", base, "--tuned", tuned, "--target", target, "--data", data, "--task", task,
             "--shots", "2", "--no-finetune-target", "--json", "found.json", "--quiet"]  # fmt: skip
    words += ["--lessons", "24", "--prompts", "64"] if task in ("causal", "seq2seq") else []
    assert run(words) == 0
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert {"zero_shot", "gradfix", "best"} <= {row["method"] for row in found["rows"]}
    assert found["verdict"]["text"]


def test_open_answers_are_right_or_other() -> None:
    asked = [{"prompt": "a", "completion": "b"}] * 3
    found = changed_examples(asked, [], [-1, 0, -1], [0, -1, -1])
    assert found["counts"] == {"repaired": 1, "broken": 1, "moved": 0}
    assert [entry["after"] for entry in found["examples"]] == ["(right)", "(other)"]


def test_an_answer_outside_the_labels_is_no_label() -> None:
    found = changed_examples([{"text": "a", "label": "no"}], ["yes", "no"], [-1], [1])
    assert found["examples"][0]["before"] == "(other)"
    assert found["counts"]["repaired"] == 1


def test_a_clear_loss_on_test_is_no_tie() -> None:
    def row(method: str, seed: int, accuracy: float, score: float) -> dict[str, object]:
        return {"method": method, "seed": seed, "accuracy": accuracy, "validation_score": score, "alpha": 1.0,
                "seconds": 1.0, "regime": "validation", "shots": 2}  # fmt: skip

    rows = [row("gradfix", s, 60.0 + s / 2, 0.9) for s in (0, 1)]
    rows += [row("naive", s, 75.0, 0.8) for s in (0, 1)]
    verdict = judge(rows)
    assert not verdict["exceeds_spread"]
    assert "does as well" not in verdict["text"] and "not told apart" not in verdict["text"]
    assert "behind it by more than the seeds' spread" in verdict["text"]


def test_a_changed_configuration_is_compared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup("bert-zero-shot", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--base", "bert-old", "--tuned", "bert-old-reviews", "--target", "bert-new", "--data", "reviews",
             "--task", "zero-shot", "--shots", "2", "--methods", "naive", "gradfix", "--quiet"]  # fmt: skip

    def losses(*options: str) -> list[float]:
        assert run([*words, "--json", "found.json", *options]) == 0
        return [row["test_loss"] for row in json.loads(Path("found.json").read_text(encoding="utf-8"))["rows"]]

    before = losses("--work", "kept")
    assert losses("--work", "kept") == before
    config = Path("bert-new/config.json")
    changed = {**json.loads(config.read_text(encoding="utf-8")), "hidden_act": "relu"}
    config.write_text(json.dumps(changed), encoding="utf-8")
    assert losses("--work", "kept") == losses("--work", "fresh") != before


def test_unlabelled_inputs_are_no_test_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup("bert-zero-shot", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["transport", "--base", "bert-old", "--tuned", "bert-old-reviews", "--target", "bert-new", "--data", "reviews",
             "--task", "zero-shot", "--shots", "2", "--method", "best", "--out", "moved", "--quiet"]  # fmt: skip
    assert run([*words, "--unlabelled", "reviews/test.jsonl"]) == 5
    assert not Path("moved").exists()
