"""Train the embedded models and write the files the package ships.

    python -m scripts.pocket.train --idx FOLDER --out FOLDER [--device cuda|cpu] [--quick]

FOLDER holds Fashion-MNIST's four idx files, plain or gzipped. The script pre-trains three bases,
scores them on every corruption, fine-tunes them on those that lie in range, measures naive addition
and the masked transport, picks three tasks and a primary one, and writes weights, images and
figures.json with everything it tried. Tasks are ranked on held-out test images that are not shipped;
the shipped ones only have to confirm the choice. About four minutes on one GPU."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import transformers

import scripts.pocket.candidates  # noqa: F401  the corruptions that were not chosen
from gradfix.pocket import shipped
from gradfix.pocket.corruptions import CORRUPTIONS
from gradfix.vectors.masks import keep_agreeing
from scripts.pocket import writing
from scripts.pocket.fit import Corpus, FitRecipe, Images, Weights, Workbench, split_corpus

SHOTS = 5
BASE_LEVELS, TASK_LEVELS = 8, 3
SIZE_LIMIT = 9_500_000  # bytes of everything shipped

# Which corruptions become tasks is a rule over measured figures, so that nobody picks by taste. Ranking uses the
# held-out images that are not shipped ("dev"); the shipped test images must confirm.
ZERO_SHOT = (20.0, 60.0)
FINE_TUNED = 75.0
NAIVE_WITHIN = 3.0
GRADFIX_ABOVE = 10.0
TARGETS = ("B_unrelated", "B_related")

PRETRAIN = FitRecipe(steps=3000, lr=1e-3, warmup=300, weight_decay=0.05, batch=512, shift=1, flip=True, head=True)
ANCESTOR = replace(PRETRAIN, steps=2000)
RELEASE_A = replace(PRETRAIN, steps=1000, lr=5e-4, warmup=100)
RELEASE_B = replace(RELEASE_A, shift=3, flip=False)
FINETUNE = tuple(FitRecipe(steps=1000, lr=lr, warmup=100) for lr in (1e-4, 3e-4, 5e-5))


@dataclass(frozen=True)
class Scope:
    """How much of everything: the whole study, or just enough of it to run every line."""

    per_class: dict[str, int] = field(default_factory=lambda: {"train": 50, "validation": 25, "test": 60})
    dev: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    alphas: tuple[float, ...] = tuple(round(0.1 * step, 1) for step in range(1, 11))
    more_alphas: tuple[float, ...] = (0.0, 1.5, 2.0, 3.0)
    training: dict[str, Any] = field(default_factory=dict)
    tasks: int | None = None
    recipes: tuple[FitRecipe, ...] = FINETUNE

    @property
    def wide(self) -> tuple[float, ...]:
        return tuple(sorted(self.alphas + self.more_alphas))


QUICK = Scope(
    per_class={"train": 5, "validation": 3, "test": 3},
    dev=30,
    seeds=(0,),
    alphas=(0.5, 1.0),
    more_alphas=(0.0,),
    training={"steps": 12, "warmup": 2, "batch": 32},
    tasks=3,
    recipes=FINETUNE[:1],
)


class Study:
    """Bases, corrupted data and scores of one run."""

    def __init__(self, lab: Workbench, corpus: Corpus, bases: dict[str, Weights], scope: Scope, clock: Clock) -> None:
        self.lab, self.corpus, self.bases, self.scope, self.clock = lab, corpus, bases, scope, clock
        self._directions: dict[tuple[str, str, int], Weights] = {}

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a study lives as long as the process
    def data(self, task: str, part: str) -> Images:
        images, labels = (self.corpus.shipped | self.corpus.parts)[part]
        return self.lab.images(CORRUPTIONS[task](images), labels)

    def accuracy(self, weights: Weights, task: str) -> dict[str, float]:
        return {part: round(self.lab.accuracy(weights, self.data(task, part)), 2) for part in ("test", "dev")}

    def zero_shot(self, task: str) -> dict[str, dict[str, float]]:
        return {name: self.accuracy(weights, task) for name, weights in self.bases.items()}

    def tune(self, task: str, recipe: FitRecipe) -> dict[str, shipped.Coded]:
        """Fine-tune every base and code the difference."""
        coded = {}
        for number, (name, base) in enumerate(self.bases.items()):
            tuned = self.lab.fit(base, self.data(task, "all"), recipe, seed=100 + number)
            coded[name] = writing.quantise(self.lab.to_disk(base), self.lab.to_disk(tuned), TASK_LEVELS)
        return coded

    def restore(self, coded: dict[str, shipped.Coded]) -> dict[str, Weights]:
        states = {name: shipped.restore(self.lab.to_disk(self.bases[name]), code) for name, code in coded.items()}
        return {name: self.lab.from_disk(state) for name, state in states.items()}

    def direction(self, target: str, task: str, seed: int) -> Weights:
        """The target's vote on `SHOTS` examples per class; independent of any task vector, so kept."""
        key = (target, task, seed)
        if key not in self._directions:
            images, labels = self.data(task, "train")
            generator = np.random.default_rng(seed)
            numbers = labels.cpu().numpy()
            picked = [generator.choice(np.flatnonzero(numbers == c), SHOTS, replace=False) for c in range(10)]
            index = torch.from_numpy(np.concatenate(picked)).to(self.lab.device)
            self._directions[key] = self.lab.votes(self.bases[target], (images[index], labels[index]))
        return self._directions[key]

    def moves(self, target: str, update: Weights, task: str) -> dict[str, dict[str, float]]:
        """Scores of target + alpha * update: alpha 1, and the best of two grids on validation."""
        base = self.bases[target]

        def moved(alpha: float) -> Weights:
            return {name: value + alpha * update[name] for name, value in base.items()}

        validation = self.data(task, "validation")
        curve = {alpha: self.lab.accuracy(moved(alpha), validation) for alpha in self.scope.wide}
        chosen = {"at_1": 1.0, "paper": max(self.scope.alphas, key=curve.__getitem__)}
        chosen["wide"] = max(self.scope.wide, key=curve.__getitem__)
        scores = {alpha: self.accuracy(moved(alpha), task) for alpha in set(chosen.values())}
        return {grid: scores[alpha] | {"alpha": alpha} for grid, alpha in chosen.items()}

    def pair(self, source: str, target: str, task: str, tuned: dict[str, Weights]) -> dict[str, Any]:
        """Naive addition, masked transport over the seeds, and the oracle."""
        tau = {name: tuned[source][name] - value for name, value in self.bases[source].items()}
        tau_target = {name: tuned[target][name] - value for name, value in self.bases[target].items()}
        naive = self.moves(target, tau, task)
        directions = [self.direction(target, task, seed) for seed in self.scope.seeds]
        masked = [self.moves(target, _agree(tau, direction), task) for direction in directions]
        return {
            "naive_at_1": naive["at_1"],
            "naive": naive["paper"],
            "naive_wide": naive["wide"],
            "gradfix": [row["paper"] for row in masked],
            "gradfix_wide": [row["wide"] for row in masked],
            "oracle": self.moves(target, _agree(tau, tau_target), task)["paper"],
        }

    def candidate(self, task: str, recipe: FitRecipe, coded: dict[str, shipped.Coded]) -> dict[str, Any]:
        tuned = self.restore(coded)
        figures: dict[str, Any] = {
            "task": task,
            "lr": recipe.lr,
            "zero_shot": self.zero_shot(task),
            "fine_tuned": {name: self.accuracy(weights, task) for name, weights in tuned.items()},
        }
        for pair, (source, target) in shipped.PAIRS.items():
            figures[pair] = self.pair(source, target, task, tuned)
        self.clock.say(_line(figures))
        return figures


