"""Open answers for people: what is said on the terminal, in the JSON and on the page, and answers of every length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix.cli import run
from gradfix.methods.verdicts import judge
from gradfix.system.modules import restored
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import spoken
from gradfix.training.asking import Asking, ask, prompts_of
from gradfix.training.finetuning import finetune
from gradfix.training.free_text import Speech, learn
from gradfix.training.imitating import Imitation, given_lines, lines_of
from gradfix.training.retained import Outside
from tests.tiny import rewrite_tokenizer, save_tiny, toy_texts, write_rows

pytestmark = pytest.mark.usefixtures("short_lessons")
QUICK = Speech(asking=Asking(pool=8, copies=1), imitation=Imitation(steps=2, keepsakes=2, keepsake_tokens=4))


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"prompt": row["text"], "completion": f"{row['label']} film"} for row in toy_texts(count, seed)]


@pytest.fixture(scope="module", params=[("llama", "causal"), ("t5", "seq2seq")], ids=["causal", "seq2seq"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two bases, the fine-tune of the first, and data, for a decoder and for an encoder-decoder."""
    family, task = request.param
    home = tmp_path_factory.mktemp(task)
    for seed, name in enumerate(("old", "new")):
        save_tiny(family, home / name, seed=seed)
    save_tiny(family, home / "tuned")
    bound = TASKS[task]().open(home / "old")
    finetune(bound, rows(64), steps=40, batch_size=32, lr=3e-3 if task == "causal" else 1e-2)
    bound.model.save_pretrained(home / "tuned")
    for split, count, seed in (("train", 12, 3), ("test", 8, 9)):
        write_rows(home / "data", split, [{**row, "prompt": f"{row['prompt']} {seed}"} for row in rows(count, seed)])
    return home, task


def test_losses_and_forgetting_come_first(
    home: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, task = home
    words = ["transport", "--base", folder / "old", "--tuned", folder / "tuned", "--target", folder / "new", "--data",
             folder / "data", "--task", task, "--shots", 8, "--prompts", 24, "--lessons", 12, "--out", tmp_path / "out",
             "--json", tmp_path / "told.json", "--report", tmp_path / "page.html"]  # fmt: skip
    assert run([str(word) for word in words]) == 0
    seen, told = capsys.readouterr(), json.loads((tmp_path / "told.json").read_text())
    before, after, had = (told[name]["loss"] for name in ("test_before", "test_after", "had"))
    way, figures = (before - after) / (before - had), told["figures"]
    assert figures["of_what_you_had"] == pytest.approx(way) and way > 0.1
    assert f"{before:.3f} -> {after:.3f} ({way:.0%} of the way to what you had)" in seen.out
    assert "takes K per class" not in seen.err and "deprecated" not in seen.err
    for when, least in (("before", 0.0), ("after", 1e-6)):
        assert {"token_f1", "generated_match", "general_loss", "divergence"} <= set(figures[when])
        assert figures[when]["divergence"] >= least - 1e-6
    assert f"{figures['before']['divergence']:.3f} -> {figures['after']['divergence']:.3f}" in seen.out
    for name, digits in (("page.html", 2), ("page.md", 3)):
        page = (tmp_path / name).read_text()
        assert f"{before:.3f} before, {after:.3f} after" in page and "8 labelled answers" in page
        assert f"{figures['after']['token_f1']:.{digits}f}" in page and "per class" not in page.partition("Notes")[0]
    page = (tmp_path / "page.html").read_text()
    assert "Answers in free text" in page and page.count('class="was"') == 3 and "(KL divergence) (%)" not in page


def test_losses_of_two_tokenizers_are_not_set_against_each_other(home: tuple[Path, str], tmp_path: Path) -> None:
    folder, task = home
    save_tiny("llama" if task == "causal" else "t5", tmp_path / "other", seed=2)
    rewrite_tokenizer(tmp_path / "other")
    words = ["transport", "--base", folder / "old", "--tuned", folder / "tuned", "--target", tmp_path / "other", "--data",
             folder / "data", "--task", task, "--shots", 8, "--prompts", 10, "--lessons", 6, "--out", tmp_path / "out",
             "--json", tmp_path / "told.json", "--quiet"]  # fmt: skip
    assert run([str(word) for word in words]) == 0
    figures = json.loads((tmp_path / "told.json").read_text())["figures"]
    assert figures["of_what_you_had"] is None and figures["one_tokenizer"] is False


def test_an_encoder_decoder_forgets_as_well(tmp_path: Path) -> None:
    bound = TASKS["seq2seq"]().open(save_tiny("t5", tmp_path))
    for texts in (None, ["a good film", "the photo"]):
        outside = Outside.of(bound, texts, count=4)
        before = outside.measure(bound)
        assert before is not None and abs(before["divergence"]) < 1e-5 and before["general_loss"] > 0
        with restored(bound.model), torch.no_grad():
            for parameter in bound.model.parameters():
                parameter.mul_(1.3)
            worse = outside.measure(bound)
        assert worse is not None and worse["divergence"] > 0.01


def test_a_special_token_without_a_name_ends_an_answer(tmp_path: Path) -> None:
    """As Llama 3 has one: the template closes a turn with it, and no attribute of the tokenizer names it."""
    from tokenizers import AddedToken

    bound = TASKS["causal"]().open(save_tiny("llama", tmp_path))
    bound.tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])
    bound.tokenizer.chat_template = bound.tokenizer.chat_template.replace("</s>", "<|eot|>\n")
    end = bound.tokenizer.convert_tokens_to_ids("<|eot|>")
    assert end not in bound.tokenizer.all_special_ids
    posed = bound.posed({"messages": [{"role": "user", "content": "good film"}]})
    assert not bound.cuts() and bound.stops(posed.closing)[0] == end
    assert f"'<|eot|>' ({end})" in bound.cuts()[0] and "generation_config.json" in bound.cuts()[0]
    bound = TASKS["causal"]().open(tmp_path)
    bound.stops(bound.posed({"messages": [{"role": "user", "content": "good film"}]}).closing)
    assert not bound.cuts()  # its template ends a turn as the model does


