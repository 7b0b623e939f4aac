"""Keep a CUDA-built torchvision from taking transformers down on a CPU-only torch.

Such a torchvision fails at import with `operator torchvision::nms does not exist`, and
every transformers model class fails with it. Declaring the two operators is enough for
the import; they are never called. On healthy installs nothing happens."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

_kept: list[Any] = []


@functools.cache
def heal_torchvision() -> None:
    import torch

    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    if not _is_cuda_build():
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # the operators live as long as the library object


def _is_cuda_build() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    version_file = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        text = importlib.metadata.version("torchvision")
    return "+cu" in text or "cuda = '" in text.replace('"', "'")
