"""One architecture under the engines: its votes against an oracle of pairs, and its passes counted from outside.

The oracle takes every sample as two equal copies, by plain autograd: what torch gets wrong for one sample is right then.
Passes are calls of the loss. An engine that votes in one pass calls it as often for sixteen samples as for seven."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import gradfix
from gradfix.votes.engines.passes import take
from tests.sweep.zoo import Batch, Entry, Loss, entries

FEW, MANY = 7, 16  # samples: the votes of FEW are compared with the oracle's, passes are counted for both
SECONDS, LARGEST = 90, 30_000_000  # of a dtype; weights
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest gradient
TURNED = {torch.float64: 0.0, torch.float32: 0.01}  # of a tensor's votes, by rounding; a wrong rule turns half
FLIPS = {torch.float64: 0, torch.float32: 2}  # votes of a tiny tensor that are no verdict
CLOSE = 0.995  # of all votes in bfloat16
ONE_PASS, PARTLY, LOOPED = "one pass", "partly", "looped"


class Counted:
    """A loss that counts its calls."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls += 1
        return self.loss(model, batch)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Of the processor's time, not of the wall's: others may be at work."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def alone() -> None:
    """A process of the sweep: quiet, and with one thread."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def measured(name: str) -> dict[str, Any]:
    """The row of one architecture, in all dtypes."""
    return measure(next(entry for entry in entries() if entry.key == name), DTYPES)


def measure(entry: Entry, dtypes: list[torch.dtype]) -> dict[str, Any]:
    """How one architecture votes, by dtype; `refused` are those in which the model itself does not run."""
    row: dict[str, Any] = {"model": entry.key, "built": False, "parameters": 0, "dtypes": {}, "refused": {}}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        with at_most(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row["parameters"] = sum(p.numel() for p in _tried(entry, dtype).parameters())
            except Exception as error:  # whatever a library does not compute is no matter of votes
                row["refused"][name] = _short(error)
                continue
            row["built"] = True
            try:
                row["dtypes"][name] = _voted(*_built(entry, dtype))
            except Exception as error:  # the finding
                row["dtypes"][name] = {"crashed": _short(error)}
    return row


def _tried(entry: Entry, dtype: torch.dtype) -> nn.Module:
    """The model, once a forward and a backward have shown that it works in this dtype."""
    model, loss, batch = _built(entry, dtype)
    losses = loss(model, batch)
    if losses.shape != (FEW,):
        raise ValueError(f"losses of shape {tuple(losses.shape)}")
    if not bool(torch.isfinite(losses).all()):
        raise ValueError("losses that are not finite")
    losses.sum().backward()
    if not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None):
        raise ValueError("gradients that are not finite")
    return model


def _built(entry: Entry, dtype: torch.dtype) -> tuple[nn.Module, Loss, Batch]:
    """Anew for every dtype: a model may remember tensors of the last one. The same numbers each time."""
    torch.manual_seed(0)
    model, loss, make = entry.build()
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights are too many for a sweep")
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that all start alike hide mistakes
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype).eval(), loss, _to(make(FEW), dtype)


def _to(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _voted(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    votes, first = _counted(model, loss, batch)
    calls, notes, counts = [first], list(votes.notes), dtype in TURNED
    if counts:
        more, second = _counted(model, loss, take(batch, torch.arange(MANY) % FEW))
        calls, notes = [first, second], list(dict.fromkeys([*votes.notes, *more.notes]))
    found: dict[str, Any] = {"calls": calls, "way": _way(calls, notes), "notes": notes}
    if counts:
        wrong, share = compare(votes, model, loss, batch, dtype)
        return found | {"wrong": wrong, "differing": share}
    looped = gradfix.collect_votes(model, loss, [batch], engine="loop")
    found["agreement"] = agreement(votes, looped)
    if found["agreement"] < CLOSE:  # then how far is either from votes without rounding?
        exact = gradfix.collect_votes(model.double(), loss, [_to(batch, torch.float64)], engine="loop")
        found |= {"batched_exact": agreement(votes, exact), "looped_exact": agreement(looped, exact)}
    return found


def _counted(model: nn.Module, loss: Loss, batch: Batch) -> tuple[Any, int]:
    counted = Counted(loss)
    return gradfix.collect_votes(model, counted, [batch]), counted.calls


def _way(calls: list[int], notes: list[str]) -> str:
    if any(note.startswith("engine loop") for note in notes):
        return LOOPED
    grows = calls[-1] - calls[0] > (MANY - FEW) // 2  # a plan takes a pass or two, now and then
    apart = any("one at a time" in note or "one sample at a time" in note for note in notes)
    return PARTLY if grows or apart else ONE_PASS


def pair_gradients(model: nn.Module, loss: Loss, batch: Batch, samples: int) -> Iterator[dict[str, Tensor]]:
    """Every sample's gradients, half of those of two equal copies; a turn of `train` empties what modules remember."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for row in range(samples):
        model.train()
        model.eval()
        value = loss(model, take(batch, torch.tensor([row, row]))).sum() / 2
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        yield {name: g for name, g in zip(named, gradients) if g is not None}
    model.train()
    model.eval()


def compare(
    votes: Any, model: nn.Module, loss: Loss, batch: Batch, dtype: torch.dtype
) -> tuple[dict[str, float], float]:
    """Tensors whose votes are not the oracle's, and the share of votes that differ, where gradients are more than noise."""
    expected = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in votes.items()}
    told = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in votes.items()}
    for gradients in pair_gradients(model, loss, batch, FEW):
        scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        for name, gradient in gradients.items():
            expected[name] -= gradient.sign().int()
            told[name] &= gradient.abs() > NOISE[dtype] * scale
    shares = {}
    for name, tensor in votes.items():
        count = int(told[name].sum())
        if count:
            shares[name] = (int(((tensor.int() != expected[name]) & told[name]).sum()), count)
    silent = {n: 1.0 for n in votes if bool(expected[n][told[n]].any()) and not bool(votes[n].any())}
    allowed = {n: max(FLIPS[dtype], TURNED[dtype] * count) for n, (_, count) in shares.items()}
    bad = {n: wrong / count for n, (wrong, count) in shares.items() if wrong > allowed[n]}
    total = sum(count for _, count in shares.values())
    return {**bad, **silent}, sum(wrong for wrong, _ in shares.values()) / max(total, 1)


def agreement(votes: Any, looped: Any) -> float:
    """The share of all votes that two engines agree on."""
    same = sum(int((votes[name].sign() == tensor.sign()).sum()) for name, tensor in looped.items())
    return same / sum(tensor.numel() for tensor in looped.values())