def _agree(tau: Weights, reference: Weights) -> Weights:
    """The entries of tau that point the way the reference does; tensors without a vote stay out."""
    signs = {name: reference[name].sign() if name in reference else torch.zeros_like(tau[name]) for name in tau}
    return {name: keep_agreeing(value, signs[name]) for name, value in tau.items()}


def _line(figures: dict[str, Any]) -> str:
    def short(pair: dict[str, Any]) -> str:
        gradfix = [f"{row['test']:.0f}@{row['alpha']}" for row in pair["gradfix"]]
        wide = [f"{row['test']:.0f}@{row['alpha']}" for row in pair["gradfix_wide"]]
        naive = f"{pair['naive_at_1']['test']:.1f}/{pair['naive']['test']:.1f}@{pair['naive']['alpha']}"
        masked = f"gradfix {' '.join(gradfix)} wide {' '.join(wide)}"
        return f"naive {naive} {masked} oracle {pair['oracle']['test']}"

    zero = [row["test"] for row in figures["zero_shot"].values()]
    tuned = [row["test"] for row in figures["fine_tuned"].values()]
    pairs = " | ".join(f"{name}: {short(figures[name])}" for name in shipped.PAIRS)
    return f"{figures['task']} lr {figures['lr']} zero-shot {zero} fine-tuned {tuned} | {pairs}"


