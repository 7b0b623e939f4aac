"""Suites that fine-tune their models; and the paper's own: open_clip ViTs on five image tasks, T5 on five text tasks.

Models and datasets come from the hub, or from local folders that stand in for them. The old base (and, for the
oracle, the target) is fine-tuned with the suite's recipe, the paper's own by default; fine-tunes are kept in the out
folder and an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gradfix._version import __version__
from gradfix.checkpoints.folder import save_like
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.data import Dataset
from gradfix.experiments import paper
from gradfix.experiments.paper import Declared
from gradfix.experiments.suite import SUITES, Estimate, Grid, Scene, Suite, SupportSet
from gradfix.methods.opening import lenders_of, vector_of
from gradfix.methods.search import Search
from gradfix.methods.trial import Passes, Splits, Trial
from gradfix.system.meter import telling_more
from gradfix.tasks.base import Task
from gradfix.tasks.seq2seq import Seq2Seq
from gradfix.tasks.zero_shot import ZeroShot
from gradfix.training.finetuning import Recipe, finetune
from gradfix.vectors.taskvector import TaskVector

SPEED = {"cuda": 6e13, "cpu": 5e10}  # operations per second, for the guess only
TAUGHT = 2500  # samples that lessons and maps pass over, for the guess only
FEW = Search(wider=(), rates=(1e-6, 1e-5, 1e-4), steps=(5, 10, 20, 40), step_batch=32, full=True)


@dataclass(frozen=True)
class ModelPair:
    """A pair of checkpoints of one architecture; sizes are for the estimate."""

    base: str
    target: str
    trained: float  # weights that fine-tuning moves
    held: float  # all weights of the file
    tokens: float
    sources: tuple[str, ...] = ()


def _silent(_: str) -> None:
    """Nobody is told: another process cannot reach the terminal."""


@dataclass
class HubSuite(Suite):
    """Checkpoints by name, fine-tuned here. `local` maps hub names of models and datasets to folders."""

    quick: bool = False
    local: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    micro_batch: int = 32
    batch_size: int = 64
    out: Path = Path("gradfix-reproduce")
    scenes_kept = 2  # a large model and its vectors take gigabytes
    asks_first = True
    models: Mapping[str, ModelPair] = field(default_factory=dict, init=False)
    datasets: Mapping[str, Declared] = field(default_factory=dict, init=False)
    _data: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)
    _stage: Callable[[str], None] = field(default=_silent, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what was loaded stays here."""
        return {**vars(self), "_data": {}, "_stage": _silent}

    def make_task(self, data: Dataset) -> Task:
        raise NotImplementedError

    @property
    def pairs(self) -> tuple[str, ...]:
        return tuple(self.models)

    def tasks(self, pair: str) -> tuple[str, ...]:
        return tuple(self.datasets)

    def paper_model(self, pair: str) -> str:
        return pair

    def use(self, out: Path, stage: Callable[[str], None]) -> None:
        self.out, self._stage = out, stage

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def data(self, task: str) -> Dataset:
        if task not in self._data:
            self._data[task] = paper.load(self.datasets[task], self.local)
        return self._data[task]

    def where(self, model: str) -> str:
        return self.local.get(model, model)

    def open(self, pair: str, task: str) -> Scene:
        model, data = self.models[pair], self.data(task)
        opener = self.make_task(data)
        base, target = self.where(model.base), self.where(model.target)
        tuned = self.finetuned(model.base, task)
        bound = opener.open(target, device=self.device)
        trio = Trio.open(base, tuned, target)
        trial = Trial(
            bound,
            vector_of(trio),
            Splits(*(data.splits[name] for name in ("train", "validation", "test"))),
            search=self.grid.search,
            passes=Passes(batch_size=self.batch_size, allow_fewer=True),
            lenders=replace(
                lenders_of(trio, bound, opener),
                tuned_target=lambda: TaskVector.between(target, self.finetuned(model.target, task)),
            ),
        )
        weights = dict(bound.model.named_parameters())
        size = sum(weights[name].numel() for name in bound.trainable())
        samples = len(data.splits["train"]) + len(data.splits["validation"])
        old = partial(opener.open, base, device=self.device)
        return Scene(trial, old, samples, len(data.labels), size, model.tokens)

    def finetuned(self, model: str, task: str) -> Path:
        """The checkpoint of a base fine-tuned on a task: from the out folder, or made now."""
        data = self.data(task)
        sizes = {name: len(rows) for name, rows in data.splits.items()}
        made_of = repr((self.where(model), asdict(self.recipe), sizes))
        key = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.-]+", "-", f"{model}-{task}") + f"-{key}"
        folder = self.out / "checkpoints" / name
        if folder.is_dir():
            return folder
        bound = self.make_task(data).open(self.where(model), device=self.device)
        part = folder.with_name(f".{name}.finetune")
        part.parent.mkdir(parents=True, exist_ok=True)
        finetune(
            bound, data.splits["train"], checkpoint=part, micro_batch=self.micro_batch,
            progress=self._steps(f"fine-tuning {model} on {task}"), recipe=self.recipe,
        )  # fmt: skip
        source, made = open_checkpoint(self.where(model)), {"recipe": asdict(self.recipe)}
        save_like(source, bound.model, folder, details=made, extras=bound.save_extras)
        part.unlink(missing_ok=True)
        return folder

    def _steps(self, what: str) -> Callable[[int], None]:
        done = 0

        def tell(more: int) -> None:
            nonlocal done
            done += more
            telling_more(self._stage)(f"{what}: step {done} of {self.recipe.steps}")

        return tell

    def identity(self) -> dict[str, Any]:
        return {
            "suite": self.name,
            "version": __version__,
            "recipe": asdict(self.recipe),
            "search": asdict(self.grid.search),
            "local": sorted(self.local.items()),
            "device": self.device,
        }

    def estimate(self, questions: Sequence[Any]) -> Estimate:
        """Fine-tunes, votes and evaluations, from the declared sizes."""
        trained = self._trained(questions)
        work = sum(6 * self._pass(p) * self.recipe.steps * self.recipe.batch_size for _, _, p in trained)
        for question in questions:
            for pair, task in self._scenes(question):
                work += self._pass(pair) * self._passes(question, task)
        disk = int(sum(4 * self.models[p].held for _, _, p in trained))
        seconds = work / SPEED[self.device]
        words = (
            f"{len(trained)} fine-tunes of {self.recipe.steps} steps and {len(questions)} measurements: "
            f"{work:.1e} floating-point operations, very roughly {seconds / 3600:.1f} hours on this {self.device}, "
            f"{disk / 2**30:.0f} GB for checkpoints (downloads come on top)."
        )
        return Estimate(work, seconds, disk, words)

    def fine_tunes(self, questions: Sequence[Any]) -> list[tuple[str, str]]:
        return list(dict.fromkeys((model, task) for model, task, _ in sorted(self._trained(questions))))

    def _trained(self, questions: Sequence[Any]) -> set[tuple[str, str, str]]:
        """Model, task and pair of every fine-tune."""
        trained = {(self.models[p].base, t, p) for q in questions for p, t in self._scenes(q)}
        trained |= {(self.models[p].target, t, p) for _, t, p in trained}
        for question in questions:
            if question.get("setting") == "sources":
                model = self.models[self.pairs[0]]
                trained |= {(source, question.get("task"), self.pairs[0]) for source in model.sources}
        return trained

    def _scenes(self, question: Any) -> list[tuple[str, str]]:
        pair, task = question.get("pair"), question.get("task")
        return [(pair, task)] if task is not None else [(pair, name) for name in self.tasks(pair)]

    def _pass(self, pair: str) -> float:
        """P times tokens: half a forward pass."""
        return self.models[pair].trained * self.models[pair].tokens

    def _passes(self, question: Any, task: str) -> float:
        sizes = self.sizes(task)
        shots = (question.get("shots") or 0) * sizes["classes"]
        scored = len(self.grid.search.alphas) * sizes["validation"] + sizes["test"]
        taught = TAUGHT if question.get("method") in ("best", "bico") else 0
        return 6 * (shots + taught) + 2 * scored

    def sizes(self, task: str) -> dict[str, float]:
        """Examples that choose and judge, and classes, as declared: for the estimate."""
        data = self.datasets[task]
        validation = min(paper.VALIDATION_MOST, data.size[0] * paper.VALIDATION_SHARE)
        return {"validation": validation, "test": data.size[1], "classes": data.class_count}