@pytest.fixture
def narrow(tmp_path: Path) -> tuple[Any, Any]:
    """A model that knows so many places and no more, and one of another tokenizer that knows more."""
    for seed, name in enumerate(("gpt2", "llama")):
        save_tiny(name, tmp_path / name, seed=seed)
    rewrite_tokenizer(tmp_path / "llama")
    return TASKS["causal"]().open(tmp_path / "gpt2"), TASKS["causal"]().open(tmp_path / "llama")


def test_a_long_answer_to_a_long_prompt_stays_within_the_context(narrow: tuple[Any, Any]) -> None:
    small, _ = narrow
    most = small.max_length
    long = [{"prompt": "x " * 2 * most, "completion": "good film " * (most // 4)}]
    (line,) = given_lines(small, long)
    assert len(line.question) + len(line.answer) == most
    assert line.answer[:-1] == small.answer_ids(long[0]["completion"])  # nothing of the answer is lost
    said = ask(small, prompts_of(small, long, asking=QUICK.asking), asking=QUICK.asking)
    found = learn(small, None, long, said, speech=replace(QUICK, train="full"))
    assert all(torch.isfinite(tensor).all() for tensor in found.update.values())
    assert any("were cut at" in note for note in small.cuts())


def test_answers_longer_than_the_student_s_context_are_read_as_far_as_it_goes(narrow: tuple[Any, Any]) -> None:
    small, large = narrow
    asking = replace(QUICK.asking, longest=small.max_length + 20, pool=4)
    large.max_length = 4 * small.max_length
    large.model.generation_config.eos_token_id = None
    for teacher in (large, small):  # another tokenizer, and the same
        said = ask(teacher, prompts_of(teacher, rows(2), asking=asking), asking=asking)
        replies = [replace(r, text=r.text * 4) if teacher is large else r for r in said.replies]
        for line in lines_of(small, replace(said, replies=replies)):
            assert len(line.question) + len(line.answer) <= small.max_length
            assert line.pieces is None or len(line.pieces[0]) == len(line.answer)


def test_a_long_question_cuts_no_other_answer(narrow: tuple[Any, Any]) -> None:
    small, _ = narrow
    short, long = {"prompt": "good film"}, {"prompt": "x " * 2 * small.max_length}
    wanted = small.max_length // 2
    alone = spoken(small, small.model, [short], wanted)
    assert spoken(small, small.model, [long, short], wanted)[1] == alone[0]


def test_too_few_open_answers_are_not_laid_to_a_label(
    home: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, task = home
    words = ["transport", "--base", folder / "old", "--tuned", folder / "tuned", "--target", folder / "new", "--data",
             folder / "data", "--task", task, "--shots", 99, "--out", tmp_path / "out", "--quiet"]  # fmt: skip
    assert run([str(word) for word in words]) == 5
    assert "there are 12 examples, 99 were asked for" in capsys.readouterr().err


def spoken_row(method: str, losses: list[float], test_loss: float, **more: Any) -> dict[str, Any]:
    score = 100 / (1 + sum(losses) / len(losses))
    return {
        "method": method, "shots": 8, "seed": 0, "pair": None, "accuracy": 0.0, "measure": "exact match", "gain": "loss",
        "test_loss": test_loss, "validation_accuracy": 0.0, "validation_score": score, "held_right": "100",
        "held_losses": losses, "regime": "few_shot", "alpha": 1.0, "seconds": 1.0, "recovered": None, **more,
    }  # fmt: skip


def test_the_verdict_on_open_answers_goes_by_their_loss() -> None:
    """No answer is right to the letter, and yet the methods are told apart."""
    rows = [
        spoken_row("zero_shot", [5.0, 6.0, 5.5, 5.2], 5.4, alpha=0.0),
        spoken_row("few_shot_lora", [1.0, 1.1, 0.9, 1.2], 1.05),
        spoken_row("best", [2.0, 2.2, 1.9, 2.1], 2.05),
    ]
    found = judge(rows)
    assert found["method"] == "few_shot_lora" and not found["tie"] and found["loss"] == 1.05
    assert "test loss per token 1.050 (5.400 as the target is)" in found["text"]
    assert "-1.000 in loss per token" in found["text"] and "exact match" not in found["text"]
    rows[2] |= {"held_losses": [0.2, 2.1, 0.4, 1.6], "validation_score": 100 / 2.075}
    tied = judge(rows)
    assert tied["method"] == "best" and tied["tied"] == [
        "few_shot_lora"
    ]  # four answers cannot tell, and best is favoured
    assert "On test the loss of few_shot_lora was 1.000 lower" in tied["text"]
    refused = judge([*rows[::2], spoken_row("naive", [0.1, 0.2, 0.1, 0.2], 7.0)])
    assert refused["refused"] == "naive" and "1.600 more loss than the target" in refused["text"]
