"""The images of the small models, and their training, voting and scoring on one device.

One `Workbench` owns one network and swaps weights in and out of it, so that a CUDA graph of the training
step is recorded once and replayed for every model. Batches are drawn by a seeded generator; results
differ between devices in the last bits and in nothing else."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradfix.pocket.corruptions import Pixels
from gradfix.pocket.shipped import State, module_names, network, normalise
from gradfix.training.steps import warmed

Weights = dict[str, Tensor]
Images = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class FitRecipe:
    """How long and how hard to train; `shift` and `flip` are the augmentations."""

    steps: int
    lr: float
    warmup: int
    weight_decay: float = 0.1
    batch: int = 256
    shift: int = 0
    flip: bool = False
    head: bool = False

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        return warmed(step, self.lr, self.steps, self.warmup)


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


def split_corpus(folder: Path, per_class: dict[str, int], dev: int | None, seed: int = 0) -> Corpus:
    """Shipped images first, the rest in two halves; an image that occurs twice is used once."""
    images = np.concatenate([read_idx(folder, f"{part}-images-idx3-ubyte") for part in ("train", "t10k")])
    labels = np.concatenate([read_idx(folder, f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")])
    labels = labels.astype(np.int64)
    digests = np.array([hashlib.sha256(image.tobytes()).digest() for image in images])
    first = np.sort(np.unique(digests, return_index=True)[1])
    order = np.random.default_rng(seed).permutation(first)
    training, testing = order[order < 60000], order[order >= 60000]

    taken, rest = _per_class(training, labels, per_class["train"] + per_class["validation"])
    pool, validation = _per_class(taken, labels, per_class["train"])
    test, held_out = _per_class(testing, labels, per_class["test"])
    half = len(rest) // 2
    quarter = half // 4
    parts = {
        "ancestor": rest[: 2 * quarter],
        "A": rest[2 * quarter : 3 * quarter],
        "B_related": rest[3 * quarter : half],
        "B_unrelated": rest[half:],
        "all": rest,
        "dev": held_out[:dev],
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


def augment(images: Tensor, recipe: FitRecipe, generator: torch.Generator) -> Tensor:
    """Move every image by up to `shift` pixels and mirror half of them."""
    count, device = len(images), images.device
    if recipe.shift:
        reach = recipe.shift
        padded = torch.nn.functional.pad(images, (reach,) * 4)
        draw = torch.randint(0, 2 * reach + 1, (2, count, 1), generator=generator, device=device)
        rows, columns = torch.arange(28, device=device) + draw
        samples = torch.arange(count, device=device)[:, None, None]
        images = padded[samples, rows[:, :, None], columns[:, None, :]]
    if recipe.flip:
        mirrored = torch.rand(count, 1, 1, generator=generator, device=device) < 0.5
        images = torch.where(mirrored, images.flip(-1), images)
    return images


class Workbench:
    """One network on one device, lent to many weight sets."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.model = cast(torch.nn.Module, network()).to(self.device)
        self._names = module_names()
        self._steppers: dict[tuple[int, float, bool], Stepper] = {}

    def fresh(self, seed: int) -> Weights:
        """A new initialisation."""
        torch.manual_seed(seed)
        return {name: value.to(self.device) for name, value in network().state_dict().items()}

    def images(self, pixels: Pixels, labels: NDArray[np.int64]) -> Images:
        return torch.from_numpy(pixels).to(self.device), torch.from_numpy(labels).to(self.device)

    def from_disk(self, state: State) -> Weights:
        return {self._names[name]: torch.from_numpy(value).to(self.device) for name, value in state.items()}

    def to_disk(self, weights: Weights) -> State:
        return {name: weights[module].float().cpu().numpy() for name, module in self._names.items()}

    def load(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(weights[name])

    def fit(self, start: Weights, data: Images, recipe: FitRecipe, seed: int) -> Weights:
        """Train from `start` and return new weights; the head stays as it is unless `recipe.head`."""
        self.load(start)
        stepper = self._stepper(recipe)
        stepper.reset()
        images, labels = data
        generator = torch.Generator(self.device).manual_seed(seed)
        for step in range(recipe.steps):
            picked = torch.randint(0, len(labels), (recipe.batch,), generator=generator, device=self.device)
            stepper.step(augment(images[picked], recipe, generator), labels[picked], recipe.rate(step))
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _stepper(self, recipe: FitRecipe) -> Stepper:
        key = (recipe.batch, recipe.weight_decay, recipe.head)
        if key not in self._steppers:
            self._steppers[key] = Stepper(self.model, *key)
        return self._steppers[key]

    @torch.no_grad()
    def accuracy(self, weights: Weights, data: Images) -> float:
        """Share of right answers in percent, in float32."""
        self.load(weights)
        images, labels = data
        right = 0
        for part, truth in zip(images.split(2048), labels.split(2048), strict=True):
            logits = self.model(pixel_values=normalise(part)).logits
            right += int((logits.argmax(-1) == truth).sum())
        return 100 * right / len(labels)

    def votes(self, weights: Weights, data: Images) -> Weights:
        """Majority direction of the per-sample descent signs; the frozen head abstains."""
        self.load(weights)
        encoder = {name: value for name, value in self.model.named_parameters() if "classifier" not in name}
        tally = [torch.zeros_like(value) for value in encoder.values()]
        for image, label in zip(*data, strict=True):
            logits = self.model(pixel_values=normalise(image[None])).logits
            loss = torch.nn.functional.cross_entropy(logits, label[None])
            grads = torch.autograd.grad(loss, list(encoder.values()))
            torch._foreach_sub_(tally, torch._foreach_sign(grads))
        return dict(zip(encoder, torch._foreach_sign(tally), strict=True))


class Stepper:
    """One AdamW step, recorded as a CUDA graph where there is a GPU."""

    def __init__(self, model: torch.nn.Module, batch: int, weight_decay: float, head: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.parameters = [value for name, value in model.named_parameters() if head or "classifier" not in name]
        self.images = torch.zeros(batch, 28, 28, dtype=torch.uint8, device=self.device)
        self.labels = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.lr = torch.zeros((), device=self.device)
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.lr, weight_decay=weight_decay, capturable=cuda, foreach=cuda
        )
        self.graph = self._record() if cuda else None

    def _record(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._compute()
        return graph

    def _compute(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False):
            logits = self.model(pixel_values=normalise(self.images)).logits
            loss = torch.nn.functional.cross_entropy(logits, self.labels)
        grads = torch.autograd.grad(loss, self.parameters)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def step(self, images: Tensor, labels: Tensor, rate: float) -> None:
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.lr.fill_(rate)
        if self.graph is None:
            self._compute()
        else:
            self.graph.replay()

    def reset(self) -> None:
        """Forget the moments of the previous model; in place, because the graph holds their addresses."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
