"""Texts are cut into shorter pieces, and more of them; what that costs is counted in tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradfix.system import modules
from gradfix.training import steps
from gradfix.training.best import Best, best
from gradfix.training.distil import Teaching
from gradfix.training.lessons import lesson_for
from gradfix.training.remix import beside_sentences, remix, splice_words
from gradfix.vectors.taskvector import TaskVector
from tests.arenas import LABELS, NumbersBound, rows, setting

USUAL, SHORTER = Teaching(), Teaching().of_texts()
TEXT = "the quick brown fox jumps over the lazy dog and runs away from it"


class Words(NumbersBound):
    """A model that reads words, with so many tokens in its table. Unless it knows something, all words are the same to it."""

    def __init__(self, tokens: int = 600, *, knows: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(tokens, len(LABELS), generator=generator) * knows
        super().__init__(nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum"))

    def collate(self, examples: Any) -> dict[str, torch.Tensor]:
        ids = [[1 + sum(map(ord, word)) % 250 for word in row["text"].split()] for row in examples]
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        labels = torch.tensor([LABELS.index(row["label"]) for row in examples])
        return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}

    def logits(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["input_ids"])


def moved(texts: int, *, target: int = 600, asked: bool = True, besides: int = 0) -> Best:
    words = TEXT.split()
    rotated = [" ".join([f"{n}", *words[n % 14 :], *words[: n % 14], f"{n + 1}"]) for n in range(texts + besides)]
    examples = [{"text": text, "label": LABELS[n % 2]} for n, text in enumerate(rotated)]
    tau = TaskVector({"weight": torch.full((target, len(LABELS)), 0.1)})
    teacher = Words(knows=True) if asked else None
    return best(Words(target), tau, examples[:texts], teacher=teacher, unlabelled=examples[texts:])


def steps_of(found: Best) -> int:
    return int(found.parts["steps"])


@pytest.mark.parametrize("texts", [10, 100])
def test_more_and_shorter_texts_are_asked_about(texts: int) -> None:
    found, beside_real_ones = moved(texts), moved(texts, besides=40)
    assert (steps_of(found), found.parts["asked"]) == (SHORTER.steps, SHORTER.pool)
    assert (steps_of(beside_real_ones), beside_real_ones.parts["asked"]) == (USUAL.steps, USUAL.pool)


def test_hundreds_of_labels_take_the_place_of_made_up_inputs() -> None:
    for recipe in (USUAL, SHORTER):
        few, some, many = (recipe.for_labels(count) for count in (10, 200, 4000))
        assert few == recipe
        assert recipe.labelled < some.labelled < many.labelled == (recipe.labelled + recipe.unlabelled) // 2
        assert {one.labelled + one.unlabelled for one in (few, some, many)} == {recipe.labelled + recipe.unlabelled}
        assert many.pool < some.pool < few.pool
    assert moved(400).parts["asked"] == SHORTER.for_labels(400).pool


def test_real_inputs_are_learned_from_in_more_and_smaller_steps() -> None:
    found = moved(10, besides=320)
    assert (steps_of(found), found.parts["asked"]) == (USUAL.real().steps, 320)
    assert USUAL.real().steps > USUAL.steps and USUAL.real().unlabelled < USUAL.unlabelled


def test_a_target_that_has_outgrown_its_teacher_is_taught_as_before() -> None:
    assert steps_of(moved(10, target=900)) == SHORTER.steps
    assert steps_of(moved(10, target=901)) == USUAL.steps


def test_what_is_no_text_or_has_no_teacher_is_taught_as_before() -> None:
    pair = setting()
    tau = TaskVector.between(pair["base"], pair["tuned"])
    found = best(pair["target"], tau, rows(6, 40, 0.7), teacher=NumbersBound(pair["tuned"]))
    assert steps_of(found) == steps_of(moved(10, asked=False)) == USUAL.steps


def test_the_bill_counts_short_inputs_as_parts_of_one() -> None:
    """Nearly twice as many steps, and hardly more tokens."""
    found = moved(10)
    samples = SHORTER.steps * (SHORTER.labelled + SHORTER.unlabelled)
    assert found.work.backward < 0.75 * samples < 1.25 * USUAL.steps * (10 + USUAL.unlabelled)
    assert found.work.forward < found.work.backward + 0.75 * (SHORTER.pool + 10 * SHORTER.probes)


@pytest.mark.parametrize(("price", "share"), [(9000, 1.0), (4500, 0.75), (1000, 0.5)])
def test_what_is_dear_is_given_fewer_steps_but_half_of_them_in_any_case(price: int, share: float) -> None:
    pair, recipe = setting(), Teaching(price=price, pool=480)
    tau = TaskVector.between(pair["base"], pair["tuned"])
    found = best(pair["target"], tau, rows(6, 40, 0.7), teacher=NumbersBound(pair["tuned"]), recipe=recipe)
    assert steps_of(found) == pytest.approx(share * recipe.steps, rel=0.1)
    assert found.work.samples <= price or share == 0.5


def test_units_are_compared_and_starts_judged_on_texts_of_usual_length() -> None:
    examples = [{"text": " ".join(TEXT.split()[n:] + TEXT.split()[:n]), "label": LABELS[0]} for n in range(10)]
    lesson, asked = lesson_for(Words(), Words(), examples, (), None, SHORTER, 0)
    first, last = slice(SHORTER.mapped), slice(-SHORTER.probes, None)
    between = lesson.length(slice(SHORTER.mapped, -SHORTER.probes))
    assert len(lesson) == SHORTER.pool
    assert between < 0.7 * lesson.length(first) < 0.9 * lesson.length(last) / 0.7
    assert between < lesson.length() < lesson.length(first)
    assert asked == round(SHORTER.pool * lesson.length())


@pytest.mark.parametrize("longest", [0.25, 0.5, 1.0])
def test_pieces_are_no_longer_than_asked(longest: float) -> None:
    ids = torch.tensor([[101, *range(5, 25), 102], [101, *range(30, 50), 102]])
    made = remix({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 300, 0, longest=longest)
    words = [len(text.split()) for text in splice_words([TEXT, TEXT], 300, 0, longest)]
    assert 0.8 < int(made["attention_mask"].sum(1).max()) / (2 + min(20, 2 * 20 * longest)) <= 1
    assert max(words) == 2 * math.ceil(len(TEXT.split()) * longest)


def test_pieces_of_natural_sentences_are_shorter_as_well() -> None:
    long, short = (
        [len(text.split()) for _, text in beside_sentences([TEXT], 300, 0, longest)] for longest in (1.0, 0.5)
    )
    assert min(short) == 2
    assert sum(short) < 0.65 * sum(long)


def test_products_are_rounded_on_a_card_while_models_are_asked_and_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "on_a_card", lambda weight: True)
    monkeypatch.setattr(steps, "can_replay", lambda training: False)
    seen = []

    class Looks(Words):
        def logits(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append((torch.is_grad_enabled(), torch.get_float32_matmul_precision()))
            return super().logits(model, batch)

    before = torch.get_float32_matmul_precision()
    tau = TaskVector({"weight": torch.full((600, len(LABELS)), 0.1)})
    best(Looks(), tau, [{"text": TEXT, "label": LABELS[0]}], teacher=Words(), recipe=Teaching(steps=2, pool=30))
    assert set(seen) == {(True, "high"), (False, "high")}
    assert torch.get_float32_matmul_precision() == before
