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
    "Best": "gradfix.training.best",
    "Bound": "gradfix.tasks.base",
    "Checkpoint": "gradfix.checkpoints.open",
    "CorruptInput": "gradfix.errors",
    "DataError": "gradfix.errors",
    "ENGINES": "gradfix.votes.collect",
    "GradfixError": "gradfix.errors",
    "IncompatibleCheckpoints": "gradfix.errors",
    "Locked": "gradfix.errors",
    "MASKS": "gradfix.vectors.masks",
    "MERGES": "gradfix.merging.memory",
    "OutputError": "gradfix.errors",
    "Results": "gradfix.methods.results",
    "SELECTORS": "gradfix.vectors.selection",
    "ScaleCurve": "gradfix.vectors.scale",
    "SignVotes": "gradfix.vectors.signvotes",
    "TASKS": "gradfix.tasks.base",
    "Task": "gradfix.tasks.base",
    "TaskVector": "gradfix.vectors.taskvector",
    "Transported": "gradfix.vectors.transported",
    "UnsafeResult": "gradfix.errors",
    "UsageError": "gradfix.errors",
    "apply": "gradfix.vectors.transported",
    "best": "gradfix.training.best",
    "collect_gradient": "gradfix.votes.collect",
    "collect_votes": "gradfix.votes.collect",
    "compare": "gradfix.methods.comparison",
    "consensus": "gradfix.merging.memory",
    "evaluate": "gradfix.tasks.scoring",
    "finetune": "gradfix.training.finetuning",
    "load_data": "gradfix.data.load",
    "mask_then_merge": "gradfix.merging.memory",
    "merge": "gradfix.merging.memory",
    "merge_checkpoints": "gradfix.merging.folders",
    "merge_then_mask": "gradfix.merging.memory",
    "open_checkpoint": "gradfix.checkpoints.open",
    "search_scale": "gradfix.vectors.scale",
    "select": "gradfix.vectors.selection",
    "track": "gradfix.report.tracking",
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
