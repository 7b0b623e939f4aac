"""Walk through the passes of a vote without weights: how much memory they take and how much they compute.

The model is built from its config, of tensors that have a shape and no content, and goes through a forward and a
backward pass whose gradients are folded as the engines fold them. Every allocation is seen, so no constant has to
describe an architecture. A model that cannot be walked through is left to the formulas of `gradfix.votes.needs`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gradfix.tasks.loading import quiet_transformers
from gradfix.votes.needs import Pass

ANSWER_TOKENS = 6  # of a label, which an encoder-decoder writes
EXPERTS_DTYPE = torch.bfloat16  # the only one that experts can be walked through in
INPUT_LAYERS = (nn.Embedding, nn.Conv1d, nn.Conv2d)  # where examples enter a model

Score = Callable[[Any, int], Tensor]


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
        with _silent(), FakeTensorMode(), self.device, _with_shapes(self.model) as model:
            counted = FlopCounterMode(display=False)
            looking = Allocations(model)
            with counted, looking, torch.no_grad():
                self.score(model, samples)
            folding, bare = Allocations(model), Allocations(model)
            with folding, _folding(model):
                self.score(model, samples).sum().backward()
            with _anchored(model) as anchor, bare:
                losses = self.score(model, samples)
                kept = bare.now
                losses.sum().backward(inputs=[anchor])
        sizes = (folding.peak, bare.peak, kept, looking.peak)
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
def _with_shapes(model: nn.Module) -> Iterator[nn.Module]:
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
def _folding(model: nn.Module) -> Iterator[None]:
    """Take every finished gradient's sign as an integer, then let it go."""

    def fold(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.sign().to(torch.int8)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(fold) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
def _silent() -> Iterator[None]:
    """torch logs what it cannot walk through at length; the caller has its own way out."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
