"""Damage to bytes and to JSON: what disks, networks and malice do to files. All drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

HUGE = (0, 1, -1, 7, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30, 1e308, 0.5)
STRANGE: tuple[Any, ...] = (None, True, [], {}, "", "../x", "/etc/passwd", "\x00", "\ud800", "x" * 5000, [[[]]], *HUGE)


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 3, 20))):
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, draw: random.Random) -> None:
    place, size = draw.randrange(len(data)), draw.choice((1, 4, 8, 64))
    data[place : place + size] = draw.randbytes(min(size, len(data) - place))


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _extend(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.choice((1, 8, 300)))


def _cut_out(data: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(data))
    del data[place : place + draw.choice((1, 8, 100))]


def _repeat(data: bytearray, draw: random.Random) -> None:
    place, size = draw.randrange(len(data)), draw.choice((1, 8, 100))
    data[place:place] = data[place : place + size]


def _zero(data: bytearray, draw: random.Random) -> None:
    place, size = draw.randrange(len(data)), draw.choice((8, 64, 512))
    data[place : place + size] = bytes(len(data[place : place + size]))


def _digits(data: bytearray, draw: random.Random) -> None:
    """Numbers written as text: offsets, shapes, counts."""
    places = [i for i, byte in enumerate(data[:4096]) if 48 <= byte <= 57]
    if places:
        place = draw.choice(places)
        data[place : place + 1] = str(draw.choice(HUGE)).encode()


BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _flip, _overwrite, _truncate, _extend, _cut_out, _repeat, _zero, _digits, _digits,
)  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to three kinds of damage."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if out:
            draw.choice(BYTES)(out, draw)
    return bytes(out)


def mutated_json(text: str, draw: random.Random) -> bytes:
    """Half the time a damaged structure in valid JSON, half the time damaged bytes."""
    if draw.random() < 0.5:
        return mutated(text.encode(), draw)
    content = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        content = _damaged(content, draw)
    return json.dumps(content).encode("utf-8", "surrogatepass")


def _damaged(value: Any, draw: random.Random) -> Any:
    """Replace, remove, rename or nest one node somewhere below."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        how = draw.random()
        if how < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if how < 0.25:
            return {(str(draw.choice(STRANGE)) if name == key else name): inner for name, inner in value.items()}
        return {**value, key: _damaged(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], _damaged(value[place], draw), *value[place + 1 :]]
    if draw.random() < 0.1:
        for _ in range(draw.choice((3, 50, 900))):
            value = [value]
        return value
    return draw.choice(STRANGE)


def safetensors_header(data: bytes, draw: random.Random) -> bytes:
    """A valid container around a damaged header, or a header length that lies."""
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        claim = draw.choice((0, 1, length - 1, length + 1, len(data), 2**32, 2**63, 100_000_001, 2**64 - 1))
        return claim.to_bytes(8, "little") + data[8:]
    header = mutated_json(data[8 : 8 + length].decode(), draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