@dataclass(frozen=True)
class ChosenTasks:
    """The tasks, the primary one first, their figures, and whether the primary keeps the contract."""

    tasks: tuple[str, ...]
    rows: list[dict[str, Any]]
    holds: bool


def in_range(zero_shot: dict[str, dict[str, float]]) -> bool:
    """Both targets know something about the task, and not too much."""
    low, high = ZERO_SHOT
    return all(low <= score <= high for name in TARGETS for score in _both(zero_shot[name]))


def fits(figures: dict[str, Any]) -> bool:
    return learnable(figures) and in_range(figures["zero_shot"])


def learnable(figures: dict[str, Any]) -> bool:
    """Full fine-tuning solves the task on every base."""
    return all(score > FINE_TUNED for row in figures["fine_tuned"].values() for score in _both(row))


def keeps_contract(figures: dict[str, Any]) -> bool:
    """Unrelated pair: plain addition does nothing, the masked update does a lot, on both image sets."""
    zero, pair = figures["zero_shot"]["B_unrelated"], figures["unrelated"]
    for part in ("test", "dev"):
        plain = [pair[name][part] for name in ("naive_at_1", "naive", "naive_wide")]
        if any(abs(score - zero[part]) > NAIVE_WITHIN for score in plain):
            return False
        if min(row[part] for row in pair["gradfix"] + pair["gradfix_wide"]) < zero[part] + GRADFIX_ABOVE:
            return False
    return True


def gain(figures: dict[str, Any]) -> float:
    """Points of the masked update over zero-shot on the unrelated pair."""
    masked = mean(row["dev"] for row in figures["unrelated"]["gradfix"])
    return masked - figures["zero_shot"]["B_unrelated"]["dev"]


def choose(candidates: list[dict[str, Any]], count: int = 3) -> ChosenTasks:
    """One recipe for all tasks: the one under which most tasks keep the contract, then the largest gain."""
    choices = [
        _choose_among([figures for figures in candidates if figures["lr"] == lr], count)
        for lr in sorted({figures["lr"] for figures in candidates})
    ]
    return max(choices, key=_merit)


def _choose_among(candidates: list[dict[str, Any]], count: int) -> ChosenTasks:
    ranked = sorted(candidates, key=lambda row: (fits(row), keeps_contract(row), gain(row)), reverse=True)
    rows: list[dict[str, Any]] = []
    for row in ranked:
        if len(rows) < count and _family(row) not in {_family(other) for other in rows}:
            rows.append(row)
    return ChosenTasks(tuple(row["task"] for row in rows), rows, fits(rows[0]) and keeps_contract(rows[0]))


def _merit(choice: ChosenTasks) -> tuple[int, int, float]:
    rows = choice.rows
    return sum(map(fits, rows)), sum(map(keeps_contract, rows)), mean(map(gain, rows))


def _family(figures: dict[str, Any]) -> str:
    return str(figures["task"]).split("_", maxsplit=1)[0]


def _both(row: dict[str, float]) -> tuple[float, float]:
    return row["test"], row["dev"]


class Clock:
    """Seconds since the start, on every line the script prints."""

    def __init__(self, limit: float) -> None:
        self.start, self.limit = time.monotonic(), limit

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)

    def over(self) -> bool:
        return self.seconds() > self.limit


def pretrain(lab: Workbench, corpus: Corpus, scope: Scope, clock: Clock) -> dict[str, Weights]:
    """Three bases: A and B_related from one ancestor, B_unrelated from its own start and data."""

    def fit(start: Weights, part: str, recipe: FitRecipe, seed: int) -> Weights:
        weights = lab.fit(start, lab.images(*corpus.parts[part]), replace(recipe, **scope.training), seed)
        clean = lab.accuracy(weights, lab.images(*corpus.parts["dev"]))
        clock.say(f"pre-trained on {part}: {clean:.2f} % of clean held-out images")
        return weights

    ancestor = fit(lab.fresh(1), "ancestor", ANCESTOR, seed=11)
    return {
        "A": fit(ancestor, "A", RELEASE_A, seed=12),
        "B_unrelated": fit(lab.fresh(2), "B_unrelated", PRETRAIN, seed=21),
        "B_related": fit(ancestor, "B_related", RELEASE_B, seed=13),
    }


