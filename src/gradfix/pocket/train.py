"""Train the embedded models and write the files the package ships.

    python -m gradfix.pocket.train --idx FOLDER --out FOLDER [--device cuda|cpu] [--quick]

FOLDER holds Fashion-MNIST's four idx files, plain or gzipped. The script pre-trains three bases,
scores them on every corruption, fine-tunes them on those that lie in range, measures naive addition
and the masked transport, picks three tasks and a primary one, and writes weights, images and
figures.json with everything it tried. Tasks are ranked on held-out test images that are not shipped;
the shipped ones only have to confirm the choice. About four minutes on one GPU."""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from gradfix.pocket import shipped
from gradfix.pocket.corruptions import CORRUPTIONS, Pixels
from gradfix.pocket.fit import Images, Lab, Recipe, Weights
from gradfix.pocket.select_tasks import choose, in_range

SHOTS = 5
BASE_LEVELS, TASK_LEVELS = 8, 3
SIZE_LIMIT = 9_500_000  # bytes of everything shipped

PRETRAIN = Recipe(
    steps=3000, lr=1e-3, warmup=300, weight_decay=0.05, batch=512, shift=1, flip=True, head=True
)
ANCESTOR = replace(PRETRAIN, steps=2000)
RELEASE_A = replace(PRETRAIN, steps=1000, lr=5e-4, warmup=100)
RELEASE_B = replace(RELEASE_A, shift=3, flip=False)
FINETUNE = tuple(Recipe(steps=1000, lr=lr, warmup=100) for lr in (1e-4, 3e-4, 5e-5))


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
    recipes: tuple[Recipe, ...] = FINETUNE

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


@dataclass(frozen=True)
class Corpus:
    """Fashion-MNIST without repeated images, split once for everything."""

    shipped: dict[str, tuple[Pixels, NDArray[np.int64]]]
    parts: dict[str, tuple[Pixels, NDArray[np.int64]]]  # ancestor, A, B_related, B_unrelated, all, dev


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """One idx file, plain or gzipped."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if not plain.exists() and not packed.exists():
        raise SystemExit(f"{folder} has neither {name} nor {name}.gz; pass Fashion-MNIST's folder as --idx")
    raw = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def split_corpus(folder: Path, scope: Scope, seed: int = 0) -> Corpus:
    """Shipped images first, the rest in two halves; an image that occurs twice is used once."""
    images = np.concatenate([read_idx(folder, f"{part}-images-idx3-ubyte") for part in ("train", "t10k")])
    labels = np.concatenate([read_idx(folder, f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")])
    labels = labels.astype(np.int64)
    digests = np.array([hashlib.sha256(image.tobytes()).digest() for image in images])
    first = np.sort(np.unique(digests, return_index=True)[1])
    order = np.random.default_rng(seed).permutation(first)
    training, testing = order[order < 60000], order[order >= 60000]

    taken, rest = _per_class(training, labels, scope.per_class["train"] + scope.per_class["validation"])
    pool, validation = _per_class(taken, labels, scope.per_class["train"])
    test, held_out = _per_class(testing, labels, scope.per_class["test"])
    half = len(rest) // 2
    quarter = half // 4
    parts = {
        "ancestor": rest[: 2 * quarter],
        "A": rest[2 * quarter : 3 * quarter],
        "B_related": rest[3 * quarter : half],
        "B_unrelated": rest[half:],
        "all": rest,
        "dev": held_out[: scope.dev],
    }
    ships = {"train": pool, "validation": validation, "test": test}
    return Corpus(
        {name: (images[index], labels[index]) for name, index in ships.items()},
        {name: (images[index], labels[index]) for name, index in parts.items()},
    )


def _per_class(
    index: NDArray[np.int64], labels: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first `count` of every class, the classes taking turns, and the others."""
    chosen = np.stack([index[labels[index] == number][:count] for number in range(10)], axis=1).ravel()
    return chosen, index[~np.isin(index, chosen)]


