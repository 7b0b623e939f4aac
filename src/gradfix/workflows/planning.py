"""`gradfix plan`: memory, disk, time and the way to run, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import torch_dtype
from gradfix.errors import UsageError
from gradfix.planning import (
    GIB,
    Pace,
    Shape,
    VotePlan,
    choose_mode,
    measured_pace,
    plan_vote,
    shape_of,
    stream_bytes,
)
from gradfix.workflows.configs import PlanConfig
from gradfix.workflows.setting import device_of


@dataclass(frozen=True)
class PlanResult:
    shape: Shape
    samples: int
    plans: list[VotePlan]
    chosen: VotePlan
    fits: bool
    disk: dict[str, int]
    available: int

    def as_json(self) -> dict[str, Any]:
        return {
            "target": asdict(self.shape),
            "samples": self.samples,
            "available_gib": round(self.available / GIB, 2),
            "modes": [plan.as_json() for plan in self.plans],
            "chosen": self.chosen.mode,
            "fits": self.fits,
            "disk": self.disk,
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
    shape = shape_of(open_checkpoint(config.target), config.tokens)
    samples, dtype = config.shots * config.classes, torch_dtype(config.dtype)
    device = device_of(config.device)
    pace = Pace(config.tflops * 1e12) if config.tflops else measured_pace(device, dtype)
    available = int(config.device_memory * GIB) if config.device_memory else _memory(device)
    common: dict[str, Any] = {"dtype": dtype, "batch": config.batch_size, "pace": pace}
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
    return PlanResult(
        shape, samples, plans, chosen, chosen.memory <= available, stream_bytes(shape, samples), available
    )


def _memory(device: str) -> int:
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