def write_bases(lab: Workbench, bases: dict[str, Weights], out: Path) -> None:
    for name in ("A", "B_unrelated"):
        writing.write_base(out, name, lab.to_disk(bases[name]))
    rounded = shipped.read_base("A", out)
    coded = writing.quantise(rounded, lab.to_disk(bases["B_related"]), BASE_LEVELS)
    writing.write_deltas(out, {"B_related": coded})


def search(study: Study) -> Iterator[tuple[dict[str, Any], Any]]:
    """Fine-tune and score every corruption in range, recipe by recipe, until the clock runs out."""
    scores = {task: study.zero_shot(task) for task in CORRUPTIONS}
    for task, score in scores.items():
        study.clock.say(f"zero-shot {task}: " + ", ".join(f"{name} {row['dev']}" for name, row in score.items()))
    limit = study.scope.tasks
    tasks = [task for task in scores if limit is not None or in_range(scores[task])][:limit]
    for recipe in (replace(recipe, **study.scope.training) for recipe in study.scope.recipes):
        for task in tasks:
            if study.clock.over():
                study.clock.say("out of time; the rest is left out")
                return
            coded = study.tune(task, recipe)
            yield study.candidate(task, recipe, coded), coded


def pack(study: Study, found: list[tuple[dict[str, Any], Any]], out: Path, quick: bool) -> None:
    """Write the chosen tasks' models, the images and the figures."""
    chosen = choose([figures for figures, _ in found])
    picked = {figures["task"]: (figures, coded) for figures, coded in found if figures in chosen.rows}
    arrays: dict[str, Any] = {}
    for split, (images, labels) in study.corpus.shipped.items():
        arrays |= {split: images, f"{split}.labels": labels.astype(np.uint8)}
    np.savez_compressed(out / "images.npz", **arrays)
    deltas = {"B_related": shipped.read_coded(out, "B_related")}
    for task in chosen.tasks:
        deltas |= {f"{name}.{task}": code for name, code in picked[task][1].items()}
    writing.write_deltas(out, deltas)
    if _size(out) > SIZE_LIMIT:
        spare = {f"B_related.{task}" for task in chosen.tasks[1:]}
        writing.write_deltas(out, {name: code for name, code in deltas.items() if name not in spare})
    recipes = {"pretrain": PRETRAIN, "ancestor": ANCESTOR, "release_a": RELEASE_A, "release_b": RELEASE_B}
    report = {
        "primary": chosen.tasks[0],
        "tasks": list(chosen.tasks),
        "contract_holds": chosen.holds,
        "figures": {task: picked[task][0] for task in chosen.tasks},
        "clean": study.zero_shot("clean"),
        "candidates": [figures for figures, _ in found],
        "zero_shot_of_all": {task: study.zero_shot(task) for task in CORRUPTIONS},
        "images": {part: len(rows[1]) for part, rows in (study.corpus.shipped | study.corpus.parts).items()},
        "recipes": {name: asdict(recipe) for name, recipe in recipes.items()},
        "finetune": [asdict(recipe) for recipe in study.scope.recipes],
        "quick": quick,
        "device": torch.cuda.get_device_name() if study.lab.device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": round(study.clock.seconds(), 1),
    }
    (out / "figures.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    study.clock.say(f"chosen {chosen.tasks}, contract holds: {chosen.holds}; {_size(out) / 1e6:.2f} MB in {out}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--idx", type=Path, required=True, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shipped files")
    parser.add_argument("--bases", type=Path, help="take the bases from an earlier --out instead of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--search-seconds", type=float, default=1e9, help="start no new candidate after this")
    parser.add_argument("--quick", action="store_true", help="a few steps only: checks the script, not the models")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.search_seconds)
    scope = QUICK if options.quick else Scope()
    corpus = split_corpus(options.idx, scope.per_class, scope.dev)
    clock.say(f"read {sum(len(rows[1]) for rows in corpus.parts.values())} images")
    lab = Workbench(options.device)
    if options.bases is None:
        write_bases(lab, pretrain(lab, corpus, scope, clock), options.out)
    source = options.bases or options.out
    bases = {name: lab.from_disk(shipped.read_base(name, source)) for name in shipped.BASES}
    if options.bases is not None:
        write_bases(lab, bases, options.out)
    study = Study(lab, corpus, bases, scope, clock)
    pack(study, list(search(study)), options.out, quick=options.quick)


if __name__ == "__main__":
    main()
