"""Lessons whose steps are recorded and played: with a stand-in for the card anywhere, the recording itself on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradfix
from gradfix.errors import DataError
from gradfix.system import modules
from gradfix.tasks.embedding import EmbeddingTask
from gradfix.training import relations, steps
from gradfix.training.best import best
from gradfix.training.distil import Lesson, Teaching, answers, distil
from gradfix.training.lessons import reads_alike
from gradfix.vectors.taskvector import TaskVector
from tests.arenas import NumbersBound, rows, setting
from tests.stage import setup

SHORT = 16  # steps
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keeps the function that would be recorded and plays it by calling it; tells what happened."""
    told: list[str] = []

    def capture(once: Callable[[], None]) -> Callable[[], None]:
        told.append("recorded")

        def play() -> None:
            told.append("played")
            once()

        return play

    monkeypatch.setattr(steps, "can_replay", lambda training: True)
    monkeypatch.setattr(modules, "waits_for_launches", lambda work: True)
    monkeypatch.setattr(modules, "capture", capture)
    return told


def taught(recipe: Teaching | None = None) -> TaskVector:
    pair = setting()
    tau, teacher = TaskVector.between(pair["base"], pair["tuned"]), NumbersBound(pair["tuned"])
    return best(pair["target"], tau, rows(6, 40, 0.7), teacher=teacher, recipe=recipe, seed=3).update


def close(first: TaskVector, second: TaskVector, tolerance: float) -> None:
    size = max(float(tensor.abs().max()) for tensor in first.values())
    for name, tensor in first.items():
        if name.endswith("key.bias"):  # no gradient but rounding
            continue
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=tolerance * size, msg=name)


def test_played_steps_are_the_launched_ones(monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    played = taught()
    assert card.count("recorded") == 1 and card.count("played") == Teaching().steps - steps.LAUNCHED
    monkeypatch.setattr(steps, "can_replay", lambda training: False)
    close(played, taught(), 1e-6)


def test_few_steps_are_not_worth_a_recording(card: list[str]) -> None:
    taught(Teaching(steps=steps.LAUNCHED + steps.WORTH - 1))
    assert not card


def test_what_cannot_be_recorded_is_launched(monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    def fails(once: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(modules, "capture", fails)
    found = taught()
    monkeypatch.setattr(steps, "can_replay", lambda training: False)
    close(found, taught(), 1e-6)


def test_a_busy_card_is_left_to_launches(monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    monkeypatch.setattr(modules, "waits_for_launches", lambda work: False)
    taught()
    assert not card


def test_a_loss_that_is_not_finite_names_its_step(card: list[str]) -> None:
    pair = setting()
    bound, teacher = pair["target"], NumbersBound(pair["tuned"])
    inputs = bound.collate(rows(400, 5, 0.7))
    told, drawn = answers(teacher, inputs), steps.draws(400, 52, seed=2)
    fifth = [next(drawn) for _ in range(5)][-1]
    told[fifth[0]] = torch.nan
    with pytest.raises(DataError, match="not finite in step 5 of the polish"):
        distil(bound, None, Lesson(inputs, told, inputs), 1e-3, Teaching(steps=20), 0)
    assert card.count("played") == 20 - steps.LAUNCHED


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding grows from step to step: few are enough to tell."""
    monkeypatch.setattr(relations, "Relating", partial(relations.Relating, steps=SHORT))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    setup("retrieval", folder)
    return folder


def related(home: Path, shots: int, device: str = "cpu") -> TaskVector:
    """With labelled texts among the unlabelled ones some are drawn twice in a step."""
    data = gradfix.load_data(home / "questions").splits["train"]
    bound, teacher = (EmbeddingTask({}).open(home / name, device=device) for name in ("new-base", "minilm-support"))
    tau = TaskVector.between(home / "minilm", home / "minilm-support").subset(bound.trainable())
    texts = [{"text": row["text"]} for row in data[shots : shots + 40]]
    return best(bound, tau, data[:shots], teacher=teacher, unlabelled=texts).update


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("shots", [0, 20])
def test_relations_are_played_as_well(home: Path, shots: int, monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    played = related(home, shots)
    assert card.count("played") == SHORT - steps.LAUNCHED
    monkeypatch.setattr(steps, "can_replay", lambda training: False)
    close(played, related(home, shots), 1e-3)


def test_both_sides_read_once_where_they_read_alike(home: Path) -> None:
    task = EmbeddingTask({})
    first, second = task.open(home / "new-base"), task.open(home / "minilm")
    same = (home / "new-base" / "tokenizer.json").read_bytes() == (home / "minilm" / "tokenizer.json").read_bytes()
    assert reads_alike(first, second) is same and reads_alike(first, first)
    second.encoder.lower = not first.encoder.lower
    assert not reads_alike(first, second)


@needs_cuda
@pytest.mark.usefixtures("short")
def test_a_card_plays_what_it_would_launch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    capture = modules.capture

    def counted(once: Callable[[], None]) -> Callable[[], None]:
        told.append(once)
        return capture(once)

    monkeypatch.setattr(modules, "capture", counted)
    monkeypatch.setattr(modules, "waits_for_launches", lambda work: True)
    played = {shots: related(home, shots, "cuda") for shots in (0, 20)}
    assert len(told) == 2
    monkeypatch.setattr(steps, "can_replay", lambda training: False)
    for shots, update in played.items():
        close(_on_cpu(update), _on_cpu(related(home, shots, "cuda")), 1e-2)


def _on_cpu(update: TaskVector) -> TaskVector:
    return TaskVector({name: tensor.cpu() for name, tensor in update.items()})
