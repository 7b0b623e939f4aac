"""The best recipe: what it promises, on models small enough to train in a moment."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from gradfix.align.correspondence import correspond
from gradfix.errors import DataError, UsageError
from gradfix.methods.comparison import compare
from gradfix.system.modules import restored
from gradfix.tasks.base import Bound
from gradfix.training.best import Best, best
from gradfix.training.costs import Work
from gradfix.training.distil import (
    Lesson,
    Teaching,
    answers,
    distil,
    divergence,
    join,
    teacher_of,
    typical_size,
    unbiased_divergence,
)
from gradfix.training.lessons import lesson_for, remembered
from gradfix.training.remix import bank
from gradfix.training.starts import Lent, Old, best_start, in_coordinates, step_unit
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply
from tests.arenas import LABELS, NumbersBound, network, rows, setting, trained


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return setting()


def of(pair: dict[str, Any], **options: Any) -> Best:
    tau = TaskVector.between(pair["base"], pair["tuned"])
    options = {"teacher": NumbersBound(pair["tuned"]), "seed": 3, **options}
    return best(pair["target"], tau, rows(6, 40, 0.7), **options)


def accuracy(bound: Bound, update: TaskVector | None = None) -> float:
    batch = bound.collate(rows(300, 9, 0.7))
    with restored(bound.model), torch.no_grad():
        if update is not None:
            apply(bound.model, update)
        return float((bound.predict(bound.model, batch) == batch["labels"]).float().mean())


def test_it_beats_the_target_and_few_shot_labels_alone(pair: dict[str, Any]) -> None:
    taught, alone = of(pair), of(pair, teacher=None)
    assert accuracy(pair["target"], taught.update) > accuracy(pair["target"]) + 0.1
    assert accuracy(pair["target"], taught.update) >= accuracy(pair["target"], alone.update)


def test_the_model_is_left_as_it_was(pair: dict[str, Any]) -> None:
    model = pair["target"].model
    model.train()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    of(pair)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_equal_seeds_give_equal_updates(pair: dict[str, Any]) -> None:
    first, second = of(pair), of(pair)
    assert all(torch.equal(first.update[name], second.update[name]) for name in first.update)
    assert any(not torch.equal(first.update[n], t) for n, t in of(pair, seed=4).update.items())


def test_labels_of_unlabelled_examples_are_not_read(pair: dict[str, Any]) -> None:
    honest = rows(60, 12, 0.7)
    lying = [{**row, "label": LABELS[0]} for row in honest]
    bare = [{"text": row["text"]} for row in honest]
    updates = [of(pair, unlabelled=given).update for given in (honest, lying, bare)]
    for other in updates[1:]:
        assert all(torch.equal(updates[0][name], other[name]) for name in other)


def test_a_vector_that_only_hurts_is_not_followed(pair: dict[str, Any]) -> None:
    tau = -TaskVector.between(pair["base"], pair["tuned"])
    found = best(pair["target"], tau, rows(6, 40, 0.7), teacher=NumbersBound(pair["tuned"]))
    assert found.alpha == 0
    assert found.verdict == "taught"
    assert accuracy(pair["target"], found.update) > accuracy(pair["target"])


def test_a_vector_of_zeros_is_an_error(pair: dict[str, Any]) -> None:
    tau = TaskVector.between(pair["base"], pair["tuned"]) * 0.0
    with pytest.raises(UsageError, match="nothing to transport"):
        best(pair["target"], tau, rows(6, 40, 0.7), teacher=NumbersBound(pair["tuned"]))


def test_no_examples_is_an_error(pair: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="--shots"):
        best(pair["target"], TaskVector.between(pair["base"], pair["tuned"]), [])


def test_the_bill_counts_every_sample(pair: dict[str, Any]) -> None:
    recipe = Teaching(steps=5, pool=50, probes=8)
    found = of(pair, recipe=recipe)
    passes = 5 * (6 + 40)
    assert found.work.backward == passes
    looks = (len(found.parts["start_curve"]) + 1) * 8  # and one at the end
    assert found.work.forward == passes + 50 + 6 + looks  # the teacher is heard on the six labelled ones as well
    assert found.work.steps == 5


def test_a_teacher_of_another_task_is_spoken_of(pair: dict[str, Any]) -> None:
    names = {label: LABELS[(place + 1) % len(LABELS)] for place, label in enumerate(LABELS)}
    recipe, tau = Teaching(steps=2, pool=20, probes=8), TaskVector.between(pair["base"], pair["tuned"])
    own = rows(30, 40, 0.7)
    others = [{**row, "label": names[row["label"]]} for row in own]
    said = {}
    for task, examples in (("own", own), ("other", others)):
        found = best(pair["target"], tau, examples, teacher=NumbersBound(pair["tuned"]), recipe=recipe)
        right, known = found.parts["named_right"]
        assert known == 30
        said[task] = f"names {right} of the 30 labelled examples right" in " ".join(found.notes())
        assert (right < 15) is (task == "other")
    assert said == {"own": False, "other": True}


def test_steps_that_lead_away_from_the_teacher_are_taken_again_smaller(pair: dict[str, Any]) -> None:
    wild, tame = (of(pair, recipe=Teaching(steps=5, pool=50, probes=8, rate=rate)) for rate in (400.0, 0.2))
    assert wild.parts["rate"] == pytest.approx(tame.parts["rate"] * 400.0 / 0.2 / 4)


@pytest.mark.parametrize("validation", ["auto", "none"])
def test_compare_runs_it_in_both_regimes(pair: dict[str, Any], validation: str) -> None:
    results = compare(**pair, methods=["zero_shot", "naive", "best"], shots=[4], seeds=[0], validation=validation)
    rows_ = {row["method"]: row for row in results.rows}
    assert rows_["best"]["accuracy"] >= rows_["zero_shot"]["accuracy"]
    assert rows_["best"]["validation_score"] is not None


def test_the_teacher_is_base_plus_vector(pair: dict[str, Any]) -> None:
    tau = TaskVector.between(pair["base"], pair["tuned"])
    teacher = teacher_of(pair["target"], pair["base"], tau)
    assert teacher is not None
    for name, parameter in pair["tuned"].named_parameters():
        torch.testing.assert_close(dict(teacher.model.named_parameters())[name], parameter)


def test_a_task_without_a_label_set_has_no_teacher(pair: dict[str, Any]) -> None:
    class Open(NumbersBound):
        logits = Bound.logits

    assert teacher_of(Open(pair["target"].model), pair["base"], TaskVector({})) is None


@given(st.integers(0, 5), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_a_constant_per_class_does_not_count(seed: int, constant: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = torch.randn(2, 20, 3, generator=generator, dtype=torch.float64)
    moved = student + torch.tensor(constant, dtype=torch.float64)
    assert unbiased_divergence(moved, teacher) == pytest.approx(unbiased_divergence(student, teacher), abs=1e-9)
    assert unbiased_divergence(teacher + 1.5, teacher) == pytest.approx(0, abs=1e-12)


def test_divergence_is_the_textbook_one() -> None:
    student, teacher = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    torch.testing.assert_close(divergence(student, teacher, 3.0), 9 * (p * (p / q).log()).sum(-1))


def test_without_a_lesson_it_is_plain_fine_tuning(pair: dict[str, Any]) -> None:
    bound = NumbersBound(trained(pair["target"].model, rows(6, 1, 0.7), 0, 0.01))
    labelled = bound.collate(rows(6, 40, 0.7))
    start = float(bound.loss(bound.model, labelled).detach().mean())
    distil(bound, labelled, Lesson({}, torch.empty(0)), 0.01, Teaching(), seed=0)
    assert float(bound.loss(bound.model, labelled).detach().mean()) < start


def test_the_teacher_is_followed_on_labelled_samples_too(pair: dict[str, Any]) -> None:
    labelled, lesson = pair["target"].collate(rows(12, 40, 0.7)), pair["target"].collate(rows(12, 41, 0.7))
    wanted = torch.randn(12, len(LABELS), generator=torch.Generator().manual_seed(0))
    left = []
    for heard in (None, wanted):
        bound = NumbersBound(copy.deepcopy(pair["target"].model))
        distil(bound, labelled, Lesson(lesson, answers(bound, lesson)), 0.01, Teaching(), seed=0, heard=heard)
        left.append(float(divergence(answers(bound, labelled), wanted).mean()))
    assert left[1] < 0.9 * left[0]


def test_a_walk_goes_over_a_hill_before_it_gives_up() -> None:
    """Between strangers the first steps may lead away from the teacher: without those behind it the vector would be lost."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
    heights = {0.0: 0.9, 0.5: 0.95, 1.0: 0.93, 1.5: 0.91, 2.0: 0.8, 3.0: 0.6}
    asked = []

    def probe() -> float:
        asked.append(float(model.weight.detach()))
        return heights.get(asked[-1], 1.0)

    vector = TaskVector({"weight": torch.ones(1, 1)})
    bound = NumbersBound(model)
    start, tried = best_start(bound, {"plain": vector}, (probe, 1))
    assert (start.name, start.alpha) == ("plain", 3.0)
    assert asked == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    heights[2.0] = 1.0
    assert best_start(bound, {"plain": vector}, (probe, 1))[0].name == "none"
    assert asked[8:] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert tried[0].passes == 8


