"""What each weight does in its block, told from its name: q, k, v, o, gate, up, down, and where it stands.

Two architectures rarely share names, but nearly all share these roles. A fused weight (queries, keys and values in
one matrix) is shown as its parts. A name that says nothing has no role; the caller decides what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradfix.align.layout import heads_in_config
from gradfix.checkpoints.matched import LAYER

Shapes = Mapping[str, tuple[int, ...]]

# The first that matches the name inside its block decides; `attn` stands for any name of an attention.
_ATTENTION = r"(attn|attention|selfattention|encdecattention|self_attn|cross_attn|encoder_attn|self)"
_ROLES: tuple[tuple[str, str], ...] = (
    ("qkv", rf"{_ATTENTION}\.(.*\.)?(qkv|wqkv|c_attn|in_proj|qkv_proj)$"),
    ("mixed", rf"{_ATTENTION}\.(.*\.)?query_key_value$"),  # queries, keys and values of one head after those of another
    ("q", rf"{_ATTENTION}\.(.*\.)?(query|query_proj|q_proj|q_lin|q)$"),
    ("k", rf"{_ATTENTION}\.(.*\.)?(key|key_proj|k_proj|k_lin|k)$"),
    ("v", rf"{_ATTENTION}\.(.*\.)?(value|value_proj|v_proj|v_lin|v)$"),
    ("o", rf"{_ATTENTION}\.(.*\.)?(output\.dense|out_proj|o_proj|out_lin|wo|proj|c_proj|dense|o)$"),
    ("gate_up", r"(^|\.)(gate_up_proj|mlp\.wi)$"),
    ("gate", r"(^|\.)(gate_proj|wi_0|w1)$"),
    ("up", r"(^|\.)(intermediate\.dense|fc1|up_proj|c_fc|lin1|wi|wi_1|w3|dense_h_to_4h|ffn)$"),
    ("down", r"(^|\.)(output\.dense|fc2|down_proj|c_proj|lin2|wo|w2|dense_4h_to_h|ffn_output)$"),
)
_PATTERNS = tuple((role, re.compile(pattern)) for role, pattern in _ROLES)
_TOWERS = (
    ("vision", ("vision", "visual")),
    ("text", ("text_model", "text.")),
    ("decoder", ("decoder.",)),
    ("encoder", ("encoder.block",)),
)
_TRANSPOSED = re.compile(r"(^|\.)h\.\d+\.(attn|mlp|crossattention)\.(c_attn|q_attn|c_proj|c_fc)\.weight$")


@dataclass(frozen=True)
class Part:
    """One linear map of a block: some output rows of a weight.

    `name` is the weight's, without ".weight"; `span` are its rows (None: all of them); `outputs` and `inputs`
    are the widths of this part. A transposed weight is stored (in, out)."""

    name: str
    role: str
    tower: str
    layer: int
    outputs: int
    inputs: int
    span: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def place(self) -> tuple[str, int, str]:
        return self.tower, self.layer, self.role


@dataclass(frozen=True)
class Anatomy:
    """The linear maps of a model's blocks by tower, layer and role; and the number of layers of each tower."""

    parts: Mapping[tuple[str, int, str], Part]
    depths: Mapping[str, int]

    def roles(self, tower: str) -> set[str]:
        return {role for place, _, role in self.parts if place == tower}


def anatomy(shapes: Shapes, config: Mapping[str, Any] | None = None) -> Anatomy:
    """Read the roles of all weights; `config` is asked for key/value heads where queries, keys and values are fused."""
    parts: dict[tuple[str, int, str], Part] = {}
    depths: dict[str, int] = {}
    for name, shape in shapes.items():
        found = read(name)
        if found is None:
            continue
        tower, layer, _ = found
        depths[tower] = max(depths.get(tower, 0), layer + 1)
        if len(shape) == 2:
            for part in _parts(name, shape, config or {}):
                parts.setdefault(part.place, part)
    return Anatomy(parts, depths)


def read(name: str) -> tuple[str, int, str] | None:
    """Tower, layer number and the name inside the layer; None for tensors outside the blocks."""
    match = LAYER.match(name)
    if match is None:
        return None
    before = match["before"]
    tower = next((tower for tower, signs in _TOWERS if any(sign in before for sign in signs)), "")
    return tower, int(match["i"]), match["inside"]


def _parts(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> list[Part]:
    if not name.endswith((".weight", ".in_proj_weight")):
        return []
    tower, layer, inside = read(name) or ("", 0, "")
    stem = name.removesuffix(".weight")
    plain = inside.removesuffix(".weight").removesuffix("_weight").lower()
    role = next((role for role, pattern in _PATTERNS if pattern.search(plain)), None)
    if role is None:
        return []
    transposed = bool(_TRANSPOSED.search(name))
    outputs, inputs = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    prefix = "cross." if re.search(r"encdecattention|cross_?att|encoder_attn", plain) else ""
    spans = _spans(role, outputs, tower, config)
    return [
        Part(stem, prefix + each, tower, layer, (span[1] - span[0]) if span else outputs, inputs, span, transposed)
        for each, span in spans
    ]


def _spans(role: str, outputs: int, tower: str, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, int] | None]]:
    """The parts of a fused weight and their rows."""
    if role == "gate_up":
        half = outputs // 2
        return [("gate", (0, half)), ("up", (half, outputs))]
    if role != "qkv":
        return [(role, None)]
    heads, groups = (counts.get(tower) or counts.get("") or 0 for counts in heads_in_config(config))
    keys = outputs // 3
    if heads and groups and heads != groups:
        keys = outputs // (heads + 2 * groups) * groups
    queries = outputs - 2 * keys
    return [("q", (0, queries)), ("k", (queries, queries + keys)), ("v", (queries + keys, outputs))]
