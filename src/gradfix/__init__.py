"""gradfix: move a fine-tune onto the next release of its base model.

The public names are imported on first use, so `import gradfix` costs nothing; `__init__.pyi` tells editors of them. No module
shares its name with a public function: importing a submodule would hide the function."""

from __future__ import annotations

import importlib
from typing import Any

from gradfix._version import __version__

_HOMES = {
    "ALIGNERS": "gradfix.align",
    "Alignment": "gradfix.align",
    "Checkpoint": "gradfix.checkpoints.open",
    "ENGINES": "gradfix.votes.collect",
    "GradfixError": "gradfix.errors",
    "MASKS": "gradfix.vectors.masks",
    "MERGES": "gradfix.merging.memory",
    "SELECTORS": "gradfix.vectors.selection",
    "TASKS": "gradfix.tasks.base",
    "ScaleCurve": "gradfix.vectors.scale",
    "SignVotes": "gradfix.vectors.signvotes",
    "TaskVector": "gradfix.vectors.taskvector",
    "Transported": "gradfix.vectors.transported",
    "apply": "gradfix.vectors.transported",
    "best": "gradfix.training.best",
    "collect_gradient": "gradfix.votes.collect",
    "collect_votes": "gradfix.votes.collect",
    "compare": "gradfix.methods.comparison",
    "consensus": "gradfix.merging.memory",
    "evaluate": "gradfix.tasks.scoring",
    "finetune": "gradfix.training.finetuning",
    "mask_then_merge": "gradfix.merging.memory",
    "merge": "gradfix.merging.memory",
    "merge_checkpoints": "gradfix.merging.folders",
    "merge_then_mask": "gradfix.merging.memory",
    "open_checkpoint": "gradfix.checkpoints.open",
    "search_scale": "gradfix.vectors.scale",
    "select": "gradfix.vectors.selection",
    "transport": "gradfix.vectors.transported",
    "transport_checkpoint": "gradfix.stream.checkpoint",
    "verify": "gradfix.checkpoints.write",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradfix' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
