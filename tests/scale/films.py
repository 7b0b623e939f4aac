"""A toy task with two bases, for tests of processes that share a job."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import save_tiny, toy_texts, write_rows

BASES = (("base", 1), ("target", 2))  # names and seeds


def save_films(folder: Path) -> Path:
    for split, count, seed in (("train", 24, 1), ("validation", 12, 2), ("test", 10, 3)):
        write_rows(folder / "data", split, toy_texts(count, seed))
    prompts = {"negative": "a bad poor film", "positive": "a good fine film"}
    (folder / "data" / "task.json").write_text(json.dumps({"labels": prompts}))
    for name, seed in BASES:
        save_tiny("bert", folder / name, seed)
    return folder
