"""Out of memory: the batch is halved, but only when the user allowed it.

The whole run starts again with the smaller batch, so its result is exactly that of a run that was asked for
this batch; the batch that was used is in the result and in the manifest."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

Result = TypeVar("Result")
Run = Callable[..., Result]

SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_cpu")


def out_of_memory(error: BaseException) -> bool:
    """torch says it in several ways: its own error on devices, a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def halving_batches(
    noted: Callable[[Result, str], Result], forget: Callable[[Any], None] = lambda _: None
) -> Callable[[Run[Result]], Run[Result]]:
    """Let a workflow (its config comes first) run again with half the batch while `config.auto_batch` holds.

    `noted(result, note)` puts the note into the result; `forget(config)` removes state of the larger batch."""

    def decorate(run: Run[Result]) -> Run[Result]:
        @functools.wraps(run)
        def smaller(config: Any, *more: Any, **options: Any) -> Result:
            asked = config.batch_size
            while True:
                try:
                    result = run(config, *more, **options)
                    break
                except (MemoryError, RuntimeError) as error:
                    if not (out_of_memory(error) and config.auto_batch and config.batch_size > 1):
                        raise
                forget(config)
                config = replace(config, batch_size=config.batch_size // 2)
                _release()
            if config.batch_size == asked:
                return result
            return noted(result, f"batch size {asked} ran out of memory; {config.batch_size} was used.")

        return smaller

    return decorate


def in_notes(result: Any, note: str) -> Any:
    """For results that are dataclasses with notes."""
    return replace(result, notes=type(result.notes)([*result.notes, note]))


def in_dict(result: dict[str, Any], note: str) -> dict[str, Any]:
    return {**result, "notes": [*result.get("notes", []), note]}


def _release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
