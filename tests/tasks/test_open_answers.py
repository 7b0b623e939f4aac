"""Open answers as tasks read and score them, and what their options mean elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradfix.data import load_data
from gradfix.data.load import load_unlabelled
from gradfix.errors import DataError, UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import token_f1
from gradfix.training.imitating import divergences
from tests.tiny import save_tiny, write_rows


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_scores_of_answers_are_those_of_one_answer_at_a_time(family: str, tmp_path: Path) -> None:
    task = TASKS["seq2seq" if family == "t5" else "causal"]()
    bound = task.open(save_tiny(family, tmp_path), dtype=torch.float64)
    questions, answers = [[5, 6, 7, 8], [4, 5], [7] * 9], [[10, 11, 12], [13] * 7, [9]]
    with torch.no_grad():
        together = bound.spoken_logits(bound.model, questions, answers)
        alone = [bound.spoken_logits(bound.model, [q], [a]) for q, a in zip(questions, answers, strict=True)]
        torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
        if family != "t5":
            plain = bound.model(torch.tensor([questions[0] + answers[0]])).logits[0, 3:-1]
            torch.testing.assert_close(alone[0], plain, rtol=0, atol=1e-12)


def test_the_divergence_is_the_one_of_all_tokens_where_all_are_listed() -> None:
    torch.manual_seed(0)
    theirs, ours = torch.randn(2, 5, 12, dtype=torch.float64)
    logs, top = theirs.log_softmax(-1).topk(12)
    whole = torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(divergences(ours.log_softmax(-1).gather(1, top), logs), whole.sum(-1), rtol=0, atol=1e-9)
    part = divergences(ours.log_softmax(-1).gather(1, top[:, :4]), logs[:, :4])
    assert (part <= whole.sum(-1) + 1e-9).all() and (part >= -1e-9).all()


def test_a_base_without_a_chat_template_is_told_the_way_out(tmp_path: Path) -> None:
    bound = TASKS["causal"]().open(save_tiny("gpt2", tmp_path))
    with pytest.raises(DataError, match=r"no chat template .* Copy the fine-tune's chat_template\.jinja"):
        bound.posed({"messages": [{"role": "user", "content": "a film"}]})


def test_unlabelled_prompts_need_no_answers(tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [{"prompt": "a good film"}, {"prompt": "bad"}])
    assert [row["prompt"] for row in load_unlabelled(tmp_path)] == ["a good film", "bad"]
    chats = [{"messages": [{"role": "user", "content": "a film"}]}]
    write_rows(tmp_path / "chats", "train", chats)
    assert len(load_unlabelled(tmp_path / "chats")) == 1
    with pytest.raises(DataError, match=r"there is no answer: the columns are .*Call the answer's column completion"):
        load_data(tmp_path)


def test_token_f1_counts_words() -> None:
    assert token_f1("A good film.", "good, FILM a") == 1
    assert token_f1("a b", "b c") == pytest.approx(0.5)
    assert token_f1("", "a") == 0 and token_f1("", "") == 1


def test_options_of_open_answers_mean_nothing_to_labels(tmp_path: Path) -> None:
    from gradfix.commands.configs import TransportConfig
    from gradfix.commands.telling import refuse_strays

    bound = TASKS["causal"]({"good": "good", "bad": "bad"}).open(save_tiny("gpt2", tmp_path))
    config = TransportConfig(base="a", tuned="b", target="c", data="d", task="causal", out="o", lessons=3)
    with pytest.raises(UsageError, match="--lessons is for open answers"):
        refuse_strays(config, bound)