class Study:
    """Bases, corrupted data and scores of one run."""

    def __init__(
        self, lab: Lab, corpus: Corpus, bases: dict[str, Weights], scope: Scope, clock: Clock
    ) -> None:
        self.lab, self.corpus, self.bases, self.scope, self.clock = lab, corpus, bases, scope, clock
        self._directions: dict[tuple[str, str, int], Weights] = {}

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a study lives as long as the process
    def data(self, task: str, part: str) -> Images:
        images, labels = (self.corpus.shipped | self.corpus.parts)[part]
        corrupt = CORRUPTIONS[task](images)
        return torch.from_numpy(corrupt).to(self.lab.device), torch.from_numpy(labels).to(self.lab.device)

    def accuracy(self, weights: Weights, task: str) -> dict[str, float]:
        return {part: round(self.lab.accuracy(weights, self.data(task, part)), 2) for part in ("test", "dev")}

    def zero_shot(self, task: str) -> dict[str, dict[str, float]]:
        return {name: self.accuracy(weights, task) for name, weights in self.bases.items()}

    def tune(self, task: str, recipe: Recipe) -> dict[str, shipped.Coded]:
        """Fine-tune every base and code the difference."""
        coded = {}
        for number, (name, base) in enumerate(self.bases.items()):
            tuned = self.lab.fit(base, self.data(task, "all"), recipe, seed=100 + number)
            coded[name] = shipped.quantise(self.lab.to_disk(base), self.lab.to_disk(tuned), TASK_LEVELS)
        return coded

    def restore(self, coded: dict[str, shipped.Coded]) -> dict[str, Weights]:
        states = {
            name: shipped.restore(self.lab.to_disk(self.bases[name]), code) for name, code in coded.items()
        }
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

    def candidate(self, task: str, recipe: Recipe, coded: dict[str, shipped.Coded]) -> dict[str, Any]:
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
    kept = {}
    for name, value in tau.items():
        sign = reference[name].sign() if name in reference else torch.zeros_like(value)
        kept[name] = torch.where(value.sign() == sign, value, 0.0)
    return kept


def _line(figures: dict[str, Any]) -> str:
    def short(pair: dict[str, Any]) -> str:
        gradfix = [f"{row['test']:.0f}@{row['alpha']}" for row in pair["gradfix"]]
        wide = [f"{row['test']:.0f}@{row['alpha']}" for row in pair["gradfix_wide"]]
        naive = f"{pair['naive_at_1']['test']:.1f}/{pair['naive']['test']:.1f}@{pair['naive']['alpha']}"
        return (
            f"naive {naive} gradfix {' '.join(gradfix)} wide {' '.join(wide)} oracle {pair['oracle']['test']}"
        )

    zero = [row["test"] for row in figures["zero_shot"].values()]
    tuned = [row["test"] for row in figures["fine_tuned"].values()]
    pairs = " | ".join(f"{name}: {short(figures[name])}" for name in shipped.PAIRS)
    return f"{figures['task']} lr {figures['lr']} zero-shot {zero} fine-tuned {tuned} | {pairs}"


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


def pretrain(lab: Lab, corpus: Corpus, scope: Scope, clock: Clock) -> dict[str, Weights]:
    """Three bases: A and B_related from one ancestor, B_unrelated from its own start and data."""

    def fit(start: Weights, part: str, recipe: Recipe, seed: int) -> Weights:
        images, labels = (torch.from_numpy(array).to(lab.device) for array in corpus.parts[part])
        weights = lab.fit(start, (images, labels), replace(recipe, **scope.training), seed)
        dev = corpus.parts["dev"]
        clean = (torch.from_numpy(dev[0]).to(lab.device), torch.from_numpy(dev[1]).to(lab.device))
        clock.say(f"pre-trained on {part}: {lab.accuracy(weights, clean):.2f} % of clean held-out images")
        return weights

    ancestor = fit(lab.fresh(1), "ancestor", ANCESTOR, seed=11)
    return {
        "A": fit(ancestor, "A", RELEASE_A, seed=12),
        "B_unrelated": fit(lab.fresh(2), "B_unrelated", PRETRAIN, seed=21),
        "B_related": fit(ancestor, "B_related", RELEASE_B, seed=13),
    }


def write_bases(lab: Lab, bases: dict[str, Weights], out: Path) -> None:
    for name in ("A", "B_unrelated"):
        shipped.write_base(out, name, lab.to_disk(bases[name]))
    rounded = shipped.read_base("A", out)
    coded = shipped.quantise(rounded, lab.to_disk(bases["B_related"]), BASE_LEVELS)
    shipped.write_deltas(out, {"B_related": coded})


def search(study: Study) -> Iterator[tuple[dict[str, Any], Any]]:
    """Fine-tune and score every corruption in range, recipe by recipe, until the clock runs out."""
    scores = {task: study.zero_shot(task) for task in CORRUPTIONS}
    for task, score in scores.items():
        study.clock.say(
            f"zero-shot {task}: " + ", ".join(f"{name} {row['dev']}" for name, row in score.items())
        )
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
    shipped.write_deltas(out, deltas)
    if _size(out) > SIZE_LIMIT:
        spare = {f"B_related.{task}" for task in chosen.tasks[1:]}
        shipped.write_deltas(out, {name: code for name, code in deltas.items() if name not in spare})
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
    study.clock.say(
        f"chosen {chosen.tasks}, contract holds: {chosen.holds}; {_size(out) / 1e6:.2f} MB in {out}"
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--idx", type=Path, required=True, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shipped files")
    parser.add_argument("--bases", type=Path, help="take the bases from an earlier --out instead of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--search-seconds", type=float, default=1e9, help="start no new candidate after this")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps only: checks the script, not the models"
    )
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.search_seconds)
    scope = QUICK if options.quick else Scope()
    corpus = split_corpus(options.idx, scope)
    clock.say(f"read {sum(len(rows[1]) for rows in corpus.parts.values())} images")
    lab = Lab(options.device)
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
