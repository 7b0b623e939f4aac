"""Examples whose answer changed, small enough to show in a report."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from gradfix.tasks.base import Example

LIMIT = 12
TEXT_LIMIT = 280
THUMBNAIL = 96


def changed_examples(
    examples: Sequence[Example], labels: Sequence[str], before: Sequence[int], after: Sequence[int]
) -> dict[str, Any]:
    """Up to twelve changed answers, the repaired and the broken ones in proportion, and how many there are."""
    # Open answers have no labels: there an answer is right or it is not.
    groups: dict[str, list[dict[str, Any]]] = {"repaired": [], "broken": [], "moved": []}
    counts = dict.fromkeys(groups, 0)
    for example, old, new in zip(examples, before, after):
        if old == new:
            continue
        label = str(example.get("label"))
        was, now = (_named(labels, answer) == label if labels else answer >= 0 for answer in (old, new))
        kind = "repaired" if now else "broken" if was else "moved"
        counts[kind] += 1
        if len(groups[kind]) < LIMIT:
            groups[kind].append(
                {
                    **_shown(example),
                    "label": label if labels else _meant(example),
                    "before": _named(labels, old),
                    "after": _named(labels, new),
                    "kind": kind,
                }
            )
    return {"counts": counts, "examples": _mixed(groups, counts)}


def _named(labels: Sequence[str], answer: int) -> str:
    """The label of an answer; without a label set 0 stands for the right answer and -1 for any other."""
    if not labels and answer >= 0:
        return "(right)"
    return labels[answer] if 0 <= answer < len(labels) else "(other)"


def _meant(example: Example) -> str:
    """The answer an open question wants: the completion, or the last turn of a chat."""
    turns = example.get("messages")
    text = str(turns[-1]["content"] if turns else example.get("completion") or "")
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def _mixed(groups: dict[str, list[dict[str, Any]]], counts: dict[str, int]) -> list[dict[str, Any]]:
    total = sum(counts.values())
    if not total:
        return []
    room = {kind: min(len(groups[kind]), max(round(LIMIT * counts[kind] / total), 1)) for kind in groups}
    while sum(room.values()) > LIMIT:
        room[max(room, key=lambda kind: room[kind])] -= 1
    return [entry for kind, entries in groups.items() for entry in entries[: room[kind]]]


def _shown(example: Example) -> dict[str, str]:
    """A picture as a small PNG, anything else as text."""
    if example.get("image") is not None:
        return {"image": thumbnail(example["image"])}
    text = example.get("text") or example.get("prompt") or example.get("messages") or ""
    if example.get("text_pair"):
        text = f"{text} / {example['text_pair']}"
    text = str(text)
    return {"text": text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."}


def thumbnail(picture: Any) -> str:
    """PNG in base64, at most 96 pixels wide; tiny pictures are enlarged without smoothing."""
    from PIL import Image

    from gradfix.data.rows import decode_image

    image = decode_image(picture, "image")
    if max(image.size) < THUMBNAIL:
        factor = THUMBNAIL // max(image.size)
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
