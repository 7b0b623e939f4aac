"""The contract of a task, on every task and family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradfix.errors import DataError
from gradfix.tasks import Bound
from gradfix.tasks.scoring import evaluate
from gradfix.training.finetuning import finetune
from gradfix.votes.collect import collect_votes
from gradfix.votes.engines.passes import samples
from tests.tasks.families import CASES, Case


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def exact(case: Case, root: Path) -> Bound:
    return case.open(case.save(root), torch.float64)


def test_losses_are_per_sample_finite_and_reach_the_trainable_weights(case: Case, root: Path) -> None:
    bound = exact(case, root)
    batch = bound.collate(case.rows(6))
    losses = bound.loss(bound.model, batch)
    assert losses.shape == (6,) and bool(torch.isfinite(losses).all())
    losses.sum().backward()
    reached = {n for n, p in bound.model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert reached <= set(bound.trainable())
    # Key biases have no effect on softmax attention; an unused token or layer norm may stay silent too.
    assert len(reached) > 0.7 * len(bound.trainable())


def test_a_sample_does_not_notice_its_batch(case: Case, root: Path) -> None:
    bound = exact(case, root)
    rows = list(case.rows(5))
    if not case.images:
        rows[2] = {**rows[2], "text": rows[2]["text"] + " and a much longer tail of words that pads the others"}
    together = bound.loss(bound.model, bound.collate(rows))
    alone = torch.cat([bound.loss(bound.model, bound.collate([row])) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    sliced = torch.cat([bound.loss(bound.model, part) for part in samples(bound.collate(rows))])
    torch.testing.assert_close(together, sliced, rtol=0, atol=1e-10)


def test_judging_is_predicting_and_losing_in_one(case: Case, root: Path) -> None:
    bound = exact(case, root)
    batch = bound.collate(case.rows(6))
    with torch.no_grad():
        predicted, losses = bound.judge(bound.model, batch)
        assert torch.equal(predicted, bound.predict(bound.model, batch))
        torch.testing.assert_close(losses, bound.loss(bound.model, batch), rtol=0, atol=1e-10)
        logits = bound.logits(bound.model, batch)
    assert logits.shape == (6, len(bound.labels)) and torch.equal(logits.argmax(-1), predicted)


def test_features_are_one_vector_per_sample(case: Case, root: Path) -> None:
    bound = exact(case, root)
    rows = case.rows(6)
    features = bound.features(bound.model, bound.collate(rows))
    assert features.shape[0] == 6 and features.ndim == 2
    torch.testing.assert_close(features[:2], bound.features(bound.model, bound.collate(rows[:2])))


def test_fine_tuning_learns_the_toy_task(case: Case, root: Path) -> None:
    bound = case.open(case.save(root))
    finetune(bound, case.rows(96), steps=case.steps, batch_size=32, lr=case.lr)
    held = evaluate(bound.model, bound, bound.batches(case.rows(45, seed=9)))
    assert held["accuracy"] > 90


@pytest.mark.filterwarnings("ignore:.*tensors abstained")
def test_votes_can_be_taken(case: Case, root: Path) -> None:
    bound = exact(case, root)
    votes = collect_votes(bound.model, bound.loss, bound.batches(case.rows(4), 2), engine="loop")
    assert votes.count == 4 and set(votes) == set(bound.trainable())


def test_a_label_outside_the_set_is_refused(case: Case, root: Path) -> None:
    bound = exact(case, root)
    with pytest.raises(DataError, match="'purple' is not one of"):
        bound.collate([{**case.rows(1)[0], "label": "purple"}])


def test_bfloat16_works(case: Case, root: Path) -> None:
    bound = case.open(case.save(root), torch.bfloat16)
    losses = bound.loss(bound.model, bound.collate(case.rows(4)))
    assert bool(torch.isfinite(losses).all())