def test_answers_come_in_the_order_of_the_inputs() -> None:
    class Lengths(NumbersBound):
        def logits(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return (batch["input_ids"] * batch["attention_mask"]).sum(1, keepdim=True).float()

    mask = (torch.arange(9) < torch.tensor([[4], [9], [1], [6]])).long()
    ids = torch.arange(36).reshape(4, 9)
    found = answers(Lengths(network(0)), {"input_ids": ids, "attention_mask": mask}, size=2)
    assert found[:, 0].tolist() == (ids * mask).sum(1).tolist()


def test_the_task_vector_knows_its_vocabulary() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3)

        def get_input_embeddings(self) -> nn.Embedding:
            return self.table

    bound = NumbersBound(network(0))
    assert remembered(bound, TaskVector({})) is None
    bound.model = Reader()
    delta = torch.zeros(7, 3)
    delta[2], delta[5] = 1.0, 2.0
    weights = remembered(bound, TaskVector({"table.weight": delta}))
    assert weights is not None and weights.tolist() == [0, 0, 3, 0, 0, 12, 0]
    frozen = remembered(bound, TaskVector({}))
    assert frozen is not None and frozen.tolist() == [0.0] * 7


def test_two_tokenizers_are_asked_about_the_same_texts() -> None:
    class Words(NumbersBound):
        def __init__(self, offset: int) -> None:
            super().__init__(nn.EmbeddingBag(600, len(LABELS), mode="sum"))
            self.offset, self.read = offset, []

        def collate(self, examples: Any) -> dict[str, torch.Tensor]:
            self.read.append([row["text"] for row in examples])
            ids = [[self.offset + sum(map(ord, w)) % 250 for w in row["text"].split()] for row in examples]
            width = max(map(len, ids))
            padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
            labels = torch.tensor([LABELS.index(row["label"]) for row in examples])
            return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}

        def logits(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return model(batch["input_ids"])

    target, teacher = Words(1), Words(300)
    tau = TaskVector({"weight": torch.full((600, len(LABELS)), 0.1)})
    examples = [{"text": f"some words {n} more of them", "label": LABELS[n % 2]} for n in range(4)]
    best(target, tau, examples, teacher=teacher, recipe=Teaching(steps=2, pool=30, probes=8))
    asked = [text for part in teacher.read if len(part) > len(examples) for text in part]
    assert len(asked) == 30
    assert asked == [text for part in target.read if len(part) > len(examples) for text in part]
    assert len([text for text in asked if set(text.split()) & set(" ".join(bank()).split())]) >= 15


def test_joined_batches_are_masked_where_they_were_padded() -> None:
    one = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3).long(), "labels": torch.zeros(2)}
    two = {"input_ids": torch.ones(1, 5).long(), "attention_mask": torch.ones(1, 5).long()}
    joined = join(one, two)
    assert joined["attention_mask"].sum(1).tolist() == [3, 3, 5]
    assert set(joined) == {"input_ids", "attention_mask"}


