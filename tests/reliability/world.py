"""A small world for fault tests: three tiny text encoders, labelled texts, and the command line in process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_tiny, toy_texts, write_rows


@dataclass(frozen=True)
class World:
    """Folders of a base, its fine-tune, a target and the data."""

    home: Path

    def __getattr__(self, name: str) -> Path:
        return self.home / name

    def arguments(self, command: str = "transport", **changes: object) -> list[str]:
        """A command that works in this world, with some options changed; None leaves one out."""
        options: dict[str, object] = {"data": self.data, "task": "zero-shot", "shots": 2, "out": self.out}
        options |= {"target": self.target}
        if command == "transport":
            options |= {"base": self.base, "tuned": self.tuned, "alpha": 0.5, "no_check": True}
        options |= changes
        words = [command]
        for name, value in options.items():
            if value is None or value is False:
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
        return words


def make_world(home: Path) -> World:
    """Base and target are unrelated draws; the fine-tune is the base with a little noise."""
    save_tiny("bert", home / "base", seed=0)
    save_tiny("bert", home / "target", seed=1)
    shutil.copytree(home / "base", home / "tuned")
    generator = torch.Generator().manual_seed(2)
    state = load_file(home / "base" / "model.safetensors")
    moved = {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in state.items()}
    save_file(moved, home / "tuned" / "model.safetensors", {"format": "pt"})
    rows = toy_texts(24, seed=0)
    write_rows(home / "data", "train", rows[:12])
    write_rows(home / "data", "test", [{**row, "text": row["text"] + " test"} for row in rows[12:18]])
    return World(home)


def rewrite(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder."""
    state = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        state.pop(name, None)
        if value is not None:
            state[name] = value
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True)
class Said:
    """What the command line answered."""

    code: int
    out: str
    err: str


def say(arguments: Sequence[str]) -> Said:
    """Run the command line in this process and listen."""
    from gradfix.cli import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in arguments])
    return Said(code, out.getvalue(), err.getvalue())


def hashes(*homes: Path) -> dict[str, str]:
    """sha256 of every file below the folders (or of the files themselves); a link is what it points to by name."""
    paths = [p for home in homes for p in ([home] if home.is_file() else sorted(home.rglob("*"))) if p.is_file()]
    return {str(path): hashlib.sha256(_content(path)).hexdigest() for path in paths}


def _content(path: Path) -> bytes:
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


def left_behind(home: Path, before: Mapping[str, str]) -> list[str]:
    """Files that were not there before: locks, staging folders, outputs."""
    return sorted(set(hashes(home)) - set(before))


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
