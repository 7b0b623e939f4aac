"""`gradfix plan`: memory, disk, time and the way to run, before anything is loaded.

The passes of a vote are walked through without weights: the model is built from its config, of tensors that have a
shape and no content, and goes through a forward and a backward pass whose gradients are folded as the engines fold
them. Every allocation is seen, so no constant has to describe an architecture. A model that cannot be walked through
is left to the formulas of `gradfix.votes.needs`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import torch_dtype
from gradfix.commands.configs import PlanConfig
from gradfix.commands.setting import device_of
from gradfix.errors import UsageError
from gradfix.registry import unknown
from gradfix.system.modules import device_room
from gradfix.tasks.loading import first_line, quiet_transformers
from gradfix.votes.collect import ENGINES
from gradfix.votes.engines.loop import folding
from gradfix.votes.needs import (
    GIB,
    Pace,
    Pass,
    Shape,
    VotePlan,
    VoteSetup,
    Walk,
    choose_mode,
    estimated_pass,
    measured_pace,
    shape_of,
    stream_bytes,
)

ANSWER_TOKENS = 6  # of a label, which an encoder-decoder writes
EXPERTS_DTYPE = torch.bfloat16  # the only one that experts can be walked through in
INPUT_LAYERS = (nn.Embedding, nn.Conv1d, nn.Conv2d)  # where examples enter a model

Score = Callable[[Any, int], Tensor]


@dataclass(frozen=True)
class PlanResult:
    shape: Shape
    samples: int
    plans: list[VotePlan]
    chosen: VotePlan
    fits: bool
    disk: dict[str, int]
    available: int
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "target": asdict(self.shape),
            "samples": self.samples,
            "available_gib": round(self.available / GIB, 2),
            "modes": [plan.as_json() for plan in self.plans],
            "chosen": self.chosen.mode,
            "fits": self.fits,
            "disk": self.disk,
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                plan.mode + (" *" if plan is self.chosen else ""),
                str(plan.devices),
                f"{plan.memory / GIB:.2f} GiB",
                f"{plan.seconds:.0f} s",
                f"{plan.flops:.2e}",
            )
            for plan in self.plans
        ]


def run_plan(config: PlanConfig) -> PlanResult:
    """Only headers and config.json are read."""
    if min(config.shots, config.classes, config.devices, config.batch_size) < 1:
        raise UsageError("--shots, --classes, --devices and --batch-size must be at least 1.")
    if config.engine not in ("auto", *ENGINES):
        raise UsageError(unknown("engine", config.engine, ["auto", *ENGINES]))
    shape = shape_of(open_checkpoint(config.target), config.tokens)
    samples, dtype = config.shots * config.classes, torch_dtype(config.dtype)
    device = device_of(config.device)
    pace = Pace(config.tflops * 1e12) if config.tflops else measured_pace(device, dtype)
    available = int(config.device_memory * GIB) if config.device_memory else device_room(torch.device(device))
    walk, voting, notes = _rehearsed(config, shape, dtype, device)
    one = VoteSetup(shape, samples, dtype, config.batch_size, pace, config.engine, walk, voting, device=device)
    setups = [one]
    if config.devices > 1:
        many = replace(one, devices=config.devices, mode="data parallel")
        split = replace(many, mode="sharded")
        setups += [many, split, replace(split, recompute=True)]
    plans = [setup.plan() for setup in (*setups, replace(one, mode="offload", recompute=True))]
    order = sorted(plans[:-1], key=lambda plan: plan.seconds) + plans[-1:]
    chosen = choose_mode(order, available)
    disk = stream_bytes(shape, samples)
    return PlanResult(shape, samples, plans, chosen, chosen.memory <= available, disk, available, notes)


def _rehearsed(
    config: PlanConfig, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[Walk | None, int | None, tuple[str, ...]]:
    """The passes walked through without weights; by formula where the model does not let itself be walked through."""
    folder = open_checkpoint(config.target).path
    assert folder is not None  # it has a config.json
    try:
        rehearsal = Rehearsal.of_folder(folder, shape.tokens, dtype, device)
        walk = functools.cache(rehearsal.walk)
        walk(1)
    except Exception as error:  # whatever a model's code does without weights, the formulas still hold
        note = f"sizes by formula: the model cannot be walked through ({first_line(error)})."
        return None, None, (note,)
    if shape.idle:  # the products of experts are not counted on the way
        formula = estimated_pass(shape, 1, dtype).flops
        return (lambda count: replace(walk(count), flops=formula * count)), rehearsal.voting, ()
    return walk, rehearsal.voting, ()


class Rehearsal:
    """A model without weights (on the meta device), ready to be walked through with any number of samples.

    `score(model, samples)` gives the losses of so many samples; sizes are multiplied by `scale`."""

    def __init__(self, model: nn.Module, score: Score, device: str, scale: float = 1.0) -> None:
        self.model, self.score, self.scale = model, score, scale
        self.device = torch.device(device)

    @classmethod
    def of_folder(cls, folder: Path, tokens: int, dtype: torch.dtype, device: str) -> Rehearsal:
        """The model of a config.json with the loss of its usual task; raises where it cannot be built."""
        from transformers import AutoConfig

        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            experts = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
            used = EXPERTS_DTYPE if experts else dtype
            auto, score = _part(config, tokens, used)
            with torch.device("meta"):
                model = auto.from_config(config, dtype=used).eval()
        model.tie_weights()
        _freeze(model, config)
        return cls(model, score, device, dtype.itemsize / used.itemsize)

    @property
    def voting(self) -> int:
        """Weights that vote."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def walk(self, samples: int) -> Pass:
        """One look at the losses, then one forward and backward pass, of so many samples at once."""
        with silent(), FakeTensorMode(), self.device, with_shapes(self.model) as model:
            counted = FlopCounterMode(display=False)
            looking = Allocations(model)
            with counted, looking, torch.no_grad():
                self.score(model, samples)
            folded, bare = Allocations(model), Allocations(model)
            voting = {name: p for name, p in model.named_parameters() if p.requires_grad}
            with folded, folding(voting, lambda _, gradient: gradient.sign().to(torch.int8)):
                self.score(model, samples).sum().backward()
            with _anchored(model) as anchor, bare:
                losses = self.score(model, samples)
                kept = bare.now
                losses.sum().backward(inputs=[anchor])
        sizes = (folded.peak, bare.peak, kept, looking.peak)
        memory, without, kept, looked = (int(size * self.scale) for size in sizes)
        return Pass(samples, memory, without, kept, looked, float(counted.get_total_flops()))


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, beyond the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        own = [*model.parameters(), *model.buffers()]
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: Any) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def _part(config: Any, tokens: int, dtype: torch.dtype) -> tuple[Any, Score]:
    """The class that the model's usual task loads, and its per-sample losses for so many samples."""
    import transformers

    kind = (config.architectures or [""])[0]
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        images = _images(config.vision_config, dtype)
        return transformers.AutoModel, lambda model, samples: _classified(
            _pooled(model.get_image_features(pixel_values=images(samples)))
        )
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM, lambda model, samples: _written(model, samples, tokens)
    if "ForImageClassification" in kind:
        images = _images(config, dtype)
        return transformers.AutoModelForImageClassification, lambda model, samples: _classified(
            model(pixel_values=images(samples)).logits
        )
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM, lambda model, samples: _continued(model, samples, tokens)
    if "ForSequenceClassification" in kind:
        return transformers.AutoModelForSequenceClassification, lambda model, samples: _classified(
            model(**_texts(samples, tokens)).logits
        )
    return transformers.AutoModel, lambda model, samples: _classified(
        model(**_texts(samples, tokens)).last_hidden_state.mean(1)
    )


