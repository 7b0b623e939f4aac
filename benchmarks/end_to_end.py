"""What whole commands cost, as multiples of one ordinary pass: transport (mask), transport (best), compare (all methods).

    python -m benchmarks.end_to_end [--fieldtest FOLDER --tuned FOLDER] [--commands NAME ...] [--label after]

Pocket models always; with --fieldtest (models/ and tasks/) and --tuned (SOURCE-TASK folders, as `benchmarks.fieldtest`
makes them) a real pair of encoders too. A pass is one forward over the validation examples by the target, timed in the
same run; samples are counted at the outermost module, whoever calls it. One thread, seconds of the processor (others
may share the machine). Writes
benchmarks/results/end_to_end.json under the label; other labels in the file stay."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.parts import begun

RESULTS = Path(__file__).parent / "results" / "end_to_end.json"
KEPT = {"train": 400, "validation": 120, "test": 120}
SHOTS = {"pocket": 5, "fieldtest": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fieldtest", type=Path)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--task", default="tweets")
    parser.add_argument("--scenes", nargs="+", help="pocket-unrelated, pocket-related, fieldtest-TASK; all by default")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--label", default="after")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    content = begun(args.out, "end_to_end")
    from gradfix.checkpoints.folder import versions

    with tempfile.TemporaryDirectory() as folder:
        for name, scene in scenes(args, Path(folder)):
            for command in args.commands if args.scenes is None or name in args.scenes else ():
                found = measured(scene, COMMANDS[command], Path(folder) / f"{name}-{command}")
                told = content.setdefault(args.label, {})
                told.setdefault("versions", versions())
                told.setdefault(name, {"examples": KEPT, "shots": scene["shots"]})[command] = found
                print(
                    args.label, name, command, json.dumps({k: v for k, v in found.items() if k != "rows"}), flush=True
                )
                args.out.write_text(json.dumps(content, indent=1) + "\n")


def scenes(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from gradfix import pocket

    paths = pocket.materialise(folder / "pocket")
    data = cut(paths["tasks"][pocket.PRIMARY], folder / "images")
    for pair in pocket.PAIRS:
        yield f"pocket-{pair}", {**paths[pair], "data": data, "task": "classification", "shots": SHOTS["pocket"]}
    if args.fieldtest is not None and args.tuned is not None:
        models, old, new = args.fieldtest / "models", "minilm-l6", "gte-l6"
        yield f"fieldtest-{args.task}", {
            "base": models / old, "tuned": args.tuned / f"{old}-{args.task}", "target": models / new,
            "target_tuned": args.tuned / f"{new}-{args.task}", "task": "zero-shot", "shots": SHOTS["fieldtest"],
            "data": cut(args.fieldtest / "tasks" / args.task, folder / "texts"),
        }  # fmt: skip


def cut(source: Path, out: Path) -> Path:
    """The first examples of every split: enough to compare, few enough to wait for."""
    import pyarrow.parquet as pq

    out.mkdir(parents=True)
    (out / "task.json").write_text((source / "task.json").read_text())
    for split, count in KEPT.items():
        if (file := source / f"{split}.jsonl").exists():
            (out / file.name).write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
        else:
            pq.write_table(pq.read_table(source / f"{split}.parquet").slice(0, count), out / f"{split}.parquet")
    return out


def transport(scene: dict[str, Any], out: Path, **options: Any) -> dict[str, Any]:
    from gradfix.commands.configs import TransportConfig
    from gradfix.commands.transport import run_transport

    given = {name: str(scene[name]) for name in ("base", "tuned", "target", "data", "task")}
    result = run_transport(TransportConfig(**given, shots=scene["shots"], out=str(out), device="cpu", **options))
    assert result.test_after is not None
    return {"alpha": result.alpha, "accuracy": result.test_after["accuracy"]}


def compared(scene: dict[str, Any], out: Path, **options: Any) -> dict[str, Any]:
    from gradfix.commands.compare import run_compare
    from gradfix.commands.configs import CompareConfig

    given = {name: str(scene[name]) for name in ("base", "tuned", "target", "target_tuned", "data", "task")}
    results = run_compare(
        CompareConfig(**given, shots=(scene["shots"],), seeds=(0,), work=str(out), device="cpu", **options)
    )
    names = ("method", "alpha", "margin", "accuracy", "validation_accuracy", "seconds")
    rows = [{name: row[name] for name in names} for row in results.rows]
    return {"verdict": results.verdict["method"], "advice": results.verdict["advice"], "rows": rows}


COMMANDS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "transport_mask": lambda scene, out: transport(scene, out, mask="agree"),
    "transport_mask_folds": lambda scene, out: transport(scene, out, mask="agree", validation="none"),
    "transport_best": lambda scene, out: transport(scene, out, method="best"),
    "compare": compared,
    "compare_folds": lambda scene, out: compared(scene, out, validation="none"),
}


def measured(
    scene: dict[str, Any], work: Callable[[dict[str, Any], Path], dict[str, Any]], out: Path
) -> dict[str, Any]:
    """Seconds and samples of one command, and of one pass right before it."""
    seconds, samples = one_pass(scene)
    with counted() as seen:
        begin, wall = time.process_time(), time.perf_counter()
        found = work(scene, out)
        spent, waited = time.process_time() - begin, time.perf_counter() - wall
    return {
        "seconds": round(spent, 2), "wall_seconds": round(waited, 2), "samples": seen[0], "pass_seconds": round(seconds, 3), "pass_samples": samples,
        "seconds_ratio": round(spent / seconds, 2), "samples_ratio": round(seen[0] / samples, 2), **found,
    }  # fmt: skip


def one_pass(scene: dict[str, Any]) -> tuple[float, int]:
    import gradfix.tasks  # noqa: F401
    from gradfix.data import load_data
    from gradfix.tasks.base import TASKS
    from gradfix.tasks.scoring import evaluate

    dataset = load_data(scene["data"])
    bound = TASKS[scene["task"]](dataset.labels).open(scene["target"])
    batches = list(bound.scoring_batches(dataset.splits["validation"], 16))
    evaluate(bound.model, bound, batches[:1])
    begin = time.process_time()
    evaluate(bound.model, bound, batches)
    return time.process_time() - begin, len(dataset.splits["validation"])


@contextmanager
def counted() -> Iterator[list[int]]:
    """Samples that enter any model from outside."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    seen, inside = [0], [0]

    def enter(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        inside[0] += 1

    def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inside[0] -= 1
        if not inside[0]:
            tensor = _first_tensor(output)
            seen[0] += 0 if tensor is None else len(tensor)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _first_tensor(output: Any) -> Any:
    import torch

    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)


if __name__ == "__main__":
    main()
