"""open_clip's published weights by name: `open_clip:ViT-B-16/laion2b_s34b_b88k`.

The tag is looked up in open_clip's own table and downloaded into its cache; what comes back is a weights file
that is opened like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradfix._compat import heal_torchvision
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown

PREFIX = "open_clip:"


def split_tag(text: str) -> tuple[str, str]:
    architecture, _, tag = text.removeprefix(PREFIX).partition("/")
    if not architecture or not tag:
        raise UsageError(
            f"{text!r} must read {PREFIX}ARCHITECTURE/TAG, e.g. {PREFIX}ViT-B-16/laion2b_s34b_b88k."
        )
    return architecture, tag


def tag_settings(text: str) -> dict[str, Any]:
    """What open_clip knows about a tag: where the file is, and how images were normalised."""
    library = import_open_clip()
    architecture, tag = split_tag(text)
    settings = library.get_pretrained_cfg(architecture, tag)
    if not settings:
        tags = library.list_pretrained_tags_by_model(architecture)
        kind = f"pretrained tag of {architecture}" if tags else "open_clip model"
        choices = tags or sorted({name for name, _ in library.list_pretrained()})
        raise UsageError(unknown(kind, tag if tags else architecture, choices))
    return dict(settings)


def tag_file(text: str) -> Path:
    """The local file of a tag, downloaded if need be."""
    library = import_open_clip()
    settings = tag_settings(text)
    try:
        return Path(library.download_pretrained(settings))
    except Exception as error:  # the hub client, urllib and hash checks each raise their own kind
        raise CorruptInput(
            f"{text} could not be downloaded ({type(error).__name__}). Download the file and give its path instead."
        ) from None


def import_open_clip() -> Any:
    heal_torchvision()
    try:
        import open_clip
    except ImportError:
        raise UsageError("this is an open_clip model; install gradfix[vision] to use it.") from None
    return open_clip