def _texts(samples: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.zeros(samples, tokens, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(config: Any, dtype: torch.dtype) -> Callable[[int], Tensor]:
    shape = (getattr(config, "num_channels", 3), config.image_size, config.image_size)
    return lambda samples: torch.zeros(samples, *shape, dtype=dtype)


def _pooled(found: Any) -> Tensor:
    pooled: Tensor = getattr(found, "pooler_output", found)
    return pooled


def _classified(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores.float(), scores.new_zeros(len(scores), dtype=torch.int64), reduction="none")


def _continued(model: Any, samples: int, tokens: int) -> Tensor:
    given = _texts(samples, tokens)
    return _spelled(model(**given).logits[:, :-1], given["input_ids"][:, 1:])


def _written(model: Any, samples: int, tokens: int) -> Tensor:
    answers = torch.zeros(samples, ANSWER_TOKENS, dtype=torch.int64)
    return _spelled(model(**_texts(samples, tokens), decoder_input_ids=answers).logits, answers)


def _spelled(logits: Tensor, answers: Tensor) -> Tensor:
    # The softmax makes this copy itself, where an allocation is not seen.
    by_token = logits.float().transpose(1, 2).contiguous()
    return F.cross_entropy(by_token, answers, reduction="none").sum(1)


def _freeze(model: nn.Module, config: Any) -> None:
    """What does not vote in a zero-shot task: the text tower of two, the pooler of an encoder."""
    towers = hasattr(config, "vision_config") and hasattr(config, "text_config")
    for name, parameter in model.named_parameters():
        voting = name.startswith(("vision_model.", "visual_projection.")) or not towers
        parameter.requires_grad_(voting and not name.startswith("pooler."))


@contextmanager
def with_shapes(model: nn.Module) -> Iterator[nn.Module]:
    """The model with tensors of the surrounding mode and device in place of its own."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    new: dict[int, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return new.setdefault(id(tensor), made)

    for module, parameters, buffers in before:
        module._parameters.update({n: like(p) for n, p in parameters.items() if p is not None})  # type: ignore[misc]
        module._buffers.update({n: like(b) for n, b in buffers.items() if b is not None})
    try:
        yield model
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def _anchored(model: nn.Module) -> Iterator[Tensor]:
    """A number that all inputs depend on: a backward pass down to it computes no weight's gradient."""
    anchor = torch.zeros((), requires_grad=True)

    def tie(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + anchor.to(output.dtype)

    inputs = [module for module in model.modules() if isinstance(module, INPUT_LAYERS)]
    handles = [module.register_forward_hook(tie) for module in inputs]
    try:
        yield anchor
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def silent() -> Iterator[None]:
    """torch logs what it cannot walk through at length; the caller has its own way out."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
