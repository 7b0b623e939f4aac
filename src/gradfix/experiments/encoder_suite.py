"""The encoders suite: real sentence encoders on text tasks, from a folder that the user gives.

`--local encoders=FOLDER`: `models/NAME` holds a checkpoint folder, or `packed/NAME.safetensors` one whose matrices are
stored as bytes (`NAME|q` with a scale per row, `NAME|s`; config and tokenizer's folder in the metadata) and which is
unpacked once; `tasks/NAME` holds train, validation and test rows and one prompt per label. The pairs are those of the
pocket suite: "unrelated" trainings of one shape, and "related" ones with a common ancestor. Fine-tunes are made here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gradfix.checkpoints.write import save_tensors, staged_folder, write_text
from gradfix.data import Dataset, load_data
from gradfix.errors import CorruptInput, UsageError
from gradfix.experiments.hub_suites import HubSuite, ModelPair
from gradfix.experiments.suite import SUITES, Grid, SupportSet
from gradfix.methods.search import Search
from gradfix.tasks.base import Task
from gradfix.tasks.zero_shot import ZeroShot
from gradfix.training.finetuning import Recipe

HOME = "encoders"  # the name that --local gives the folder by
TASKS = ("movie", "amazon", "tweets", "banking")
PAIRS: Mapping[str, ModelPair] = {
    "unrelated": ModelPair("e5-l12", "gte-l12", 24.5e6, 24.5e6, 24),
    "related": ModelPair("minilm-l6", "gte-l6", 13.8e6, 13.8e6, 24),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
FULL = Grid(
    budgets=(1, 2, 5, 10, 20, 50),
    main=(1, 2, 5),
    selection=(1, 5, 20),
    curve=5,
    seeds=(0, 1, 2),
    search=Search(alphas=ALPHAS, wider=(), rates=(1e-5, 3e-5, 1e-4), steps=(5, 10, 20, 40), step_batch=32, full=True),
)
QUICK = Grid(
    budgets=(1, 5),
    main=(1, 5),
    selection=(1, 5),
    curve=5,
    seeds=(0, 1),
    search=Search(alphas=(0.2, 0.4, 0.7, 1.0), wider=(), rates=(3e-5, 1e-4), steps=(10, 20), step_batch=32, full=True),
)


@SUITES.register("encoders")
@dataclass
class EncoderSuite(HubSuite):
    """Zero-shot heads made of the label prompts; the support set of a task is another task with other labels."""

    name = "encoders"
    domain = "text"
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=400, batch_size=64, lr=2e-5))
    micro_batch: int = 64
    batch_size: int = 128
    scenes_kept = 8  # all of them: the encoders are small

    def __post_init__(self) -> None:
        if HOME not in self.local:
            raise UsageError(
                "the encoders suite needs a folder with models/ (or packed/) and tasks/; give --local encoders=FOLDER."
            )
        self.home = Path(self.local[HOME])
        self.models, self.names = PAIRS, TASKS
        self.grid = QUICK if self.quick else FULL

    def make_task(self, data: Dataset) -> Task:
        return ZeroShot(data.labels)

    def tasks(self, pair: str) -> tuple[str, ...]:
        return self.names

    def paper_model(self, pair: str) -> str:
        return "T5"

    def use(self, out: Path, stage: Callable[[str], None]) -> None:
        super().use(out, stage)
        for model in self.models.values():
            for name in (model.base, model.target):
                packed = self.home / "packed" / f"{name}.safetensors"
                if packed.is_file() and not self._stored(name) and not self._unpacked(name).is_dir():
                    stage(f"unpacking {name}")
                    unpack(packed, self._unpacked(name))

    def where(self, model: str) -> str:
        found = self._stored(model) or self._unpacked(model)
        if not found.is_dir():
            raise UsageError(
                f"there is no model {model!r} in {self.home}: neither models/{model} nor packed/{model}.safetensors. "
                f"--local {model}=FOLDER takes it from elsewhere."
            )
        return str(found)

    def _stored(self, model: str) -> Path | None:
        if model in self.local:
            return Path(self.local[model])
        own = self.home / "models" / model
        return own if own.is_dir() else None

    def _unpacked(self, model: str) -> Path:
        return self.out / "models" / model

    def data(self, task: str) -> Dataset:
        if task not in self._data:
            self._data[task] = load_data(self.local.get(task, self.home / "tasks" / task))
        return self._data[task]

    def sizes(self, task: str) -> dict[str, float]:
        data = self.data(task)
        return {**{name: len(data.splits[name]) for name in ("validation", "test")}, "classes": len(data.labels)}

    def support(self, pair: str, task: str, side: str) -> SupportSet | None:
        labels = self.data(task).labels.keys()
        other = next((name for name in self.names if self.data(name).labels.keys() != labels), None)
        if other is None:
            return None
        data, model = self.data(other), self.models[pair]
        source = self.where(model.base if side == "base" else model.target)
        return SupportSet(self.make_task(data).open(source, device=self.device), data.splits["test"])


def unpack(packed: Path, out: Path) -> None:
    """A packed model as a folder; its rounded weights are the model."""
    weights: dict[str, Tensor] = {}
    try:
        with safe_open(packed, "pt") as file:
            about = file.metadata() or {}
            for name in sorted(file.keys()):
                if name.endswith("|q"):
                    scale = file.get_tensor(f"{name[:-2]}|s").float()
                    weights[name[:-2]] = (file.get_tensor(name).float() * scale).to(torch.float16)
                elif not name.endswith("|s"):
                    weights[name] = file.get_tensor(name)
        config = json.loads(about["config"])
        lender = Path(about["tokenizer"]).name
    except Exception as error:  # safetensors has its own kinds
        raise CorruptInput(f"{packed} is not a packed model: {error}") from error
    beside = [packed.parent / lender, packed.parent.parent / "models" / lender]
    tokenizer = next((folder for folder in beside if folder.is_dir()), None)
    if tokenizer is None:
        raise UsageError(f"{packed} takes its tokenizer from {beside[1]}, which is not there.")
    with staged_folder(out) as staging:
        save_tensors(staging / "model.safetensors", weights, {"format": "pt"})
        write_text(staging / "config.json", json.dumps(config, indent=1) + "\n")
        for name in TOKENIZER:
            shutil.copy(tokenizer / name, staging / name)
