"""Show that a permuted model is the same model: the test every alignment must pass.

`random_alignment` draws from all symmetries a spec claims, so a wrong claim shows as a large error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradfix.align.alignment import Alignment
from gradfix.align.layout import LayoutOptions, layout_of
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.errors import UsageError

HIDDEN = {"last_hidden_state": ("residual",), "encoder_last_hidden_state": ("residual",), "pooler_output": ("pooler",)}
TOWERS = {"last_hidden_state": ("vision.residual", "text.residual")}
EMBEDDED = dict.fromkeys(("0", "1", "image_features", "text_features", "image_embeds", "text_embeds"), ("embedding",))
ALONE = {"last_hidden_state": ("residual",), "pooler_output": ("embedding", "residual")}
# Fields of a family's output that come out in permuted order (the hidden states of a model without a head), with the
# groups that permute them: the first that exists.
OUTPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("vit", "bert", "t5", "llama", "gpt2"), HIDDEN),
    **dict.fromkeys(("vision_tower", "text_tower"), ALONE),
    "clip": {**EMBEDDED, **TOWERS, "pooler_output": TOWERS["last_hidden_state"]},
    "siglip": {**EMBEDDED, **TOWERS, "pooler_output": ("embedding",)},
    "open_clip": EMBEDDED,
}
Forward = Callable[[nn.Module], Any]


def random_alignment(
    source: Source | Checkpoint, *, keep_heads: bool = False, seed: int = 0, **options: Unpack[LayoutOptions]
) -> Alignment:
    """A uniformly random element of the family's symmetry; `keep_heads` leaves the order of heads alone."""
    checkpoint = open_checkpoint(source)
    layout = layout_of(checkpoint, **options)
    stacks = layout.stacks({name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()})
    generator = torch.Generator().manual_seed(seed)
    groups = {}
    for name, (copies, size) in stacks.items():
        keys = torch.rand(copies, size, generator=generator)
        if keep_heads and name.endswith((".heads", ".queries")):
            keys = keys.sort(dim=1).values
        groups[name] = keys.argsort(dim=1)
    return Alignment(layout, groups, "random")


def same_function_error(model: nn.Module, alignment: Alignment, inputs: Any, forward: Forward | None = None) -> float:
    """Largest difference between the outputs of a model and of its permuted copy, relative to the
    largest output where that exceeds 1.

    `inputs` is what the model is called with (a mapping by keyword, a tuple by position), unless
    `forward(model)` does the calling. Outputs that come out permuted (hidden states of a model
    without a head) are compared in the permuted order. Rounding leaves about 1e-6 in float32."""
    permuted = copy.deepcopy(model)
    permuted.load_state_dict(alignment.apply(dict(model.state_dict())))
    was_training = model.training
    try:
        with torch.no_grad():
            before, after = (_outputs(each.eval(), inputs, forward) for each in (model, permuted))
    finally:
        model.train(was_training)
    if not before:
        raise UsageError("the model returned no floating-point tensor to compare; pass forward= to pick one.")
    return max(_error(_moved(alignment, name, before[name]), after[name]) for name in before)


def _outputs(model: nn.Module, inputs: Any, forward: Forward | None) -> dict[str, Tensor]:
    if forward is not None:
        result = forward(model)
    elif isinstance(inputs, Mapping):
        result = model(**inputs)
    else:
        result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    if isinstance(result, Tensor):
        result = {"output": result}
    fields = result.items() if isinstance(result, Mapping) else ((str(i), v) for i, v in enumerate(result))
    return {name: v for name, v in fields if isinstance(v, Tensor) and v.is_floating_point()}


def _error(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max()) / max(1.0, float(expected.abs().max()))


def _moved(alignment: Alignment, name: str, output: Tensor) -> Tensor:
    """An output in the order the permuted model gives it."""
    layout = alignment.layout
    for group in OUTPUTS.get(layout.family.name, {}).get(name, ()):
        stack = alignment.groups.get(layout.replaced.get(group, group))
        if stack is not None and stack.shape[1] == output.shape[-1]:
            return output.index_select(-1, stack[0].to(output.device))
    return output
