"""Tasks: how one family of models is loaded, fed and scored. Importing this package fills the registry."""

from gradfix.tasks import (
    causal as _causal,  # noqa: F401
    classification as _classification,  # noqa: F401
    embedding as _embedding,  # noqa: F401
    seq2seq as _seq2seq,  # noqa: F401
    zero_shot as _zero_shot,  # noqa: F401
)
from gradfix.tasks.base import TASKS, Batch, Bound, Example, Prompts, Task

__all__ = ["TASKS", "Batch", "Bound", "Example", "Prompts", "Task"]
