"""engine="auto": the fastest engine that gives this model's votes, checked before it is trusted.

The batched engine votes on the first and the last sample and the loop takes the same votes back; what is left must be
rounding. The losses of the first batch as a whole must be those of its halves, or its samples depend on each other. The choice and its reason go into the notes of the votes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfix.votes.batched.engine import batched, computed_in
from gradfix.votes.engines.loop import Engine, backward, folding, loop
from gradfix.votes.engines.passes import Batch, Loss, batch_size, samples, take
from gradfix.votes.tally import Tally

CHECKED_SAMPLES = 2
MEMORY_SHARE = 0.8
# Share of a tensor's signs that rounding may flip; a wrong rule flips about half.
ALLOWED = {torch.float64: 0.001, torch.float32: 0.02}
ALLOWED_16 = 0.25
# Gradients this small, of the largest of all weights and of their own tensor, are rounding.
NOISE = {dtype: (1e3 * torch.finfo(dtype).eps,) * 2 for dtype in (torch.float64, torch.float32)}
NOISE_16 = (0.01, 0.05)
MEANINGLESS = 100  # among votes of two samples


def choose(model: nn.Module, loss: Loss, batch: Batch, tally: Tally) -> tuple[Engine, list[str]]:
    """The engine for this model and kind of batch, and a note that says why.

    Unless it is the loop, it must yet see that samples have the same losses all together (`expected`)."""
    size = batch_size(batch)
    if size < CHECKED_SAMPLES:
        return loop, ["engine loop: the first batch holds one sample."]
    few = take(batch, torch.tensor([0, size - 1]))
    held = _allocated(tally)
    trial = Tally(tally.parameters)
    try:
        batched(model, loss, few, Tally(tally.parameters))  # makes the plan; later passes run otherwise
        batched(model, loss, few, trial, record=False)
    except Exception as error:  # whatever a model does to the fast path, the loop still works
        return loop, [f"engine loop: batched failed with {type(error).__name__}: {error}."]
    if trial.looped:
        return loop, [f"engine loop: {next(iter(trial.looped))}."]
    bytes_per_sample = (_peak(tally) - held) / CHECKED_SAMPLES
    wrong = disagreements(model, loss, few, trial)
    if wrong:
        name, share = max(wrong.items(), key=lambda item: item[1])
        return loop, [f"engine loop: batched disagrees on {len(wrong)} tensors, worst {name!r} ({share:.1%})."]
    note = f"engine batched: agrees with the loop on {CHECKED_SAMPLES} samples."
    return _in_parts(bytes_per_sample, size, tally), [note]


def disagreements(model: nn.Module, loss: Loss, batch: Batch, trial: Tally) -> dict[str, float]:
    """Tensors whose votes the loop cannot take back from `trial`, beyond what rounding explains.

    Entries whose gradient is zero but for rounding have signs that mean nothing, and are left out: key biases, also
    where they are a third of a packed bias, and all that attention over one token leaves to queries and keys."""
    dtype = computed_in(model, loss, batch, trial)
    of_all, of_tensor = NOISE.get(dtype, NOISE_16)
    largest: dict[str, Tensor] = {}

    def take_back(name: str, gradient: Tensor) -> None:
        dense, votes = gradient.to_dense() if gradient.is_sparse else gradient, trial[name]
        votes.add_(dense.sign().to(votes.dtype))
        if dense.numel():
            size = dense.abs()
            highest = size.max()
            votes.masked_fill_(size <= of_tensor * highest, MEANINGLESS)
            largest[name] = torch.maximum(largest.get(name, highest), highest)

    with folding(trial.parameters, take_back):
        for sample in samples(batch):
            backward(loss, model, sample)
    heights = {name: float(height) for name, height in largest.items()}
    scale, wrong = max(heights.values(), default=0.0), {}
    for name, rest in trial.items():
        if heights.get(name, scale) <= of_all * scale:
            continue
        told = rest < MEANINGLESS // 2
        count = int(told.sum())
        share = float((told & (rest != 0)).sum()) / max(count, 1)
        # One flipped sign of a tiny tensor is no verdict.
        if share > max(ALLOWED.get(dtype, ALLOWED_16), 2 / max(count, 1)):
            wrong[name] = share
    return wrong


def _in_parts(bytes_per_sample: float, samples: int, tally: Tally) -> Engine:
    """The batched engine, on as many samples at a time as the device has room for."""
    device = tally.device
    if device.type != "cuda" or bytes_per_sample <= 0:
        return batched
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    room = max(CHECKED_SAMPLES, int(MEMORY_SHARE * (free - torch.cuda.memory_allocated(device)) / bytes_per_sample))
    if room >= samples:
        return batched

    def engine(model: nn.Module, loss: Loss, batch: Batch, tally: Tally, *, expected: Tensor | None = None) -> None:
        for start in range(0, batch_size(batch), room):
            rows = slice(start, start + room)
            known = None if expected is None else expected[rows]
            batched(model, loss, take(batch, rows), tally, expected=known)

    return engine


def _allocated(tally: Tally) -> int:
    device = tally.device
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(tally: Tally) -> int:
    device = tally.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
