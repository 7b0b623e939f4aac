"""What a transport did, in numbers a person can judge: sign agreement and kept share per block."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

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


def notebook_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A small escaped HTML table for notebooks."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<p><b>{html.escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
