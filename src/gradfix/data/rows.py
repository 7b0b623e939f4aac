"""One example: its columns, where it came from and a hash of what it shows.

A row reads like a mapping with "text", "image", "messages" or "prompt" and, where there is one, "label" as
a string. Images are decoded when asked for, never before, and never beyond `MAX_PIXELS`."""

from __future__ import annotations

import hashlib
import io
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfix.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 8192 * 8192
# Only these are decoded, whatever the file's name says: PostScript, for one, would start a program of its own.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
INPUTS = ("text", "text_pair", "image", "messages", "prompt")
ANSWERS = ("completion", "label")
PAIRED = ("negatives", "grade")  # what only pairs have


class Row(Mapping[str, Any]):
    """The columns of one example; `where` names its file and line for error messages."""

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        self._columns = dict(columns)
        self.where = where

    def __getitem__(self, name: str) -> Any:
        value = self._columns[name]
        return self.image if name == "image" and value is not None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def image(self) -> Image:
        """The decoded picture in RGB; decoded anew each time, so a large set never sits in memory."""
        return decode_image(self._columns["image"], self.where)

    @cached_property
    def content(self) -> str:
        """sha256 of what the model is shown, not of the label."""
        return content_hash(self)

    def __repr__(self) -> str:
        return f"Row({self.where}: {', '.join(self._columns)})"


def decode_image(value: Any, where: str) -> Image:
    """A picture from a path, bytes, a hub-style {"bytes", "path"} struct or an open PIL image."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with _opened(value) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{where}: the image claims {width} x {height} pixels, more than the limit of "
                    f"{MAX_PIXELS:,}. Scale it down first."
                )
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Image.DecompressionBombError:
        raise DataError(f"{where}: the image is far too large to decode safely. Scale it down first.") from None
    except UnidentifiedImageError:
        raise DataError(f"{where}: this is not an image any more (unknown or damaged format).") from None
    except DataError:
        raise
    except Exception as error:  # a damaged file makes the decoders raise almost anything
        raise DataError(f"{where}: the image cannot be decoded ({error}). Is the file truncated?") from None


def _opened(value: Any) -> Image:
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.copy()
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return Image.open(io.BytesIO(value), formats=FORMATS)
    if isinstance(value, (str, Path)):
        return Image.open(value, formats=FORMATS)
    raise TypeError(f"expected a path, bytes or a PIL image, got {type(value).__name__}")


def where(example: Mapping[str, Any], index: int) -> str:
    return getattr(example, "where", None) or f"example {index}"


def content_hash(example: Mapping[str, Any]) -> str:
    """sha256 over the normalised input: letter case, spacing and image container do not hide a duplicate."""
    digest = hashlib.sha256()
    for name in INPUTS:
        value = example.get(name)
        if value is None:
            continue
        digest.update(name.encode() + b"\0")
        digest.update(_image_bytes(value) if name == "image" else _text_bytes(value))
    return digest.hexdigest()


def content_of(example: Mapping[str, Any]) -> str:
    """The `content_hash`, which a row keeps."""
    return example.content if isinstance(example, Row) else content_hash(example)


def exact_hash(example: Mapping[str, Any]) -> str:
    """sha256 over all of an example that a task may use, letter for letter and with its answer.

    Equal hashes mean equal examples; `content_hash` is the one that sees through disguises."""
    words = {name: example.get(name) for name in (*INPUTS, *ANSWERS) if name != "image"}
    words |= {name: example[name] for name in PAIRED if example.get("text_pair") and name in example}
    return hashlib.sha256(f"{content_of(example)}\n{json.dumps(words, default=repr)}".encode()).hexdigest()


def question(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation without its last answer."""
    rest = list(messages)
    if rest and rest[-1].get("role") == "assistant":
        rest.pop()
    return rest


def _text_bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        turns = question(value)
        value = json.dumps([[turn.get("role"), turn.get("content")] for turn in turns], ensure_ascii=False)
    return " ".join(unicodedata.normalize("NFKC", value).casefold().split()).encode("utf-8", "surrogatepass") + b"\0"


def _image_bytes(value: Any) -> bytes:
    if hasattr(value, "__array__"):  # pixels that are numbers already
        import torch

        from gradfix.checkpoints.open import raw_bytes

        pixels = torch.as_tensor(value)
        return f"{tuple(pixels.shape)}{pixels.dtype}".encode() + raw_bytes(pixels)
    picture = decode_image(value, "image")
    return f"{picture.size}".encode() + picture.tobytes()
