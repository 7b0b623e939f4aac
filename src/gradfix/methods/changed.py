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
    """Up to twelve changed answers, the repaired and the broken ones in proportion, and how many there are.

    The classes take turns, so that no class fills the page."""
    # Open answers have no labels: there an answer is right or it is not.
    groups: dict[str, list[int]] = {"repaired": [], "broken": [], "moved": []}
    for index, (example, old, new) in enumerate(zip(examples, before, after)):
        if old != new:
            label = str(example.get("label"))
            was, now = (_named(labels, answer) == label if labels else answer >= 0 for answer in (old, new))
            groups["repaired" if now else "broken" if was else "moved"].append(index)
    shown = []
    for kind, room in _rooms({kind: len(found) for kind, found in groups.items()}).items():
        for index in _in_turns(groups[kind], [str(example.get("label")) for example in examples])[:room]:
            example = examples[index]
            answers = {"before": _named(labels, before[index]), "after": _named(labels, after[index])}
            label = str(example.get("label")) if labels else _meant(example)
            shown.append({**_shown(example), "label": label, **answers, "kind": kind})
    return {"counts": {kind: len(found) for kind, found in groups.items()}, "examples": shown}


def _in_turns(indices: Sequence[int], labels: Sequence[str]) -> list[int]:
    """One of each class, then the next of each, as they come."""
    seen: dict[str, int] = {}
    turns = []
    for index in indices:
        turns.append((seen.setdefault(labels[index], 0), index))
        seen[labels[index]] += 1
    return [index for _, index in sorted(turns)]


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


def _rooms(counts: dict[str, int]) -> dict[str, int]:
    """How many of each kind are shown: in proportion, and one at least of a kind there is."""
    total = max(sum(counts.values()), 1)
    room = {kind: min(count, max(round(LIMIT * count / total), 1)) for kind, count in counts.items()}
    while sum(room.values()) > LIMIT:
        room[max(room, key=lambda kind: room[kind])] -= 1
    return room


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