def _grid(quick: bool, budgets: tuple[int, ...], main: tuple[int, ...], curve: int) -> Grid:
    if quick:
        main = main[:1] if len(main) == 1 else (main[0], main[-1])
        return Grid(budgets=main, main=main, selection=main, curve=curve, seeds=(0, 1), search=FEW)
    selection = tuple(k for k in budgets if k <= 20) or budgets
    return Grid(budgets=budgets, main=main, selection=selection, curve=curve, seeds=(0, 1, 2), search=FEW)


B16, L14 = "open_clip:ViT-B-16/", "open_clip:ViT-L-14/"
SOURCE_TAGS = (
    "datacomp_xl_s13b_b90k",
    "datacomp_l_s1b_b8k",
    "laion400m_e32",
    "commonpool_l_clip_s1b_b8k",
    "commonpool_l_laion_s1b_b8k",
)
"""The paper uses five sources without naming them; these are five released ViT-B-16 of one architecture."""

OPEN_CLIP: Mapping[str, ModelPair] = {
    "ViT-B-16": ModelPair(B16 + "datacomp_xl_s13b_b90k", B16 + "laion2b_s34b_b88k", 86e6, 150e6, 197,
                          tuple(B16 + tag for tag in SOURCE_TAGS)),
    "ViT-L-14": ModelPair(L14 + "datacomp_xl_s13b_b90k", L14 + "laion2b_s32b_b82k", 304e6, 428e6, 257),
}  # fmt: skip


