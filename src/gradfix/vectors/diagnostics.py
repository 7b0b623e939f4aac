"""What a transport did, in numbers a person can judge.

Sign agreement per block, kept share, tie rate, and the measured descent. First-order theory promises a
descent for the exact gradient's sign only; for votes these functions measure it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply
from gradfix.votes.collect import collect_gradient, left_as_it_was
from gradfix.votes.engines.loop import Batch, Loss

_BLOCK = re.compile(r"^(.*?(?:layers?|blocks?|resblocks|h|block)\.(\d+))(?:\.|$)")


def block_of(name: str) -> str:
    """The repeated block a tensor belongs to (`encoder.layer.3`), or its first name part."""
    match = _BLOCK.match(name)
    return match.group(1) if match else name.split(".", maxsplit=1)[0]


def sign_agreement(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Per block: of the entries where both have a sign, the share with the same one."""
    same: dict[str, int] = {}
    both: dict[str, int] = {}
    for name in left:
        if name not in right:
            continue
        a, b = left[name].sign().cpu(), right[name].sign().cpu().to(left[name].dtype)
        block = block_of(name)
        decided = (a != 0) & (b != 0)
        same[block] = same.get(block, 0) + int(((a == b) & decided).sum())
        both[block] = both.get(block, 0) + int(decided.sum())
    return {block: same[block] / both[block] for block in both if both[block]}


def kept_by_block(kept: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    total: dict[str, int] = {}
    part: dict[str, float] = {}
    for name, share in kept.items():
        block = block_of(name)
        total[block] = total.get(block, 0) + sizes[name]
        part[block] = part.get(block, 0.0) + share * sizes[name]
    return {block: part[block] / total[block] for block in total if total[block]}


def descent(
    model: nn.Module, loss: Loss, batches: Iterable[Batch], update: TaskVector, alpha: float
) -> dict[str, float]:
    """Measured on the few-shot set: `g . update` and the loss before and after; the model is restored."""
    batches = list(batches)
    gradient = collect_gradient(model, loss, batches)
    by_module = update if set(update) <= set(gradient) else update.renamed(_module_names(model))
    shared = [name for name in by_module if name in gradient]
    slope = sum(
        float((gradient[n].double() * by_module[n].double().to(gradient[n].device)).sum()) for n in shared
    )
    before = mean_loss(model, loss, batches)
    snapshot = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        apply(model, update, alpha)
        after = mean_loss(model, loss, batches)
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(snapshot[name])
    return {"slope": alpha * slope, "loss_before": before, "loss_after": after}


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    with left_as_it_was(model), torch.no_grad():
        losses = torch.cat([loss(model, batch).double().cpu() for batch in batches])
    return float(losses.mean())


def _module_names(model: nn.Module) -> dict[str, str]:
    from gradfix.checkpoints.names import disk_names

    return {disk: name for name, disk in disk_names(model).items()}


def notebook_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A small escaped HTML table for notebooks."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<p><b>{html.escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
