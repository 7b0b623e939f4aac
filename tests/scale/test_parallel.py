"""Votes of several processes equal those of one, bit for bit; an error of one is one error of all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradfix.cli import run
from gradfix.errors import GradfixError
from gradfix.system import processes
from gradfix.system.processes import Group, LostProcess, in_processes, joined, report, together
from gradfix.training.steps import add_up_gradients
from gradfix.vectors.signvotes import SignVotes
from gradfix.votes import resume
from gradfix.votes.collect import collect, collect_votes
from gradfix.votes.distributed.build import SignReduceScatter
from gradfix.votes.distributed.parallel import InParallel, share_of
from gradfix.votes.engines.loop import Batches
from tiny import save_tiny, toy_texts, write_rows

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 3, 7, 12])
def test_the_shares_are_a_partition_in_order(rows, size, by_sample):
    batches = Batches(torch.tensor, list(range(rows)), 4)
    seen: list[int] = []
    for rank in range(size):
        for first, part in share_of(Group(rank, size, rank), batches, by_sample):
            assert part.tolist() == list(range(first, first + len(part)))
            assert by_sample or len(part) == min(4, rows - first)
            seen += part.tolist()
    assert seen == list(range(rows))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("world")
    write_rows(home / "data", "train", toy_texts(14))
    prompts = {"negative": "a bad poor film", "positive": "a good fine film"}
    (home / "data" / "task.json").write_text(json.dumps({"labels": prompts}))
    return {"target": save_tiny("bert", home / "target", 1), "data": home / "data"}


def _arguments(world: dict[str, Path], out: Path, *more: str) -> list[str]:
    return [
        "vote", "--target", str(world["target"]), "--data", str(world["data"]), "--task", "zero-shot",
        "--shots", "7", "--batch-size", "4", "--out", str(out), "--quiet", *more,
    ]  # fmt: skip


def test_processes_and_torchrun_give_the_bits_of_one_process(world, tmp_path):
    """14 samples in batches of 4 over 3 processes: nothing divides."""
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "three", "torchrun")]
    assert run(_arguments(world, files[0])) == 0
    assert run(_arguments(world, files[1], "--processes", "3")) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "-m", "gradfix"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, *_arguments(world, files[2])],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    one, *others = [SignVotes.load(file) for file in files]
    assert one.count == 14
    for other in others:
        assert (other.count, other.target_hash, set(other)) == (one.count, one.target_hash, set(one))
        assert all(torch.equal(other[name], one[name]) for name in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.weight.T).tanh().sum(1)


def _told(work, *arguments) -> str:
    """How a process learns of the failure: the leader by the error, the others by an exit code."""
    try:
        work(*arguments)
    except (GradfixError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _one_bad_sample(group: Group, data: torch.Tensor) -> None:
    def loss(model, x):
        return model(x) * torch.where(x[:, 0] == data[4, 0], float("nan"), 1.0)

    collect(InParallel(group, _Net(), loss, Batches(lambda rows: data[list(rows)], range(5), 2), "loop"))


def _one_bad_rank(group: Group) -> None:
    with together(group):
        if group.rank == 1:
            raise ValueError("only here")


def _with_one_bad_sample(group: Group, folder: str) -> list[tuple[int, tuple[str, ...], list[float]]]:
    """The votes undisturbed, and once more after both processes were interrupted behind their third batch."""
    data = torch.randn(300, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data[7] = float("nan")
    where = [f"train.jsonl:{number + 1}" for number in range(300)]
    batches = Batches(lambda rows: data[list(rows)], range(300), 30, where)
    resume.SAVE_EVERY_SECONDS = 0.0
    taken = iter(range(100))

    def dying(amount: int) -> None:
        if next(taken) == 2:
            raise KeyboardInterrupt

    def vote(part: Path | None = None, progress=None) -> tuple[int, tuple[str, ...], list[float]]:
        partial = None if part is None else resume.PartialVote(part)
        votes = collect(InParallel(group, _Net(), lambda m, x: m(x), batches, "loop"), partial, "", progress)
        return votes.count, votes.notes, votes["weight"].tolist()

    part = Path(folder) / f"{group.rank}.part"
    with contextlib.suppress(KeyboardInterrupt):
        vote(part, dying)
    assert part.is_file()
    again: list[int] = []
    found = [vote(), vote(part, again.append)]
    assert sum(again) == 150 - 2 * 30  # of each process's half, two batches were on disk
    return found


def _many_checks(folder: str) -> dict[str, object]:
    """One group of processes, every check in it: starting processes is what costs."""
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with joined() as group:
        found: dict[str, object] = {}
        for engine in ("loop", "batched", "auto"):
            batches = Batches(lambda rows: data[list(rows)], range(5), 2)
            asked = InParallel(group, _Net(), lambda m, x: m(x), batches, engine)
            votes = collect(asked, progress=report)
            found[engine] = (votes.count, votes["weight"].tolist())
        few = Batches(lambda rows: data[list(rows)], range(1), 2)  # fewer samples than processes
        found["few"] = collect(InParallel(group, _Net(), lambda m, x: m(x), few, "loop"))["weight"].tolist()
        found["data"] = _told(_one_bad_sample, group, data)
        found["one rank"] = _told(_one_bad_rank, group)
        found["resumed"] = _with_one_bad_sample(group, folder)
        return found


def _one_is_killed(_: object) -> None:
    with joined() as group:
        if group.rank == 1:
            os.kill(os.getpid(), 9)
        group.gather(None)


def test_one_group_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "START", "spawn")  # as outside of the tests
    steps: list[int] = []
    found = in_processes(_many_checks, str(tmp_path), 2, steps.append)
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    from gradfix import collect_votes

    expected = collect_votes(_Net(), lambda m, x: m(x), [data], engine="loop")["weight"].tolist()
    assert all(found[engine] == (5, expected) for engine in ("loop", "batched", "auto"))
    assert found["few"] == collect_votes(_Net(), lambda m, x: m(x), [data[:1]])["weight"].tolist()
    assert sum(steps) == 3 * 5
    assert (
        found["data"]
        == "DataError: 1 of 5 samples give a loss that is not finite, first sample 4: loss is nan. Repair or remove them, or compute in another --dtype."
    )
    assert found["one rank"] == "GradfixError: internal error in one of the processes: ValueError: only here"
    whole, again = found["resumed"]
    assert whole == again
    assert whole[:2] == (299, ("train.jsonl:8: loss is nan",))


def _the_other_complains(_):
    with joined() as group:
        group.gather(None)
        if group.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(0.1)
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("work", [_one_is_killed, _the_other_complains])
def test_a_killed_process_ends_the_job_with_one_line(work):
    with pytest.raises(LostProcess, match="process 1 of 2 ended without a word") as caught:
        in_processes(work, None, 2)
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


def test_bad_data_is_one_line_with_its_code_and_no_file(world, tmp_path, capfd):
    out = tmp_path / "votes.safetensors"
    arguments = _arguments(world, out, "--processes", "2")
    arguments[arguments.index("--shots") + 1] = "50"
    assert run(arguments) == 5
    assert len(capfd.readouterr().err.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_cuda, pytest.mark.cuda])])
def test_a_group_of_one_sums_over_the_backend_of_its_device(device, tmp_path, monkeypatch):
    """gloo on a processor, NCCL on a card: votes, gradients of a shared step, and the signs that a split model sends."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", processes.STARTED_HERE: str(tmp_path / "group")}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    data = torch.randn(130, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    batches = Batches(lambda rows: data[list(rows)], range(130), 50)
    loss = _Net.__call__
    expected = collect_votes(_Net().to(device), loss, list(batches), engine="loop")
    with joined() as group:
        backend = dist.group.WORLD._get_backend(torch.device(device)).name()
        found = {how: collect(InParallel(group, _Net().to(device), loss, batches, how)) for how in ("loop", "auto")}
        net = _Net().to(device)
        net(data).sum().backward()
        before = net.weight.grad.clone()
        add_up_gradients({"weight": net.weight})
        signs = torch.empty(15, dtype=torch.float64, device=device)
        SignReduceScatter()(signs, before.flatten(), dist.group.WORLD, dist.ReduceOp.SUM)
    assert backend == {"cpu": "gloo", "cuda": "nccl"}[device]
    assert all(votes.count == 130 and torch.equal(votes["weight"], expected["weight"]) for votes in found.values())
    assert torch.equal(net.weight.grad, before)
    assert torch.equal(signs, before.flatten().sign())
