"""What a language model's own template or tokenizer cannot do is an error about the data, with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradfix.cli import run
from gradfix.errors import DataError
from gradfix.tasks import TASKS
from tiny import CHAT_TEMPLATE, save_tiny, save_tokenizer, toy_texts

REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
SYSTEM = {"role": "system", "content": "be brief"}
USER, ANSWER = {"role": "user", "content": "a film"}, {"role": "assistant", "content": "good"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (CHAT_TEMPLATE, [ANSWER], "example 0: there is no question before the answer.*user turn"),
        (REFUSING + CHAT_TEMPLATE, [SYSTEM, USER, ANSWER], "refuses this conversation .*no system turns.*prompt"),
        ("{{ messages[0]['content'] + 1 }}", [USER, ANSWER], "example 0: .*refuses this conversation"),
        ("{{ messages[0].nothing.more }}", [USER, ANSWER], "example 0: .*refuses this conversation"),
    ],
    ids=["no question", "refused role", "type error", "undefined"],
)
def test_a_conversation_the_template_cannot_render(
    llama: Path, template: str, turns: list[dict[str, str]], message: str
) -> None:
    bound = TASKS["causal"]().open(llama)
    bound.tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        bound.collate([{"messages": turns}])
    labelled = TASKS["causal"]({"x": "good", "y": "bad"}).open(llama)
    labelled.tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        labelled.collate([{"messages": turns, "label": "x"}])


def test_a_tokenizer_without_an_end_token_is_named(llama: Path) -> None:
    bound = TASKS["causal"]({"x": "good", "y": "bad"}).open(llama)
    bound.tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end token.*eos_token"):
        bound.collate([{"text": "a film", "label": "x"}])


@pytest.mark.parametrize("prefix", ["", "<s>"])
def test_an_end_token_of_the_tokenizers_own_does_not_part_prompt_and_answer(
    llama: Path, tmp_path: Path, prefix: str
) -> None:
    plain, closing = (save_tiny("llama", tmp_path / name) for name in ("plain", "closing"))
    save_tokenizer(plain, prefix, "")
    save_tokenizer(closing, prefix, "</s>")
    rows = [{"prompt": row["text"], "completion": row["label"]} for row in toy_texts(4)]
    rows += [{"prompt": "a film </s>", "completion": "good"}]
    options = {"scoring": "generate"}
    found = [TASKS["causal"](**options).open(folder).collate(rows) for folder in (plain, closing)]
    assert found[0].keys() == found[1].keys()
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


@pytest.fixture
def unlabelled(llama: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Words of a command on six prompts with completions and no label."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"prompt": row["text"], "completion": "good"}) for row in toy_texts(6)]
    (folder / "train.jsonl").write_text("\n".join(lines))

    def words(command: str, out: str, **options: Any) -> list[str]:
        given = {"base": llama, "data": folder, "task": "causal", "shots": 2, "out": tmp_path / out, **options}
        return [command, *(str(part) for name, value in given.items() for part in (f"--{name}", value)), "--quiet"]

    return words


@pytest.mark.parametrize("method", ["random", "herding"])
def test_unlabelled_rows_are_one_class_for_every_choice(
    method: str, llama: Path, unlabelled: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert run(unlabelled("vote", "votes.safetensors", target=llama, select=method)) == 0
    assert run(unlabelled("select", "ids.json", select=method)) == 0
    picked = json.loads((tmp_path / "ids.json").read_text())
    assert len({row["id"] for row in picked}) == 2 and [row["label"] for row in picked] == [None, None]


def test_the_command_line_answers_a_refused_role_with_the_code_for_data(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    model, folder = save_tiny("llama", tmp_path / "model"), tmp_path / "data"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = REFUSING + CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"messages": [SYSTEM, USER, ANSWER]}))
    words = ["vote", "--target", model, "--data", folder, "--task", "causal", "--shots", 1, "--out", tmp_path / "v"]
    assert run(list(map(str, words))) == 5
    assert "train.jsonl:1" in capsys.readouterr().err
