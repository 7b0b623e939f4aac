"""`gradfix demo`: the whole job on the embedded models, for an unrelated and a related pair."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradfix._compat import heal_torchvision
from gradfix.commands.configs import DemoConfig
from gradfix.methods.results import Results

METHODS = ("zero_shot", "naive", "one_step", "few_shot", "gradfix", "veto", "oracle", "fine_tuned")
PAIRS = ("unrelated", "related")
# Of the shipped images, classes taking turns: enough to choose and to judge, and the demo stays under a minute.
IMAGES = {"validation": 150, "test": 400}


def run_demo(config: DemoConfig, stage: Callable[[str], None] = lambda _: None) -> Results:
    """Materialise the embedded models as real checkpoints, then compare on both pairs, a process each."""
    from gradfix import pocket
    from gradfix.report import write_report

    with tempfile.TemporaryDirectory(prefix="gradfix-demo-") as folder:
        stage("unpacking the embedded models")
        paths = pocket.materialise(folder)
        stage("comparing eight methods on two pairs of models")
        jobs = [(pair, paths[pair], paths["tasks"][pocket.PRIMARY], config) for pair in PAIRS]
        parts = _side_by_side(jobs)
    results = Results.merge(parts)
    if config.report:
        write_report(results, config.report, title="gradfix demo")
    return results


def unpack(folder: str) -> list[Path]:
    """The embedded models and tasks as ordinary folders; returns them all."""
    from gradfix import pocket
    from gradfix.errors import OutputError

    home = Path(folder)
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise OutputError(f"{home} is not empty. Choose another folder.")
    written = pocket.materialise(home)
    pairs = [path for pair in PAIRS for path in written[pair].values()]
    return [*pairs, *written["tasks"].values()]


Job = tuple[str, dict[str, Path], Path, DemoConfig]


def _side_by_side(jobs: list[Job]) -> list[Results]:
    """Small models gain nothing from more threads, so the cores are used by processes."""
    if (os.cpu_count() or 1) < len(jobs):
        return [_compare_pair(job) for job in jobs]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(jobs), mp_context=spawn) as pool:
        return list(pool.map(_compare_pair, jobs))


def _compare_pair(job: Job) -> Results:
    pair, paths, data, config = job
    heal_torchvision()
    import torch

    from gradfix.data import load_data
    from gradfix.methods.comparison import compare
    from gradfix.methods.search import Search

    torch.set_num_threads(1)
    inputs: dict[str, Any] = dict(paths)
    dataset = load_data(data)
    splits = {name: rows[: IMAGES.get(name)] for name, rows in dataset.splits.items()}
    return compare(
        **inputs,
        data=replace(dataset, splits=splits),
        task="classification",
        shots=(config.shots,),
        seeds=config.seeds,
        methods=METHODS,
        search=Search.quick(),
        batch_size=50,
        pair=pair,
        command="gradfix demo",
    )
