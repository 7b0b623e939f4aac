"""engine="auto": the fastest engine that gives this model's votes, checked before it is trusted.

The batched engine votes on the first and the last sample and the loop takes the same votes back; what is left must be
rounding. The losses of the first batch as a whole must be those of its halves, or its samples depend on each other. The choice and its reason go into the notes of the votes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfix.votes.batched.engine import batched
from gradfix.votes.engines.loop import Engine, backward, folding, loop
from gradfix.votes.engines.passes import Batch, Loss, batch_size, samples, take
from gradfix.votes.tally import Tally

CHECKED_SAMPLES = 2
MEMORY_SHARE = 0.8
# Share of a tensor's signs that rounding may flip; a wrong rule flips about half.
ALLOWED = {torch.float64: 0.001, torch.float32: 0.02}
ALLOWED_16 = 0.25


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
    where they are a third of a packed bias. Vectors are judged entry by entry, larger tensors as a whole."""
    largest: dict[str, Tensor] = {}

    def take_back(name: str, gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        trial[name].add_(dense.sign().to(trial[name].dtype))
        size = dense.abs() if dense.dim() < 2 else dense.abs().max()
        largest[name] = torch.maximum(largest[name], size) if name in largest else size

    with folding(trial.parameters, take_back):
        for sample in samples(batch):
            backward(loss, model, sample)
    scale = max((float(size.max()) for size in largest.values() if size.numel()), default=0.0)
    wrong = {}
    for name, rest in trial.items():
        dtype = trial.parameters[name].dtype
        told = largest.get(name, torch.zeros(())) > 1e3 * torch.finfo(dtype).eps * scale
        told = told.to(rest.device).expand(rest.shape)
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
