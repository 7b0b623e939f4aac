"""The format of the shipped models: two fp16 bases, and everything else as quantised differences; and how they are
written as Hugging Face folders and parquet files, as any other tool would write them.

A model here is a dict of float32 arrays under the names of its Hugging Face file. A difference is
stored as int8 symbols with one step per tensor, and the restored model is by definition the base
plus those steps: every score is measured after restoring, so nothing is lost twice. All on plain arrays: reading
and writing need neither torch nor transformers."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradfix.errors import CorruptInput, UsageError
from gradfix.pocket.corruptions import CORRUPTIONS, Pixels
from gradfix.registry import unknown

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ViTForImageClassification

DATA = Path(__file__).parent / "data"
State = dict[str, NDArray[np.float32]]
Coded = tuple[NDArray[np.int8], NDArray[np.float32]]

CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
BASES = ("A", "B_unrelated", "B_related")
PAIRS = {"unrelated": ("A", "B_unrelated"), "related": ("A", "B_related")}
SPLITS = ("train", "validation", "test")

SIDE_FILES = ("config.json", "preprocessor_config.json")


def network() -> ViTForImageClassification:
    """A model of the shipped architecture with random weights, in eval mode."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig.from_dict(_read_json(DATA / SIDE_FILES[0]))).eval()


@functools.cache
def module_names() -> dict[str, str]:
    """Name in the file to name in the module, for the installed version of transformers."""
    from gradfix.checkpoints.names import disk_names

    return {disk: module for module, disk in disk_names(network()).items()}


def restore(base: State, coded: Coded) -> State:
    """The model that `coded` stands for; one product and one sum in float32, the same on every machine."""
    symbols, steps = coded
    if symbols.size != sum(value.size for value in base.values()) or steps.size != len(base):
        raise CorruptInput(f"the shipped difference has {symbols.size} symbols, its base has another size.")
    restored, start = {}, 0
    for name, step in zip(sorted(base), steps, strict=True):
        end = start + base[name].size
        delta = symbols[start:end].astype(np.float32) * step
        restored[name] = base[name] + delta.reshape(base[name].shape)
        start = end
    return restored


def read_base(name: str, folder: Path = DATA) -> State:
    """Base A, B_unrelated or B_related in float32."""
    if name == "B_related":
        return restore(read_base("A", folder), read_coded(folder, name))
    from safetensors.numpy import load_file

    return {key: value.astype(np.float32) for key, value in load_file(folder / f"{name}.safetensors").items()}


def read_tuned(name: str, task: str, folder: Path = DATA) -> State:
    """The base `name` after full fine-tuning on `task`."""
    return restore(read_base(name, folder), read_coded(folder, f"{name}.{task}"))


@functools.cache
def common_tasks(names: tuple[str, ...], folder: Path = DATA) -> tuple[str, ...]:
    """The tasks on which all these bases are shipped fine-tuned, the primary one first."""
    with np.load(folder / "deltas.npz", allow_pickle=False) as archive:
        tasks = read_figures(folder)["tasks"]
        return tuple(task for task in tasks if all(f"{name}.{task}" in archive for name in names))


def read_images(split: str, folder: Path = DATA) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Clean images (n, 28, 28) and their class numbers."""
    if split not in SPLITS:
        raise UsageError(unknown("split", split, list(SPLITS)))
    with np.load(folder / "images.npz", allow_pickle=False) as archive:
        return archive[split], archive[f"{split}.labels"].astype(np.int64)


@functools.cache
def read_figures(folder: Path = DATA) -> dict[str, Any]:
    """What the training script measured; treat the result as read-only."""
    return _read_json(folder / "figures.json")


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def read_coded(folder: Path, name: str) -> Coded:
    with np.load(folder / "deltas.npz", allow_pickle=False) as archive:
        if name not in archive:
            names = [key for key in archive if not key.endswith(".steps")]
            raise CorruptInput(unknown("shipped difference", name, names))
        return archive[name], archive[f"{name}.steps"]


def materialise(folder: Path, task: str, tasks: list[str]) -> dict[str, Any]:
    """The pairs that are shipped tuned on `task`, and the images of all `tasks`; returns the paths."""
    written: dict[str, Any] = {}
    for pair, (source, target) in PAIRS.items():
        if task not in common_tasks((source, target)):
            continue
        members = {
            "base": read_base(source),
            "tuned": read_tuned(source, task),
            "target": read_base(target),
            "target_tuned": read_tuned(target, task),
        }
        written[pair] = {role: write_model(folder / pair / role, state) for role, state in members.items()}
    written["tasks"] = {name: write_task(folder / "tasks" / name, name) for name in tasks}
    return written


def write_model(folder: Path, state: State) -> Path:
    """One model folder: config, weights in float32, preprocessor."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    # through bytes: save_file leaves the file readable by its owner only
    (folder / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))
    for name in SIDE_FILES:
        _write_json(folder / name, _read_json(DATA / name))
    return folder


def write_task(folder: Path, task: str) -> Path:
    """One task folder: train, validation and test as parquet, and the label names with their prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        pixels, labels = read_images(split)
        _write_parquet(folder / f"{split}.parquet", CORRUPTIONS[task](pixels), labels.tolist())
    _write_json(folder / "task.json", {"labels": {name: f"a photo of a {name}" for name in CLASSES}})
    return folder


def _write_parquet(path: Path, pixels: Pixels, labels: list[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = [{"bytes": _png(image), "path": None} for image in pixels]
    names = [CLASSES[number] for number in labels]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {"image": {"_type": "Image"}, "label": {"dtype": "string", "_type": "Value"}}
    schema = pa.schema([("image", image), ("label", pa.string())]).with_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    pq.write_table(pa.table({"image": pictures, "label": names}, schema=schema), path)


def _png(image: Pixels) -> bytes:
    """Three equal channels: that is what the models and most image processors expect."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.stack([image] * 3, axis=-1)).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def normalise(images: Tensor) -> Tensor:
    """uint8 (n, 28, 28) to the three equal channels in [-1, 1] that the models read."""
    return (images.float() / 127.5 - 1).unsqueeze(1).expand(-1, 3, -1, -1)
