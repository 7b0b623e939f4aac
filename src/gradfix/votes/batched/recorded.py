"""Passes recorded once and played again, for batches that look the same: CUDA graphs for the batched engine.

Where launching a pass takes longer than computing it, the second batch of a kind is watched, the third recorded, and
later ones are only played. A recording must repeat the votes of the batch that was watched, in less time; one that does
not, or cannot be made, is refused and passes run as before. It holds a pass's memory until `drop`, so a model has one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradfix.system import modules
from gradfix.votes.engines.loop import NotFinite
from gradfix.votes.engines.passes import Batch, Loss, leaves_of, losses_of, map_tensors, structure_of, tensors_of
from gradfix.votes.tally import SpotCheck, Tally

IDLE_SHARE = 0.3  # of a pass: a device that is done this soon after the last launch was waiting for launches
# Votes of another batch differ by more than they are large; reordered sums change a few of them.
ALLOWED_CHANGE = 0.25
COMPARED = 16384  # votes of each weight, enough to tell
PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class BatchVote:
    """One batch on its way through the engine: what is asked of which model, and where its votes go."""

    model: nn.Module
    loss: Loss
    batch: Batch
    tally: Tally
    count: int
    expected: Tensor | None = None  # its losses, taken in parts: samples that do not mix have the same together
    spot: SpotCheck | None = None

    def losses(self) -> Tensor:
        return losses_of(self.model, self.loss, self.batch)

    def tensors(self) -> list[Tensor]:
        return tensors_of(self.batch)

    def apart(self) -> BatchVote:
        """The same with a tally of its own, already of this batch's size."""
        votes = Tally(self.tally.parameters)
        votes.reserve(self.count)
        return replace(self, tally=votes)


@dataclass
class Example:
    """A batch and the first of the votes each weight got from it; the batch is where a recording finds its inputs."""

    batch: Batch
    votes: dict[str, Tensor]


@dataclass
class Repeats:
    """The last kind of batch of one model: what came of it so far, and its recording once there is one."""

    key: Any
    seen: int = 0
    reason: str = ""  # why passes of this kind are not recorded
    seconds: float = 0.0  # of a pass that is not recorded
    example: Example | None = None
    recording: Recording | None = None
    held: list[int] = field(default_factory=list)  # addresses of weights and buffers

    def refuse(self, reason: str) -> None:
        self.reason, self.example, self.recording = reason, None, None


@dataclass
class Recording:
    """A pass that reads its inputs from `inputs` and leaves its votes in `votes`."""

    inputs: list[Tensor]
    votes: Tally
    finite: Tensor
    play: Callable[[], None]

    def run(self) -> bool:
        """Whether all losses are finite; only then do the votes mean anything."""
        self.play()
        return bool(self.finite)

    def fold(self, asked: BatchVote) -> None:
        for own, leaf in zip(self.inputs, asked.tensors()):
            own.copy_(leaf, non_blocking=True)
        if not self.run():
            raise NotFinite
        _add(self.votes, asked.tally)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start

    def repeats(self, expected: dict[str, Tensor]) -> bool:
        if not self.run():
            return False
        pairs = [(own.float(), expected[name].float()) for name, own in _first(self.votes).items()]
        change = torch.stack([(own - other).abs().sum() for own, other in pairs]).sum()
        size = torch.stack([other.abs().sum() for _, other in pairs]).sum()
        return bool(change <= ALLOWED_CHANGE * size)


_REPEATS: WeakKeyDictionary[nn.Module, Repeats] = WeakKeyDictionary()


