"""Processes that share scores, votes and steps choose and train what one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arenas import setting
from gradfix.commands.compare import run_compare
from gradfix.commands.configs import CompareConfig, EvaluateConfig, FinetuneConfig, TransportConfig
from gradfix.commands.evaluate import run_evaluate
from gradfix.commands.finetune import run_finetune
from gradfix.commands.transport import run_transport
from gradfix.methods.comparison import compare
from gradfix.methods.search import Search
from gradfix.system.processes import Group, current, in_processes, joined, sharing
from gradfix.training import finetuning
from tests.lessons import shorten
from tests.scale.films import save_films
from tiny import save_tiny

METHODS = ("naive", "gradfix", "veto", "few_shot", "best")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # of weights after training: sums of gradients in another order


def in_a_group(job: tuple[Callable[[Any], Any], Any]) -> Any:
    work, argument = job
    with joined() as group, sharing(group):
        return work(argument)


def compared(regime: str) -> list[dict[str, Any]]:
    given = setting()
    search = Search(steps=(2, 4), rates=(1e-3, 1e-2), folds=2)
    results = compare(**given, methods=METHODS, shots=(4,), validation=regime, search=search, batch_size=8)
    return results.rows


def close(one: Any, other: Any, rel: float = 1e-3) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=rel, abs=1e-6)
    return one == other


@pytest.mark.parametrize(("count", "regime"), [(2, "none"), (4, "auto")])
def test_a_comparison_has_the_rows_of_one_process(count, regime):
    one = compared(regime)
    many = in_processes(in_a_group, (compared, regime), count)
    exact = ("method", "alpha", "margin", "accuracy", "validation_accuracy", "steps", "samples", "flops", "kept")
    assert len(one) == len(many)
    for mine, theirs in zip(one, many, strict=True):
        assert {name: mine.get(name) for name in exact} == {name: theirs.get(name) for name in exact}
        assert all(close(mine[name], theirs[name]) for name in mine if name != "seconds")


def test_pieces_and_turns_cover_everything_once():
    for size in (1, 2, 3, 5):
        group = Group(0, size, 0)
        assert [item for piece in group.pieces(range(4)) for item in piece] == [0, 1, 2, 3]
        assert all(group.pieces(range(4)))
    assert current().each(str, [3, 1, 2]) == ["3", "1", "2"]


def by_commands(home: Path) -> dict[str, Any]:
    """Fine-tune, score, compare and transport as the commands do, in the processes there are."""
    if current().size > 1:
        shorten()
    out = home / f"of-{current().size}"
    shared: dict[str, Any] = {"data": str(home / "data"), "task": "zero-shot", "batch_size": 4, "device": "cpu"}
    tuned = FinetuneConfig(
        model=str(home / "base"), out=str(out / "tuned"), steps=6, train_batch=8, lr=1e-3, overwrite=True, **shared
    )
    trio: dict[str, Any] = {"base": str(home / "base"), "tuned": str(home / "tuned"), "target": str(home / "target")}
    moved = TransportConfig(**trio, out=str(out / "best"), shots=4, method="best", force=True, **shared)
    masked = TransportConfig(**trio, out=str(out / "mask"), shots=4, mask="agree", force=True, **shared)
    many = CompareConfig(**trio, shots=(4,), methods=("gradfix", "few_shot"), work=str(out / "work"), **shared)
    plain = [getattr(run, "__wrapped__", run) for run in (run_finetune, run_evaluate, run_transport, run_compare)]
    fine_tune, evaluate, transport, compare_all = plain
    found = {"finetune": fine_tune(tuned)["test"]}
    found["evaluate"] = evaluate(EvaluateConfig(model=str(home / "base"), **shared))["accuracy"]
    found["best"] = transport(moved).test_after
    chosen = transport(masked)
    found["mask"] = (chosen.alpha, chosen.curve, chosen.test_after)
    found["compare"] = [(r["method"], r["alpha"], r["accuracy"]) for r in compare_all(many).rows]
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_films(tmp_path_factory.mktemp("home"))
    run_finetune(
        FinetuneConfig(
            model=str(folder / "base"), out=str(folder / "tuned"), data=str(folder / "data"), task="zero-shot",
            steps=4, train_batch=8, lr=1e-3, device="cpu",
        )
    )  # fmt: skip
    return folder


def assert_alike(theirs: torch.Tensor, mine: torch.Tensor) -> None:
    """All but one entry in five hundred within the tolerance, and the whole far closer than that.

    Single entries have gradients that cancel but for rounding, and AdamW makes steps of those, on some processors more than on others."""
    odd = ~torch.isclose(theirs, mine, **TOLERANCE)
    assert int(odd.sum()) <= mine.numel() / 500
    torch.testing.assert_close(theirs[~odd], mine[~odd], **TOLERANCE)
    assert float((theirs - mine).norm()) <= 1e-5 * float(mine.norm())


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.usefixtures("short_lessons")
def test_commands_write_and_say_what_one_process_does(home):
    one = by_commands(home)
    two = in_processes(in_a_group, (by_commands, home), 2)
    assert two["mask"][0] == one["mask"][0] and two["evaluate"] == one["evaluate"]
    assert two["compare"] == one["compare"]
    for name in ("finetune", "best"):
        assert two[name]["accuracy"] == one[name]["accuracy"]
        assert two[name]["loss"] == pytest.approx(one[name]["loss"], rel=1e-4)
    for made in ("tuned", "best", "mask"):
        mine, theirs = (weights_of(home / f"of-{count}" / made) for count in (1, 2))
        for name, tensor in mine.items():
            if "key.bias" not in name:  # its gradient is zero but for rounding, and AdamW makes steps of that
                assert_alike(theirs[name], tensor)
    units = [sorted(path.name for path in (home / f"of-{count}" / "work" / "units").iterdir()) for count in (1, 2)]
    assert units[0] == units[1]


def test_processes_tell_where_they_are_as_one_does(home):
    class Told(list[str]):
        def __call__(self, step: str) -> None:
            self.append(step)

        def update(self, text: str) -> None:
            assert text.startswith("writing ")

    heard = {}
    for count in (1, 2):
        heard[count] = Told()
        run_transport(
            TransportConfig(
                base=str(home / "base"), tuned=str(home / "tuned"), target=str(home / "target"), shots=2, mask="agree",
                data=str(home / "data"), task="zero-shot", alpha="1", force=True, out=str(home / f"told-{count}"),
                device="cpu", processes=count,
            ),
            heard[count],
        )  # fmt: skip
    assert heard[2] == heard[1] and heard[1][0] == "reading examples" and heard[1][-1] == "writing"
    counted: list[int] = []
    run_finetune(
        FinetuneConfig(
            model=str(home / "base"), out=str(home / "counted"), data=str(home / "data"), task="zero-shot", steps=3,
            train_batch=8, device="cpu", processes=2,
        ),
        counted.append,
    )  # fmt: skip
    assert counted == [1, 1, 1]


class Stop(Exception):
    """In place of a kill."""


def interrupted(job: tuple[Path, int | None]) -> None:
    """Fine-tune with a state beside it; leave behind so many steps."""
    state, leave = job
    given, steps = setting(), 0

    def progress(amount: int) -> None:
        nonlocal steps
        steps += amount
        if steps == leave:
            raise Stop

    finetuning.SAVE_EVERY_SECONDS, finetuning.SAVE_SHARE = 0.0, 1e9  # after every step
    try:
        finetuning.finetune(
            given["target"], given["data"].splits["train"], steps=6, batch_size=12, lr=1e-2, progress=progress,
            checkpoint=state,
        )  # fmt: skip
    except Stop:
        return
    if current().leads:
        torch.save(given["target"].model.state_dict(), state.with_suffix(".pt"))


def test_a_fine_tune_goes_on_with_another_number_of_processes(tmp_path, monkeypatch):
    for name in ("SAVE_EVERY_SECONDS", "SAVE_SHARE"):
        monkeypatch.setattr(finetuning, name, getattr(finetuning, name))
    interrupted((tmp_path / "whole", None))
    in_processes(in_a_group, (interrupted, (tmp_path / "cut", 3)), 2)
    assert (tmp_path / "cut").is_file()
    interrupted((tmp_path / "cut", None))
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, **TOLERANCE)


def related_texts() -> list[dict[str, str]]:
    kinds = {"animals": "cat dog horse cow", "tools": "hammer saw drill knife", "food": "bread rice soup cheese"}
    return [
        {"text": f"{word} {end}", "label": label}
        for end in ("here", "there now", "again and again")
        for label, words in kinds.items()
        for word in words.split()
    ]


def retriever(folder: Path) -> dict[str, Any]:
    """A few steps that contrast all texts of a batch, by both trainings."""
    from gradfix.tasks.base import TASKS

    bound = TASKS["embedding"]({}).open(folder, device="cpu")
    finetuning.finetune(bound, related_texts(), steps=3, batch_size=9, lr=1e-3)
    losses = [loss for _, _, loss in finetuning.tune(
        bound, bound.linked(related_texts()), rate=1e-3, stops=(1, 2), batch=7, seed=1
    )]  # fmt: skip
    weights = {name: p.detach().numpy() for name, p in bound.model.named_parameters() if "key.bias" not in name}
    return {**weights, "losses": losses}


def test_a_retriever_contrasts_all_texts_of_a_step_whoever_reads_them(tmp_path):
    save_tiny("bert", tmp_path, 1)
    one, many = retriever(tmp_path), in_processes(in_a_group, (retriever, tmp_path), 2)
    for name, values in one.items():
        torch.testing.assert_close(torch.as_tensor(many[name]), torch.as_tensor(values), **TOLERANCE)
