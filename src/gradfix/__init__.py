"""gradfix: move a fine-tune onto the next release of its base model.

The public names are imported on first use, so `import gradfix` costs nothing. No module
shares its name with a public function: importing a submodule would hide the function."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradfix._version import __version__

_HOMES = {
    "ALIGNERS": "gradfix.align",
    "Alignment": "gradfix.align",
    "Checkpoint": "gradfix.checkpoints.open",
    "ENGINES": "gradfix.votes.collect",
    "GradfixError": "gradfix.errors",
    "MASKS": "gradfix.masks",
    "MERGES": "gradfix.merging.memory",
    "SELECTORS": "gradfix.selection",
    "TASKS": "gradfix.tasks.base",
    "ScaleCurve": "gradfix.scale",
    "SignVotes": "gradfix.votes.tally",
    "TaskVector": "gradfix.taskvector",
    "Transported": "gradfix.transported",
    "apply": "gradfix.transported",
    "collect_gradient": "gradfix.votes.collect",
    "collect_votes": "gradfix.votes.collect",
    "compare": "gradfix.comparison.running",
    "consensus": "gradfix.merging.memory",
    "evaluate": "gradfix.scoring",
    "finetune": "gradfix.finetuning",
    "mask_then_merge": "gradfix.merging.memory",
    "merge": "gradfix.merging.memory",
    "merge_checkpoints": "gradfix.merging.stream",
    "merge_then_mask": "gradfix.merging.memory",
    "open_checkpoint": "gradfix.checkpoints.open",
    "search_scale": "gradfix.scale",
    "select": "gradfix.selection",
    "transport": "gradfix.transported",
    "transport_checkpoint": "gradfix.stream",
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


if TYPE_CHECKING:
    from gradfix.align import ALIGNERS as ALIGNERS
    from gradfix.align import Alignment as Alignment
    from gradfix.checkpoints.open import Checkpoint as Checkpoint
    from gradfix.checkpoints.open import open_checkpoint as open_checkpoint
    from gradfix.checkpoints.write import verify as verify
    from gradfix.comparison.running import compare as compare
    from gradfix.errors import GradfixError as GradfixError
    from gradfix.finetuning import finetune as finetune
    from gradfix.masks import MASKS as MASKS
    from gradfix.merging.memory import MERGES as MERGES
    from gradfix.merging.memory import consensus as consensus
    from gradfix.merging.memory import mask_then_merge as mask_then_merge
    from gradfix.merging.memory import merge as merge
    from gradfix.merging.memory import merge_then_mask as merge_then_mask
    from gradfix.merging.stream import merge_checkpoints as merge_checkpoints
    from gradfix.scale import ScaleCurve as ScaleCurve
    from gradfix.scale import search_scale as search_scale
    from gradfix.scoring import evaluate as evaluate
    from gradfix.selection import SELECTORS as SELECTORS
    from gradfix.selection import select as select
    from gradfix.stream import transport_checkpoint as transport_checkpoint
    from gradfix.tasks.base import TASKS as TASKS
    from gradfix.taskvector import TaskVector as TaskVector
    from gradfix.transported import Transported as Transported
    from gradfix.transported import apply as apply
    from gradfix.transported import transport as transport
    from gradfix.votes.collect import ENGINES as ENGINES
    from gradfix.votes.collect import collect_gradient as collect_gradient
    from gradfix.votes.collect import collect_votes as collect_votes
    from gradfix.votes.tally import SignVotes as SignVotes