@SUITES.register("openclip")
@dataclass
class OpenClipSuite(HubSuite):
    """CLIP ViT-B/16 and ViT-L/14; the text tower is frozen and makes the zero-shot head once."""

    name = "openclip"
    domain = "vision"

    def __post_init__(self) -> None:
        self.models, self.datasets = OPEN_CLIP, paper.VISION
        self.grid = _grid(self.quick, (1, 2, 5, 10, 20, 50), (1, 2, 5), 5)

    def make_task(self, data: Dataset) -> Task:
        return ZeroShot(data.labels)

    @cached_property
    def _support_data(self) -> Dataset:
        return paper.load(paper.IMAGENET_R, self.local)

    def support(self, pair: str, task: str, side: str) -> SupportSet:
        data, model = self._support_data, self.models[pair]
        source = model.base if side == "base" else model.target
        bound = self.make_task(data).open(self.where(source), device=self.device)
        return SupportSet(bound, data.splits["test"])

    def source_tasks(self) -> tuple[str, ...]:
        return self.tasks(self.pairs[0])

    def sources(self, task: str) -> list[TaskVector]:
        names = self.models[self.pairs[0]].sources
        return [TaskVector.between(self.where(name), self.finetuned(name, task)) for name in names]


T5: Mapping[str, ModelPair] = {"T5": ModelPair("google/t5-v1_1-base", "google/flan-t5-base", 248e6, 248e6, 64)}


@SUITES.register("t5")
@dataclass
class T5Suite(HubSuite):
    """T5 v1.1 to FLAN-T5; answers are the likeliest label text of a closed vocabulary."""

    name = "t5"
    domain = "text"

    def __post_init__(self) -> None:
        self.models, self.datasets = T5, paper.TEXT
        self.grid = _grid(self.quick, (50,), (50,), 50)

    def make_task(self, data: Dataset) -> Task:
        return Seq2Seq(data.labels, max_length=256)
