"""`gradfix demo`: the whole job on the embedded models, for an unrelated and a related pair."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradfix._compat import heal_torchvision
from gradfix.commands.configs import DemoConfig
from gradfix.methods.results import Results
from gradfix.system import processes
from gradfix.system.meter import Countdown

METHODS = ("zero_shot", "naive", "few_shot", "gradfix", "best", "fine_tuned")
PAIRS = ("unrelated", "related")
# Of the shipped images, classes taking turns: enough to choose and to judge, and the demo stays under a minute.
IMAGES = {"validation": 250, "test": 400}


def run_demo(config: DemoConfig, stage: Callable[..., None] = lambda *_: None) -> Results:
    """Materialise the embedded models as real checkpoints, then compare on both pairs, a process each."""
    from gradfix import pocket
    from gradfix.report import write_report

    with tempfile.TemporaryDirectory(prefix="gradfix-demo-") as folder:
        stage("unpacking the embedded models")
        paths = pocket.materialise(folder)
        jobs = [(pair, paths[pair], paths["tasks"][pocket.PRIMARY], config) for pair in PAIRS]
        parts = _side_by_side(jobs, stage)
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
Told = tuple[str, str, int, int]  # pair, what is done now, units done, units in all


def _side_by_side(jobs: list[Job], stage: Callable[..., None]) -> list[Results]:
    """Small models gain nothing from more threads, so the cores are used by processes."""
    done: dict[str, int] = {}
    countdown = Countdown(stage)

    def tell(told: Told) -> None:
        pair, what, done[pair], total = told
        whole = total * len(jobs)  # both pairs run the same methods
        stage(countdown.text(f"{pair} pair: {what}", sum(done.values()), whole), pair)

    if (os.cpu_count() or 1) < len(jobs):
        return [_compare_pair(job, tell) for job in jobs]
    context: Any = multiprocessing.get_context(processes.START)
    news: Any = context.Queue()
    with ProcessPoolExecutor(len(jobs), mp_context=context, initializer=_listen, initargs=(news,)) as pool:
        futures = [pool.submit(_compare_pair, job) for job in jobs]
        while not all(future.done() for future in futures):
            with contextlib.suppress(queue.Empty):
                tell(news.get(timeout=0.2))
        return [future.result() for future in futures]


_news: list[Any] = []  # in a process of the pool: where to tell how far it is


def _listen(news: Any) -> None:
    _news.append(news)


def _compare_pair(job: Job, tell: Callable[[Told], None] | None = None) -> Results:
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
    say = tell if tell is not None else _news[0].put if _news else lambda _: None
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
        progress=lambda what, done, total: say((pair, what, done, total)),
    )
