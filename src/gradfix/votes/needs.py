"""What a vote and a transport will need, from the config and the headers alone: no weights are read.

Memory is weights, one small integer per voting weight, and what a pass over one sample (loop engine) or a whole
batch (batched engine) has alive at once. A `Pass` says the latter: walked through without weights where possible
(`commands.plan.Rehearsal`), by formula otherwise. Speed comes from a short measurement of this machine, or from the
user's figure."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import CorruptInput, UsageError
from gradfix.vectors.signvotes import dtype_for
from gradfix.votes.batched.forms import BLOCK_BYTES

GIB = 2**30
# Tensors a transformer layer keeps for the backward pass, per token: multiples of its width, and of its MLP's.
KEPT_HIDDEN, KEPT_INNER = 13.0, 4.0
LOGIT_COPIES = 3.0  # logits, their float32 copy, and the softmax or its gradient
EFFICIENCY = 0.6  # of the measured matrix product, reached by whole passes
FOLD_OPERATIONS = 1000.0  # what folding one weight's sign costs where only the speed of products is known
CHECKED_SAMPLES = 2  # on which the batched engine is compared with the loop before it is trusted
CHECK_PASSES = 9.0  # forward passes' worth of work per checked sample
READ_BYTES_PER_SECOND = 1.0e9
HASH_BYTES_PER_SECOND = 3.0e9  # of files, in BLAKE3
KEY_BYTES_PER_SECOND = 1.5e9  # of weights in memory, in sha256: by them a partial vote is recognised
HELD_BACK = 1.1  # of what is alive: the allocator keeps pieces that fit nothing
SLACK = 40 * 2**20  # hashing, writing, and what the C library does not give back
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
    idle: int = 0  # weights of experts that a token does not use

    @property
    def active(self) -> int:
        """Weights that one token meets."""
        return self.parameters - self.idle

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
        idle=_idle(config, {n: checkpoint.info(n).numel for n in checkpoint.names() if ".experts." in n}),
    )


def _idle(config: Mapping[str, Any], experts: Mapping[str, int]) -> int:
    count = _first(config, "num_local_experts", "num_experts", default=1)
    used = _first(config, "num_experts_per_tok", default=count)
    return int(sum(experts.values()) * (1 - min(used, count) / max(count, 1)))


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
class Pass:
    """What so many samples at once take, beyond weights and votes."""

    samples: int
    memory: int  # the most that is alive at once in a forward and backward pass, gradients folded one by one
    bare: int  # the same without the weights' gradients
    kept: int  # of that, between the two passes
    looking: int  # the most in a forward pass without gradients
    flops: float  # of the forward pass; the backward pass takes twice as many


Walk = Callable[[int], Pass]


def estimated_pass(shape: Shape, samples: int, dtype: torch.dtype) -> Pass:
    """A transformer's pass by its sizes."""
    size = dtype.itemsize
    folding = 2 * size + 1  # a gradient, its sign, the sign as an integer
    if shape.shared:
        folding += 2 * size  # the first use's gradient waits for the second's, and their sum
    layer = samples * shape.tokens * size * (KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner)
    logits = samples * shape.tokens * shape.vocabulary * max(size, 4) * LOGIT_COPIES
    kept = layer * shape.layers + logits
    return Pass(
        samples,
        memory=int(folding * shape.largest + kept),
        bare=int(kept),
        kept=int(kept),
        looking=int(layer + logits),
        flops=2.0 * shape.active * shape.tokens * samples,
    )


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


@dataclass(frozen=True)
class Pace:
    """Operations per second of a device that does nothing else."""

    speed: float
    seconds_per_fold: float | None = None  # of one weight's sign

    @property
    def fold(self) -> float:
        return FOLD_OPERATIONS / self.speed if self.seconds_per_fold is None else self.seconds_per_fold


def measured_pace(device: str, dtype: torch.dtype, seconds: float = 0.5) -> Pace:
    """A plain matrix product and the fold of a gradient, here and now."""
    size = 512 if device == "cpu" else 4096
    left = torch.ones(size, size, device=device, dtype=dtype)
    wide = torch.ones(4 * size, size, device=device, dtype=dtype)
    votes = torch.zeros(wide.shape, device=device, dtype=torch.int8)
    product = _seconds_of(lambda: left @ left, seconds, device)
    fold = _seconds_of(lambda: votes.sub_(wide.sign().to(votes.dtype)), seconds, device)
    return Pace(2.0 * size**3 / product, fold / wide.numel())


