"""Write the embedded models as Hugging Face folders and the tasks as parquet files.

The files are what any other tool would write: `from_pretrained` loads every folder without a missing
key, and `datasets` reads the images. Works on plain arrays, so it is done in about a second."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from gradfix.pocket import shipped
from gradfix.pocket.corruptions import CORRUPTIONS, Pixels


def materialise(folder: Path, task: str, tasks: list[str]) -> dict[str, Any]:
    """The pairs that are shipped tuned on `task`, and the images of all `tasks`; returns the paths."""
    written: dict[str, Any] = {}
    for pair, (source, target) in shipped.PAIRS.items():
        if task not in shipped.common_tasks((source, target)):
            continue
        members = {
            "base": shipped.read_base(source),
            "tuned": shipped.read_tuned(source, task),
            "target": shipped.read_base(target),
            "target_tuned": shipped.read_tuned(target, task),
        }
        written[pair] = {role: write_model(folder / pair / role, state) for role, state in members.items()}
    written["tasks"] = {name: write_task(folder / "tasks" / name, name) for name in tasks}
    return written


def write_model(folder: Path, state: shipped.State) -> Path:
    """One model folder: config, weights in float32, preprocessor."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    # through bytes: save_file leaves the file readable by its owner only
    (folder / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))
    _write_json(folder / "config.json", shipped.CONFIG)
    _write_json(folder / "preprocessor_config.json", shipped.PREPROCESSOR)
    return folder


def write_task(folder: Path, task: str) -> Path:
    """One task folder: train, validation and test as parquet, and the label names with their prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in shipped.SPLITS:
        pixels, labels = shipped.read_images(split)
        _write_parquet(folder / f"{split}.parquet", CORRUPTIONS[task](pixels), labels.tolist())
    _write_json(folder / "task.json", {"labels": {name: f"a photo of a {name}" for name in shipped.CLASSES}})
    return folder


def _write_parquet(path: Path, pixels: Pixels, labels: list[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = [{"bytes": _png(image), "path": None} for image in pixels]
    names = [shipped.CLASSES[number] for number in labels]
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