def test_typical_size_ignores_silent_tensors() -> None:
    vector = {"a": torch.full((4,), 2.0), "b": torch.zeros(9), "c": torch.full((2,), -3.0)}
    assert typical_size(vector, ["a", "b"]) == 2.0
    assert typical_size(vector, ["b"]) == 0.0


def test_a_vector_of_another_shape_is_taught(pair: dict[str, Any]) -> None:
    """No vector can be added, nothing answers to anything: the teacher is handed on by the same call."""
    tau = TaskVector.between(pair["base"], pair["tuned"])
    nothing = Old(tau, correspond({"other": (1,)}, {"0.weight": (16, 6)}))
    teacher = NumbersBound(pair["tuned"])
    found = best(pair["target"], None, rows(6, 40, 0.7), teacher=teacher, old=nothing)
    assert (found.verdict, found.start, found.alpha) == ("taught", "none", 0)
    assert "no weight of the target answers" in found.notes()[0]
    assert accuracy(pair["target"], found.update) > accuracy(pair["target"])


def test_the_better_start_is_taken_and_named(pair: dict[str, Any]) -> None:
    tau = TaskVector.between(pair["base"], pair["tuned"])
    shapes = {name: tuple(p.shape) for name, p in pair["base"].named_parameters()}
    teacher = NumbersBound(pair["tuned"])
    found = best(pair["target"], -tau, rows(6, 40, 0.7), teacher=teacher, old=Old(tau, correspond(shapes, shapes)))
    assert set(found.parts["starts"]) == {"plain", "coordinates"}
    assert found.start == "coordinates" and found.alpha > 0
    assert "started from coordinates" in found.notes()[0]
    assert len(found.parts["correspondence"]["hash"]) == 64
    tuned = dict(pair["tuned"].named_parameters())
    assert all(torch.equal(p, tuned[name]) for name, p in teacher.model.named_parameters())