def _seconds_of(work: Callable[[], torch.Tensor], seconds: float, device: str) -> float:
    """One call, undisturbed: the fastest of as many as fit into the time, so that other work does not count."""
    fastest, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or fastest == math.inf:
        begin = time.perf_counter()
        out = work()
        if device != "cpu":
            float(out[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest


@dataclass(frozen=True)
class VoteSetup:
    """One way to run a vote. A sharded or offloaded model goes sample by sample, whatever the engine.

    `pace` is that of one device in this dtype; `walk` gives the passes, where they are not estimated; `voting` is the
    number of weights that vote where not all do."""

    shape: Shape
    samples: int
    dtype: torch.dtype
    batch: int
    pace: Pace
    engine: str = "loop"
    walk: Walk | None = None
    voting: int | None = None
    devices: int = 1
    mode: str = "one device"
    recompute: bool = False
    device: str = "cuda"

    def plan(self) -> VotePlan:
        """What one process of `devices` needs."""
        held = (self.weights + self.votes) / self.split if self.mode != "offload" else 0
        memory = int(held + self._working_memory()) + SLACK
        return VotePlan(self.mode, self.devices, memory, self._seconds(), self._operations(), self._traffic())

    @property
    def voters(self) -> int:
        return self.shape.parameters if self.voting is None else self.voting

    @property
    def steps(self) -> int:
        return math.ceil(self.samples / self.devices)

    @property
    def at_once(self) -> int:
        return min(self.batch, self.steps)

    @property
    def batched(self) -> bool:
        whole = self.mode in ("one device", "data parallel")
        return whole and self.engine != "loop" and self.at_once >= CHECKED_SAMPLES

    @property
    def split(self) -> int:
        """Among how many the weights are shared out."""
        return self.devices if self.mode == "sharded" else 1

    @property
    def weights(self) -> int:
        return self.shape.parameters * self.dtype.itemsize

    @property
    def votes(self) -> int:
        return self.voters * dtype_for(self.samples).itemsize

    def _pass(self, samples: int) -> Pass:
        return self.walk(samples) if self.walk else estimated_pass(self.shape, samples, self.dtype)

    def _working_memory(self) -> float:
        """Beyond weights and votes, which an offloaded model has only in part."""
        shape, size = self.shape, self.dtype.itemsize
        one, whole = self._pass(1), self._pass(self.at_once)
        if self.batched:
            batch = max(whole.bare + 2 * BLOCK_BYTES, whole.looking)
            checking = self.voters  # the check by the loop has votes of its own
            if self.device == "cpu":  # where small pieces that were let go stay with the process
                return checking + HELD_BACK * max(batch, one.memory)
            return HELD_BACK * max(batch, one.memory + checking)
        if self.mode == "sharded":
            in_flight = 2 * shape.block * size + shape.largest * (size + 1)  # layers put together, and signs
            return in_flight + HELD_BACK * self._kept(one)
        if self.mode == "offload":
            passing = one.memory - one.kept + self._kept(one)
            return 2 * shape.block * size + self.votes + HELD_BACK * max(passing, whole.looking)
        return HELD_BACK * max(one.memory, whole.looking)

    def _kept(self, one: Pass) -> float:
        """What one sample keeps for its backward pass; with recomputation one layer's, and every layer's input."""
        shape = self.shape
        if not self.recompute:
            return one.kept
        inputs = shape.tokens * shape.hidden * self.dtype.itemsize * shape.layers
        return one.kept / max(shape.layers, 1) + inputs

    def _operations(self) -> float:
        """Of all processes together: the losses are looked at first, or (batched, sharded) in the same pass."""
        one = self._pass(1).flops
        if self.batched:
            checking = self.at_once + CHECK_PASSES * CHECKED_SAMPLES
            return one * (3 * self.samples + self.devices * checking)
        return one * self.samples * (3 + self.recompute + (self.mode != "sharded"))

    def _traffic(self) -> int:
        if self.mode == "sharded":
            return self.steps * self.shape.parameters * (2 * self.dtype.itemsize + 1)
        return 3 * self.samples * self.weights if self.mode == "offload" else 0

    def _seconds(self) -> float:
        weights = self.weights / self.split
        files = weights / READ_BYTES_PER_SECOND + self.shape.file_bytes / HASH_BYTES_PER_SECOND
        files += weights / KEY_BYTES_PER_SECOND
        if self.mode == "offload":
            files += self._traffic() / READ_BYTES_PER_SECOND
        passes = self._operations() / self.devices / (self.pace.speed * EFFICIENCY)
        folds = self.steps * self.voters / self.split * self.pace.fold
        return START_SECONDS + files + passes + folds


def choose_mode(plans: list[VotePlan], available: int) -> VotePlan:
    """The first that fits, in the order of preference; the leanest where none does."""
    return next((plan for plan in plans if plan.memory <= available), min(plans, key=lambda p: p.memory))


def stream_bytes(shape: Shape, samples: int) -> dict[str, int]:
    """What a transport reads and writes, and what the disk must hold for it."""
    votes = shape.parameters * dtype_for(samples).itemsize
    return {
        "votes_file": votes,
        "output_folder": shape.file_bytes,
        "read": 3 * shape.file_bytes + votes,
        "written": shape.file_bytes + votes,
    }
