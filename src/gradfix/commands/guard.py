"""What stands around every command: outputs are never inputs and have one writer, and a batch that does not fit
into memory is halved where the user allowed it.

Files are compared by inode, so links and other spellings do not fool the checks. After a lack of memory the whole
run starts again with the smaller batch, so its result is exactly that of a run that was asked for this batch; the
batch that was used is in the result and in the manifest."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gradfix.checkpoints.write import locked, make_parent, refuse_inside, refuse_occupied, refuse_odd_file
from gradfix.data.files import is_table
from gradfix.errors import OutputError, UnsafeResult, UsageError
from gradfix.system.processes import Relay, current, in_processes, joined, launched, sharing

Result = TypeVar("Result")
Run = Callable[..., Result]

CHECKPOINTS = ("base", "tuned", "target", "target_tuned", "model", "head_from", "checkpoints")
OUTPUTS = ("out", "report", "work")
LONGEST_NAME = 200  # bytes; file systems take 255, and what is written beside an output adds some to its name
FILES = ("data", "validation", "unlabelled", "votes", "results", "config", "from_mergekit", "verdict")
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_cpu")


def guard_outputs(config: Any, *files: str | None, parts: Iterable[Any] = ()) -> None:
    """Refuse a config whose outputs, or these further files, would touch one of its inputs or each other.

    `parts` name inputs as well, such as the vectors of a merge recipe."""
    owners = [config, *parts]
    weights, others = ([p for owner in owners for p in _existing(owner, names)] for names in (CHECKPOINTS, FILES))
    for file in (*files, getattr(config, "report", None)):
        if file is not None and file != "-":
            refuse_odd_file(Path(file))
    _refuse_shared(config, files)
    for name in (*(getattr(config, output, None) for output in OUTPUTS), *files):
        if name is None or name == "-":
            continue
        out = Path(name)
        if len(os.fsencode(out.name)) > LONGEST_NAME:
            raise OutputError(f"the name of output {out} is longer than {LONGEST_NAME} bytes. Choose a shorter one.")
        refuse_inside(out, [*weights, *(path for path in others if path.is_file() or out.is_dir())])
        if is_table(out) and any(path.is_dir() and out.resolve().is_relative_to(path.resolve()) for path in others):
            raise OutputError(f"output {out} is a data file of the input; inputs are never modified. Choose another.")


def _refuse_shared(config: Any, files: Iterable[str | None]) -> None:
    """The later of two outputs under one name would replace the earlier; a page has its Markdown beside it."""
    report = getattr(config, "report", None)
    beside = [Path(report).with_suffix(".md")] if report and Path(report).name else []
    named = [*(getattr(config, output, None) for output in OUTPUTS), *files]
    taken = set()
    for out in [*(Path(name) for name in named if name is not None and name != "-"), *beside]:
        place = os.path.realpath(out)
        if place in taken:
            raise UsageError(f"two outputs would be written to {out}; give each a name of its own.")
        taken.add(place)


@contextlib.contextmanager
def sole_writer(config: Any) -> Iterator[None]:
    """Hold the output folder from the first computation on: a second writer is told at once, not at its end.

    A dry run writes nothing and holds nothing, nor does a process that works for another."""
    if config.dry_run or not current().leads:
        yield
        return
    out = Path(config.out)
    make_parent(out)
    with locked(out):
        refuse_occupied(out, config.overwrite)  # by a writer that has finished meanwhile
        yield


def number_or_auto(word: str, value: str | None) -> float | None:
    """Options that are a number or the word 'auto', for which nothing stands."""
    if value is None or value == "auto":
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{word} must be a finite number or 'auto', got {value!r}.")
    return number


def refuse_broken(loss: float | None, alpha: float, force: bool) -> list[str]:
    """Finite weights can still be of no use: so large that the model answers with NaN. Notes where it is forced."""
    if loss is None or math.isfinite(loss):
        return []
    text = f"at alpha {alpha:g} the few-shot loss is {loss}: the model is broken. Use a smaller --alpha"
    if not force:
        raise UnsafeResult(f"{text}, or --force to write it all the same.")
    return [f"{text}."]


def refuse_risen(before: float | None, after: float | None, held_out: bool, force: bool) -> list[str]:
    """A few-shot loss that rises is said aloud; where nothing was chosen on held-out examples it is refused."""
    if before is None or after is None or not after > before:
        return []
    text = f"the few-shot loss rises from {before:.4g} to {after:.4g}"
    if held_out or force:
        return [f"{text}: measure the result on examples of your own before you use it"]
    raise UnsafeResult(
        f"{text}, and no held-out examples speak for the result. Give more --shots or --validation data, or --force to "
        "write it all the same."
    )


def _existing(config: Any, names: Iterable[str]) -> list[Path]:
    found = []
    for name in names:
        value = getattr(config, name, None)
        values = value if isinstance(value, (tuple, list)) else [value]
        found += [Path(item).expanduser() for item in values if isinstance(item, str) and item]
    return [path for path in found if _exists(path)]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def out_of_memory(error: BaseException) -> bool:
    """torch says it in several ways: its own error on devices, a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in NO_MEMORY)


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
                release()
            if config.batch_size == asked:
                return result
            return noted(result, f"batch size {asked} ran out of memory; {config.batch_size} was used.")

        return smaller

    return decorate


def among_processes(run: Run[Result]) -> Run[Result]:
    """Let a workflow (its config comes first) be shared by `config.processes`, or by those that torchrun started.

    All of them return the result; rank 0 writes. What is told on the way is told by one process only."""

    @functools.wraps(run)
    def shared(config: Any, *more: Any, **options: Any) -> Result:
        if getattr(config, "sharded", False) and config.processes < 2 and not launched():
            raise UsageError("--sharded splits the model over processes: give --processes N, or start with torchrun.")
        if getattr(config, "offload", None) is not None and (config.processes > 1 or launched()):
            raise UsageError("--offload is for one process; several processes split the model with --sharded.")
        if launched():
            return _as_rank((run, config, more))
        if config.processes < 2 or getattr(config, "dry_run", False):
            return run(config, *more, **options)
        told = next((one for one in more if callable(one)), None)  # stays here, and hears of what is said there
        there = tuple(Relay() if callable(one) else one for one in more)
        result: Result = in_processes(_as_rank, (shared, config, there), config.processes, told)
        return result

    return shared


def _as_rank(job: tuple[Run[Result], Any, tuple[Any, ...]]) -> Result:
    run, config, more = job
    run = getattr(run, "__wrapped__", run)
    from gradfix.tasks.loading import split_over

    with joined() as group:
        config = replace(config, device=group.device(config.device))
        if not getattr(config, "sharded", False):
            with sharing(group):
                return run(config, *more)
        try:
            with split_over(group, config.device):
                return run(config, *more)
        finally:
            gc.collect()  # FSDP's modules must be gone before their group is


def in_notes(result: Any, note: str) -> Any:
    """For results that are dataclasses with notes."""
    return replace(result, notes=type(result.notes)([*result.notes, note]))


def in_dict(result: dict[str, Any], note: str) -> dict[str, Any]:
    return {**result, "notes": [*result.get("notes", []), note]}


def release() -> None:
    """Give back the memory of what is no longer held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
