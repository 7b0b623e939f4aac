"""`--dry-run` of the commands whose work cannot be undone by reading: the same checks, one sentence, no file.

The other commands have theirs in their own module."""

from __future__ import annotations

from gradfix.checkpoints.open import open_checkpoint
from gradfix.commands.configs import VoteConfig
from gradfix.commands.setting import draw, setting


def plan_vote(config: VoteConfig) -> str:
    """Data, task, few-shot set and target are checked; no model is loaded."""
    shots = draw(setting(config), config, base=config.base)
    target = open_checkpoint(config.target)
    return f"would ask {target} about {len(shots.fewshot)} examples and write the votes to {config.out}"