def test_what_another_method_made_is_taken_and_not_billed(pair: dict[str, Any]) -> None:
    tau = TaskVector.between(pair["base"], pair["tuned"])
    shapes = {name: tuple(p.shape) for name, p in pair["base"].named_parameters()}
    old, teacher = Old(tau, correspond(shapes, shapes)), NumbersBound(pair["tuned"])
    recipe = Teaching(steps=6, pool=99, price=1700)  # which pays for fewer steps
    lesson, asked = lesson_for(pair["target"], teacher, rows(6, 40, 0.7), [], None, recipe, 3)
    moved = in_coordinates(pair["target"], teacher, old, lesson, recipe)["bico"]
    ready = Lent(lesson, moved.vector, Work(forward=asked + moved.passes, backward=moved.passes))
    alone, lent = (of(pair, old=replace(old, lent=one), recipe=recipe) for one in (None, ready))
    assert 3 <= alone.parts["steps"] < 6
    assert all(torch.equal(alone.update[name], lent.update[name]) for name in alone.update)
    assert alone.parts == lent.parts
    assert alone.work.forward - lent.work.forward == asked + moved.passes
    assert alone.work.backward - lent.work.backward == moved.passes


def test_without_maps_the_units_are_put_in_order(pair: dict[str, Any]) -> None:
    """Nothing can be compared inside the models, but the vector can be permuted."""
    tau = TaskVector.between(pair["base"], pair["tuned"])
    nothing = correspond({"other": (1,)}, {"0.weight": (16, 6)})
    options = {"teacher": NumbersBound(pair["tuned"]), "seed": 3}
    found = best(pair["target"], -tau, rows(6, 40, 0.7), old=Old(tau, nothing, permuted=lambda: tau), **options)
    assert set(found.parts["starts"]) == {"plain", "permuted"}
    assert found.start == "permuted" and found.alpha > 0

    def refused() -> TaskVector:
        raise UsageError("no alignment is known for this architecture.")

    found = best(pair["target"], tau, rows(6, 40, 0.7), old=Old(tau, nothing, permuted=refused), **options)
    assert found.start == "plain" and "no alignment" in found.parts["no_permutation"]


def test_the_teacher_alone_is_enough(pair: dict[str, Any]) -> None:
    found = of(pair)
    tau = TaskVector.between(pair["base"], pair["tuned"])
    alone = best(pair["target"], tau, [], teacher=NumbersBound(pair["tuned"]), unlabelled=rows(60, 12, 0.7), seed=3)
    assert accuracy(pair["target"], alone.update) > accuracy(pair["target"]) + 0.1
    assert (
        alone.work.backward == found.work.backward + (12 - 6) * Teaching().steps
    )  # 6 labels are fewer than a step holds
    with pytest.raises(DataError, match="--unlabelled"):
        best(pair["target"], tau, [], unlabelled=rows(60, 12, 0.7))


def test_the_unit_of_a_step_follows_the_weights_across_shapes(pair: dict[str, Any]) -> None:
    tau = TaskVector.between(pair["base"], pair["tuned"])
    old, teacher = Old(tau, correspond({"a": (1,)}, {"b": (1,)})), NumbersBound(pair["tuned"])
    large = NumbersBound(copy.deepcopy(pair["tuned"]))
    with torch.no_grad():
        for parameter in large.model.parameters():
            parameter.mul_(4)
    same = step_unit(teacher, None, teacher, old)
    assert same == pytest.approx(typical_size(tau, teacher.trainable()))
    assert step_unit(large, None, teacher, old) == pytest.approx(4 * same)
