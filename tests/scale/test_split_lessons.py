"""A model that lies in slices over processes learns what a whole one learns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradfix.checkpoints.slices import is_split, on_the_leader
from gradfix.cli import run
from gradfix.commands.configs import FinetuneConfig, TransportConfig
from gradfix.commands.finetune import run_finetune
from gradfix.commands.transport import run_transport
from gradfix.errors import UsageError
from gradfix.system.processes import current, in_processes, joined
from gradfix.tasks import TASKS
from gradfix.tasks.loading import split_over
from gradfix.training import finetuning
from gradfix.training.asking import Asking
from gradfix.training.free_text import FULL, LORA, Speech, asked_of, learn
from gradfix.training.imitating import Imitation
from gradfix.training.lowrank import put_together
from tests.scale.films import BASES, save_films
from tiny import save_tiny, toy_texts

TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}  # of weights after training: sums of gradients in another order
SPEECH = Speech(asking=Asking(pool=8, copies=1), imitation=Imitation(steps=4, keepsakes=2, keepsake_tokens=4, probes=4))


def in_slices(job: tuple[Callable[[Any], Any], Any]) -> Any:
    work, argument = job
    with joined() as group:
        try:
            with split_over(group, "cpu"):
                return work(argument)
        finally:
            gc.collect()


def arrays(tensors: Any) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in on_the_leader(current(), tensors).items()}


def assert_close(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert one.keys() == many.keys()
    for name, values in one.items():
        if "key.bias" not in name:  # its gradient is zero but for rounding, and AdamW makes steps of that
            torch.testing.assert_close(torch.as_tensor(many[name]), torch.as_tensor(values), **TOLERANCE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_films(tmp_path_factory.mktemp("home"))
    for name, seed in BASES:
        save_tiny("llama", folder / f"speaking-{name}", seed)
    return folder


def test_commands_write_what_one_process_writes(home):
    shared: dict[str, Any] = {"data": str(home / "data"), "task": "zero-shot", "batch_size": 4, "device": "cpu"}
    found = {}
    for way, options in (("whole", {}), ("split", {"processes": 2, "sharded": True})):
        out = home / way
        tuned = run_finetune(
            FinetuneConfig(
                model=str(home / "base"), out=str(out / "tuned"), steps=4, train_batch=8, lr=1e-3, **shared, **options
            )
        )  # fmt: skip
        moved = run_transport(
            TransportConfig(
                base=str(home / "base"), tuned=str(home / "whole" / "tuned"), target=str(home / "target"), shots=4,
                out=str(out / "best"), method="best", force=True, **shared, **options,
            )
        )  # fmt: skip
        found[way] = (tuned["test"]["accuracy"], moved.test_after["accuracy"], moved.alpha, moved.notes)
    assert found["split"] == found["whole"]
    for made in ("tuned", "best"):
        one, two = (load_file(home / way / made / "model.safetensors") for way in ("whole", "split"))
        assert_close(one, two)
    assert run(["verify", str(home / "split" / "best")]) == 0


def spoken(home: Path) -> dict[str, Any]:
    """What a student learns of open answers, in full and as a LoRA."""
    task = TASKS["causal"]()
    teacher, student = (task.open(home / f"speaking-{name}") for name in ("base", "target"))
    assert is_split(next(student.model.parameters())) == (current().size > 1)
    rows = [{"prompt": row["text"], "completion": f"{row['label']} film"} for row in toy_texts(6, 3)]
    said = asked_of(teacher, student, rows, (), speech=SPEECH)
    assert said is not None
    found = {"said": torch.tensor([token for reply in said.replies for token in reply.tokens]).numpy()}
    for way in (FULL, LORA):
        torch.manual_seed(0)
        taught = learn(student, None, rows, said, speech=replace(SPEECH, train=way))
        found |= {f"{way}/{name}": values for name, values in arrays(put_together(taught.update)).items()}
        found[f"{way} value"] = taught.parts["divergence"]
    return found


def test_open_answers_are_learned_alike(home):
    assert_close(spoken(home), in_processes(in_slices, (spoken, home), 4))


class Stop(Exception):
    """In place of a kill."""


def tuned(job: tuple[Path, int | None]) -> dict[str, Any]:
    """A fine-tune that keeps its state, and stops after so many steps."""
    home, leave = job
    steps = 0

    def progress(amount: int) -> None:
        nonlocal steps
        steps += amount
        if steps == leave:
            raise Stop

    finetuning.SAVE_EVERY_SECONDS, finetuning.SAVE_SHARE = 0.0, 1e9  # after every step
    bound = TASKS["zero-shot"]({"negative": "a bad film", "positive": "a good film"}).open(home / "base")
    try:
        finetuning.finetune(
            bound, toy_texts(12, 1), steps=5, batch_size=6, lr=1e-3, progress=progress, checkpoint=home / "state"
        )
    except Stop:
        return {}
    return arrays(dict(bound.model.named_parameters()))


def test_an_interrupted_fine_tune_goes_on_in_other_slices(home, monkeypatch):
    for name in ("SAVE_EVERY_SECONDS", "SAVE_SHARE"):
        monkeypatch.setattr(finetuning, name, getattr(finetuning, name))
    whole = tuned((home, None))
    (home / "state").unlink()
    in_processes(in_slices, (tuned, (home, 3)), 2)
    assert (home / "state").is_file()
    assert_close(whole, tuned((home, None)))


def test_what_cannot_be_split_is_refused(home):
    common: dict[str, Any] = {"data": str(home / "data"), "task": "zero-shot", "out": str(home / "no"), "sharded": True}
    with pytest.raises(UsageError, match="--sharded splits the model over processes"):
        run_finetune(FinetuneConfig(model=str(home / "base"), **common))