def repeats_of(asked: BatchVote) -> Repeats | None:
    """What is known about batches like this one; another kind than the last one starts anew."""
    model, tally = asked.model, asked.tally
    if not can_record(tally.device):
        return None
    tensors = asked.tensors()
    others = [leaf for leaf in leaves_of(asked.batch) if not isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, PLAIN) for leaf in others):
        return None
    key = (
        asked.loss,
        structure_of(asked.batch),
        others,
        [(t.shape, t.dtype, t.requires_grad, t.device) for t in tensors],
        (model.training, torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")),
        (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    )
    known = _REPEATS.get(model)
    if known is None or known.key != key:
        drop(model)
        known = _REPEATS[model] = Repeats(key)
    known.seen += 1
    return known


def stays_put(known: Repeats, asked: BatchVote) -> bool:
    """Whether everything lies on one device, and the weights where they lay when this was asked first."""
    held = (*asked.tally.parameters.values(), *asked.model.buffers())
    where = [tensor.data_ptr() for tensor in held]
    devices = {tensor.device for tensor in (*asked.tensors(), *held, *(buffer for _, buffer in asked.tally.items()))}
    known.held = known.held or where
    return len(devices) == 1 and known.held == where


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def drop(model: nn.Module) -> None:
    """Let go of a model's recording and its memory."""
    _REPEATS.pop(model, None)


def all_finite(losses: Tensor) -> bool:
    """Waits for the device; a wait that is no part of what would be recorded, so it is not held against the pass."""
    mode = torch.cuda.get_sync_debug_mode() if losses.is_cuda else 0
    if not mode:
        return bool(torch.isfinite(losses).all())
    torch.cuda.set_sync_debug_mode("default")
    try:
        return bool(torch.isfinite(losses).all())
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def watch_pass(known: Repeats, asked: BatchVote, run: Callable[[BatchVote], None]) -> None:
    """Run a pass as usual, and keep its votes as an example where a recording of it would pay."""
    trial = asked.apart()
    with _synchronisations() as found:
        start = time.perf_counter()
        run(trial)
        launched = time.perf_counter()
    if asked.tally.device.type == "cuda":
        torch.cuda.synchronize(asked.tally.device)
    end = time.perf_counter()
    _add(trial.tally, asked.tally)
    if found:
        known.refuse(f"the pass waits for the device: {found[0]}")
    elif end - launched > IDLE_SHARE * (end - start):
        known.refuse("the device is busy all the time")
    else:
        votes = {name: part.clone() for name, part in _first(trial.tally).items()}
        known.seconds, known.example = end - start, Example(map_tensors(copy_of, asked.batch), votes)


def record_pass(known: Repeats, asked: BatchVote, run: Callable[[BatchVote], Tensor]) -> None:
    """Record a pass, and keep the recording if it repeats the example's votes in less time.

    `run` folds a batch's votes and gives whether all its losses are finite."""
    assert known.example is not None
    example, known.example = known.example, None
    try:
        recording = _recorded(replace(asked, batch=example.batch).apart(), run)
        if not recording.repeats(example.votes):
            known.refuse("the recording does not repeat the votes")
        elif recording.seconds() > known.seconds:
            known.refuse("playing it takes longer than launching it")
        else:
            known.recording = recording
    except Exception as error:  # whatever a loss does that cannot be recorded, the pass itself still works
        known.refuse(f"{type(error).__name__}: {error}")


def _recorded(asked: BatchVote, run: Callable[[BatchVote], Tensor]) -> Recording:
    inputs = [leaf.detach() for leaf in asked.tensors()]
    finite = torch.zeros((), dtype=torch.bool, device=inputs[0].device)

    def once() -> None:
        torch._foreach_zero_([buffer for _, buffer in asked.tally.items()])
        finite.copy_(run(asked))

    return Recording(inputs, asked.tally, finite, capture(once))


def copy_of(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _first(votes: Tally) -> dict[str, Tensor]:
    return {name: buffer.flatten()[:COMPARED] for name, buffer in votes.items()}


def capture(once: Callable[[], None]) -> Callable[[], None]:
    with _unnoticed():
        return modules.capture(once)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Models that ask whether they are recorded must not take another way than in the pass that was watched.

    Those of transformers, say, build attention masks then that they leave out otherwise."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _add(votes: Tally, tally: Tally) -> None:
    names = [name for name, _ in votes.items()]
    torch._foreach_add_([tally[name] for name in names], [votes[name] for name in names])


@contextmanager
def _synchronisations() -> Iterator[list[str]]:
    """What makes the host wait for the device inside; such a pass cannot be recorded."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in seen:
        text = str(warning.message).splitlines()[0]
        if "synchronizing CUDA operation" in text:
            found.append(text)
        elif "prototype feature" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
