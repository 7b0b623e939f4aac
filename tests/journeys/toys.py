"""Toy data that a two-layer model learns in a second, and the few lines of training that do it.

Every text holds two words of its class and at times one of another, so a model that lost its head or its
update drops to chance while a good one is seldom perfect: equal accuracies mean equal models."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.tiny import IMAGE_LABELS, IMAGE_SIZE, write_rows

TEXT_LABELS = ("negative", "neutral", "positive")
WORDS = {"negative": ("bad", "poor"), "neutral": ("film", "photo"), "positive": ("good", "fine")}
FILLER = ["a", "the", "of", "x", "y", "z", "q"]
SIZES = {"train": 36, "validation": 12, "test": 36}
PROMPTS = {label: f"a {words[0]} {words[1]}" for label, words in WORDS.items()}


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with "text" and "label"; labels take turns, no text comes twice."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        label = TEXT_LABELS[index % 3]
        words = [*WORDS[label], *draw.sample(FILLER, 3), *str(1000 * seed + index)]
        if draw.random() < 0.4:
            words.append(draw.choice(WORDS[draw.choice([other for other in TEXT_LABELS if other != label])]))
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def splits() -> dict[str, list[dict[str, Any]]]:
    return {name: texts(count, seed) for seed, (name, count) in enumerate(SIZES.items(), start=1)}


def write_texts(folder: Path, *, numbered: bool = False, prompts: bool = False, parquet: bool = False) -> None:
    """Three splits; `numbered` writes 0, 1, 2 for labels, as data sets for nameless heads do."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits().items():
        told = [{**row, "label": TEXT_LABELS.index(row["label"])} for row in rows] if numbered else rows
        if parquet:
            from datasets import Dataset

            Dataset.from_list(told).to_parquet(folder / f"{split}.parquet")
        else:
            write_rows(folder, split, told)
    if prompts:
        (folder / "task.json").write_text(json.dumps({"labels": PROMPTS}), encoding="utf-8")


def write_chats(folder: Path) -> None:
    """Conversations with a free answer: the data set has no labels."""
    for split, rows in splits().items():
        turns = [
            {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": WORDS[row["label"]][0]}]}
            for row in rows
        ]  # fmt: skip
        write_rows(folder, split, turns)


def images(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a PIL "image" and its "label": noise with a tint, and a little more of the class's colour."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        pixels = draw.integers(20, 200, (IMAGE_SIZE, IMAGE_SIZE, 3)) + draw.normal(0, 5, 3)
        pixels[..., index % 3] += 14
        rows.append({"image": Image.fromarray(pixels.clip(0, 255).astype("uint8")), "label": IMAGE_LABELS[index % 3]})
    return rows


def write_images(folder: Path) -> None:
    for seed, (split, count) in enumerate(SIZES.items(), start=1):
        write_rows(folder, split, images(count, seed))
    (folder / "task.json").write_text(
        json.dumps({"labels": {label: f"a {label} photo" for label in IMAGE_LABELS}}), encoding="utf-8"
    )


def read_rows(data: Path, split: str) -> list[dict[str, Any]]:
    """What a user's own script would read: json lines, parquet, or class folders of images."""
    if (data / f"{split}.jsonl").is_file():
        return [json.loads(line) for line in (data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    if (data / f"{split}.parquet").is_file():
        from datasets import Dataset

        return Dataset.from_parquet(str(data / f"{split}.parquet"), cache_dir=str(data / ".cache")).to_list()
    from PIL import Image

    files = sorted((data / split).glob("*/*.png"))
    return [{"image": Image.open(file).convert("RGB"), "label": file.parent.name} for file in files]


def fit(model: nn.Module, loss: Callable[[], Tensor], steps: int = 40, lr: float = 5e-3, settled: bool = False) -> None:
    """Plain AdamW over the whole toy set at once; `settled` leaves running statistics as they are."""
    model.train(not settled)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def next_release(model: nn.Module, seed: int = 7, size: float = 0.15) -> None:
    """The vendor trained on: every weight moves a little, in place."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = parameter.float().std() if parameter.numel() > 1 else torch.tensor(0.1)
        noise = torch.randn(parameter.shape, generator=draw) * spread * size
        parameter.add_(noise.to(parameter.dtype))


def tokenised(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return dict(tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt"))


def class_numbers(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Tensor:
    return torch.tensor([row["label"] if isinstance(row["label"], int) else names.index(row["label"]) for row in rows])
