"""What a vote and a transport will need, from the config and the headers alone: no weights are read.

The memory model is that of the loop engine: weights, one small integer per weight, the gradient of the largest
tensor with its sign, and the activations of one sample; a forward pass over a whole batch checks the losses
first. Speed comes from a short measurement of this machine, or from the user's figure."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput, UsageError
from gradfix.votes.tally import dtype_for

GIB = 2**30
# Tensors a transformer layer keeps for the backward pass, per token: multiples of its width, and of its MLP's.
KEPT_HIDDEN, KEPT_INNER = 13.0, 4.0
LOGIT_COPIES = 3.0  # logits, their float32 copy, and the softmax or its gradient
EFFICIENCY = 0.6  # of the measured matrix product, reached by whole passes
READ_BYTES_PER_SECOND = 1.0e9
HASH_BYTES_PER_SECOND = 1.5e9
SLACK = 24 * 2**20  # allocator, hashing and writing
START_SECONDS = 5.0  # imports, tokenizer, examples


@dataclass(frozen=True)
class Shape:
    """The sizes that memory and time depend on."""

    parameters: int
    largest: int
    file_bytes: int
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    tokens: int
    shared: bool = False  # is the largest tensor used in two places?

    @property
    def block(self) -> int:
        """Weights of one layer, roughly."""
        return self.parameters // max(self.layers, 1)


def shape_of(checkpoint: Checkpoint, tokens: int | None = None) -> Shape:
    """Read off the headers and config.json beside them."""
    infos = [checkpoint.info(name) for name in checkpoint.names()]
    floating = [info for info in infos if info.dtype.is_floating_point]
    config = _config(checkpoint)
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    image, patch = _first(config, "image_size", default=0), _first(config, "patch_size", default=0)
    own = (image // patch) ** 2 + 1 if image and patch else 128
    layers = _first(config, "num_hidden_layers", "num_layers", "n_layer", "n_layers")
    layers += _first(config, "num_decoder_layers", default=0)
    return Shape(
        parameters=sum(info.numel for info in floating),
        largest=max((info.numel for info in floating), default=0),
        file_bytes=sum(info.nbytes for info in infos),
        layers=layers,
        hidden=hidden,
        inner=_first(config, "intermediate_size", "d_ff", "n_inner", default=4 * hidden),
        vocabulary=0 if image else _first(config, "vocab_size", default=0),
        tokens=tokens or own,
        shared=bool(config.get("tie_word_embeddings") or config.get("is_encoder_decoder")),
    )


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.path is None or not (checkpoint.path / "config.json").is_file():
        raise UsageError(f"{checkpoint} has no config.json; a plan needs a model folder.")
    try:
        found = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
        return {**found, **found.get("text_config", {}), **found.get("vision_config", {})}
    except (ValueError, TypeError, RecursionError, OSError):
        raise CorruptInput(f"{checkpoint.path / 'config.json'} is not readable as JSON.") from None


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        raise CorruptInput(f"config.json has no {' or '.join(names)}; is it a transformer's?")
    return default


@dataclass(frozen=True)
class VotePlan:
    """Bytes, operations and seconds of one vote in one way of running it."""

    mode: str
    devices: int
    memory: int
    seconds: float
    flops: float
    traffic: int  # bytes each process sends or reads from disk beyond its own weights

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory_gib": round(self.memory / GIB, 3)}


def plan_vote(
    shape: Shape,
    samples: int,
    *,
    dtype: torch.dtype,
    batch: int,
    pace: Pace,
    devices: int = 1,
    mode: str = "one device",
    recompute: bool = False,
) -> VotePlan:
    """What one process of `devices` needs; `pace` is that of one device in this dtype."""
    size = dtype.itemsize
    weights, votes = shape.parameters * size, shape.parameters * dtype_for(samples).itemsize
    folding = 2 * size + dtype_for(samples).itemsize  # a gradient, its sign, the sign as an integer
    if shape.shared:
        folding += 2 * size  # the first use's gradient waits for the second's, and their sum
    per_token = size * (KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner)
    kept = shape.tokens * per_token * (shape.layers if not recompute else 1)
    if recompute:
        kept += shape.tokens * shape.hidden * size * shape.layers
    logits = shape.tokens * shape.vocabulary * max(size, 4) * LOGIT_COPIES
    backward = folding * shape.largest + kept + logits
    forward = batch * (logits + shape.tokens * per_token)
    flops = 2.0 * shape.parameters * shape.tokens * samples * (1 + 3 + int(recompute))
    steps = math.ceil(samples / devices)
    traffic = 0
    if mode == "sharded":
        share = (weights + votes) / devices
        gathered = 2 * shape.block * size + shape.largest * (size + 1)  # two layers in flight, signs of one
        memory = share + gathered + kept + logits
        traffic = int(steps * shape.parameters * (2 * size + 1))
        flops -= 2.0 * shape.parameters * shape.tokens * samples  # the losses are checked in the same pass
    elif mode == "offload":
        memory = 2 * shape.block * size + votes + folding * shape.largest + kept + forward
        traffic = int(3 * samples * weights)
    else:
        memory = weights + votes + max(backward, forward)
    passes = flops * steps / samples / (pace.speed * EFFICIENCY)
    reading = weights / devices / READ_BYTES_PER_SECOND + shape.file_bytes / HASH_BYTES_PER_SECOND
    if mode == "offload":
        reading += traffic / READ_BYTES_PER_SECOND
    seconds = passes + (START_SECONDS + reading) * pace.crowding
    return VotePlan(mode, devices, int(memory) + SLACK, seconds, flops, traffic)


def choose_mode(plans: list[VotePlan], available: int) -> VotePlan:
    """The first that fits, in the order of preference; the leanest where none does."""
    return next((plan for plan in plans if plan.memory <= available), min(plans, key=lambda p: p.memory))


@dataclass(frozen=True)
class Pace:
    """Operations per second of a device, and how much longer than alone things take beside its other work."""

    speed: float
    crowding: float = 1.0


def measured_pace(device: str, dtype: torch.dtype, seconds: float = 0.5) -> Pace:
    """A plain matrix product, here and now."""
    size = 512 if device == "cpu" else 4096
    left = torch.ones(size, size, device=device, dtype=dtype)
    left @ left
    rounds, begin, busy = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < seconds:
        out = left @ left
        rounds += 1
        if device != "cpu":
            float(out[0, 0])  # waits for the device
    spent = time.perf_counter() - begin
    crowding = spent / max(time.thread_time() - busy, 1e-3) if device == "cpu" else 1.0
    return Pace(rounds * 2.0 * size**3 / spent, max(crowding, 1.0))


def stream_bytes(shape: Shape, samples: int) -> dict[str, int]:
    """What a transport reads and writes, and what the disk must hold for it."""
    votes = shape.parameters * dtype_for(samples).itemsize
    return {
        "votes_file": votes,
        "output_folder": shape.file_bytes,
        "read": 3 * shape.file_bytes + votes,
        "written": shape.file_bytes + votes,
    }
