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
from collections.abc import Mapping
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

CONFIG: dict[str, Any] = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "image_size": 28,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "dtype": "float32",
    "id2label": {str(number): name for number, name in enumerate(CLASSES)},
    "label2id": {name: number for number, name in enumerate(CLASSES)},
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 28, "width": 28},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def network() -> ViTForImageClassification:
    """A model of the shipped architecture with random weights, in eval mode."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig.from_dict(CONFIG)).eval()


@functools.cache
def module_names() -> dict[str, str]:
    """Name in the file to name in the module, for the installed version of transformers."""
    from gradfix.checkpoints.names import disk_names

    return {disk: module for module, disk in disk_names(network()).items()}


def quantise(base: Mapping[str, NDArray[Any]], tuned: Mapping[str, NDArray[Any]], levels: float) -> Coded:
    """Code `tuned - base` with `levels` steps to the root mean square of each tensor."""
    symbols, steps = [], []
    for name in sorted(base):
        delta = tuned[name].astype(np.float64) - base[name].astype(np.float64)
        step = np.float32(max(np.sqrt(np.mean(delta**2)) / levels, np.abs(delta).max() / 127))
        coded = np.rint(delta / np.float64(step)) if step > 0 else np.zeros_like(delta)
        symbols.append(np.clip(coded, -127, 127).astype(np.int8).ravel())
        steps.append(step)
    return np.concatenate(symbols), np.array(steps, np.float32)


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
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return figures


def write_base(folder: Path, name: str, state: Mapping[str, NDArray[Any]]) -> None:
    from safetensors.numpy import save_file

    halves = {key: np.ascontiguousarray(value.astype(np.float16)) for key, value in state.items()}
    save_file(halves, folder / f"{name}.safetensors", metadata={"format": "pt"})


def write_deltas(folder: Path, coded: Mapping[str, Coded]) -> None:
    arrays: dict[str, Any] = {}
    for name, (symbols, steps) in coded.items():
        arrays |= {name: symbols, f"{name}.steps": steps}
    np.savez_compressed(folder / "deltas.npz", **arrays)


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
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "preprocessor_config.json", PREPROCESSOR)
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
