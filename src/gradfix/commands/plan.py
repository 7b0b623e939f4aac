"""`gradfix plan`: memory, disk, time and the way to run, before anything is loaded."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import torch_dtype
from gradfix.commands.configs import PlanConfig
from gradfix.commands.setting import device_of
from gradfix.errors import UsageError
from gradfix.registry import unknown
from gradfix.tasks.loading import first_line
from gradfix.votes.collect import ENGINES
from gradfix.votes.needs import (
    GIB,
    Pace,
    Shape,
    VotePlan,
    Walk,
    choose_mode,
    estimated_pass,
    measured_pace,
    plan_vote,
    shape_of,
    stream_bytes,
)


@dataclass(frozen=True)
class PlanResult:
    shape: Shape
    samples: int
    plans: list[VotePlan]
    chosen: VotePlan
    fits: bool
    disk: dict[str, int]
    available: int
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "target": asdict(self.shape),
            "samples": self.samples,
            "available_gib": round(self.available / GIB, 2),
            "modes": [plan.as_json() for plan in self.plans],
            "chosen": self.chosen.mode,
            "fits": self.fits,
            "disk": self.disk,
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                plan.mode + (" *" if plan is self.chosen else ""),
                str(plan.devices),
                f"{plan.memory / GIB:.2f} GiB",
                f"{plan.seconds:.0f} s",
                f"{plan.flops:.2e}",
            )
            for plan in self.plans
        ]


def run_plan(config: PlanConfig) -> PlanResult:
    """Only headers and config.json are read."""
    if min(config.shots, config.classes, config.devices, config.batch_size) < 1:
        raise UsageError("--shots, --classes, --devices and --batch-size must be at least 1.")
    if config.engine not in ("auto", *ENGINES):
        raise UsageError(unknown("engine", config.engine, ["auto", *ENGINES]))
    shape = shape_of(open_checkpoint(config.target), config.tokens)
    samples, dtype = config.shots * config.classes, torch_dtype(config.dtype)
    device = device_of(config.device)
    pace = Pace(config.tflops * 1e12) if config.tflops else measured_pace(device, dtype)
    available = int(config.device_memory * GIB) if config.device_memory else _memory(device)
    walk, voting, notes = _rehearsed(config, shape, dtype, device)
    common: dict[str, Any] = {
        "dtype": dtype, "batch": config.batch_size, "pace": pace, "engine": config.engine, "walk": walk,
        "voting": voting, "device": device,
    }  # fmt: skip
    plans = [plan_vote(shape, samples, **common)]
    if config.devices > 1:
        plans.append(plan_vote(shape, samples, **common, devices=config.devices, mode="data parallel"))
        for recompute in (False, True):
            plan = plan_vote(
                shape, samples, **common, devices=config.devices, mode="sharded", recompute=recompute
            )
            plans.append(plan)
    plans.append(plan_vote(shape, samples, **common, mode="offload", recompute=True))
    order = sorted(plans[:-1], key=lambda plan: plan.seconds) + plans[-1:]
    chosen = choose_mode(order, available)
    disk = stream_bytes(shape, samples)
    return PlanResult(shape, samples, plans, chosen, chosen.memory <= available, disk, available, notes)


def _rehearsed(
    config: PlanConfig, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[Walk, int | None, tuple[str, ...]]:
    """The passes walked through without weights; by formula where the model does not let itself be walked through."""
    from gradfix.commands.rehearsal import Rehearsal

    folder = open_checkpoint(config.target).path
    assert folder is not None  # it has a config.json
    try:
        rehearsal = Rehearsal.of_folder(folder, shape.tokens, dtype, device)
        walk = functools.cache(rehearsal.walk)
        walk(1)
    except Exception as error:  # whatever a model's code does without weights, the formulas still hold
        note = f"sizes by formula: the model cannot be walked through ({first_line(error)})."
        return (lambda count: estimated_pass(shape, count, dtype)), None, (note,)
    if shape.idle:  # the products of experts are not counted on the way
        formula = estimated_pass(shape, 1, dtype).flops
        return (lambda count: replace(walk(count), flops=formula * count)), rehearsal.voting, ()
    return walk, rehearsal.voting, ()


def _memory(device: str) -> int:
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
