"""More faults of the catalogue: commands that are well formed and make no sense, and files that are not what they seem.

Importing `FAULTS` from here gives those of `faults.py` as well."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.reliability.faults import FAULTS, fault, merge
from tests.reliability.world import World, rewrite, write_json

__all__ = ["FAULTS"]


def vote(world: World, **changes: object) -> list[str]:
    return world.arguments("vote", **{"out": world.home / "votes.safetensors", **changes})


def finetune(world: World, **changes: object) -> list[str]:
    return world.arguments("finetune", **{"target": None, "shots": None, "model": world.base, "steps": 1, **changes})


def compare(world: World, **changes: object) -> list[str]:
    options = {"out": None, "base": world.base, "tuned": world.tuned, "methods": "naive"}
    return world.arguments("compare", **{**options, "json": world.home / "results.json", **changes})


def data_file(world: World, name: str, content: str | bytes) -> list[str]:
    path = world.home / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return world.arguments("select", data=path, shots=1, target=None, out=world.home / "ids.json")


# Values -------------------------------------------------------------------------------------------------------


@fault("no examples per class", 2, r"0 examples per class is no few-shot set; give 1 or more")
def _(world: World) -> list[str]:
    return vote(world, shots=0)


@fault("batch size 0", 2, r"--batch-size must be at least 1, got 0")
def _(world: World) -> list[str]:
    return vote(world, batch_size=0)


@fault("no processes", 2, r"--processes must be at least 1, got 0")
def _(world: World) -> list[str]:
    return vote(world, processes=0)


@fault("negative length", 2, r"--max-length must be at least 1, got -1")
def _(world: World) -> list[str]:
    return vote(world, max_length=-1)


@fault("seed that no generator takes", 2, r"--seed must be at most 18446744073709551615, got 10{20}")
def _(world: World) -> list[str]:
    return finetune(world, seed=10**20)


@fault("learning rate that is no number", 2, r"--lr must be a finite number, got nan")
def _(world: World) -> list[str]:
    return finetune(world, lr="nan")


@fault("alpha that is no number", 2, r"--alpha must be a finite number or 'auto', got 'nan'")
def _(world: World) -> list[str]:
    return world.arguments(alpha="nan")


@fault("empty name", 2, r"--out is empty or holds a zero byte; give a value, or leave the option out")
def _(world: World) -> list[str]:
    return [*vote(world, out=None), "--out", ""]


@fault("device without numbers", 2, r"device 'meta' is not available on this machine")
def _(world: World) -> list[str]:
    return vote(world, device="meta")


@fault("memory that is no size", 2, r"--max-memory must be a size such as 20GiB or 500MB, got 'lots'")
def _(world: World) -> list[str]:
    return vote(world, offload=world.home / "offload", max_memory="lots")


@fault("alpha that breaks the model", 6, r"at alpha 1e\+30 the few-shot loss is nan.*smaller --alpha, or --force")
def _(world: World) -> list[str]:
    return world.arguments(alpha="1e30")


@fault("update lost in rounding", 6, r"rounding .* absorbs the whole update; use --out-dtype fp32")
def _(world: World) -> list[str]:
    """A target of numbers so large that the fine-tune's changes are below their last digit."""
    state = load_file(world.target / "model.safetensors")
    rewrite(world.target, {name: torch.full_like(tensor, 1e7) for name, tensor in state.items()})
    return merge(world)


# Files --------------------------------------------------------------------------------------------------------


@fault("config file that is a folder", 3, r"config.yaml cannot be read as text \(IsADirectoryError\); give a YAML")
def _(world: World) -> list[str]:
    (world.home / "config.yaml").mkdir()
    return vote(world, config=world.home / "config.yaml")


@fault("YAML with aliases", 2, r"config.yaml is not valid YAML: line 2: aliases \(\*name\) are not allowed")
def _(world: World) -> list[str]:
    (world.home / "config.yaml").write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    return vote(world, config=world.home / "config.yaml")


@fault("tokenizer damaged", 3, r"target has no usable tokenizer \(JSONDecodeError.*own tokenizer files")
def _(world: World) -> list[str]:
    (world.target / "tokenizer.json").write_text("{")
    return vote(world)


@fault("tokenizer missing", 3, r"target has no usable tokenizer \(.*no vocabulary; are its files missing")
def _(world: World) -> list[str]:
    for path in world.target.glob("tokenizer*"):
        path.unlink()
    return vote(world)


@fault("tokenizer of another model", 3, r"knows token \d+, but the model has \d+ rows.*own tokenizer files there")
def _(world: World) -> list[str]:
    path = world.target / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {word: index + 5000 * (index > 20) for word, index in words.items()}
    write_json(path, content)
    return vote(world)


@fault("weights behind a loop of links", 3, r"model.safetensors is no regular file; weights are read from files")
def _(world: World) -> list[str]:
    path = world.target / "model.safetensors"
    path.unlink()
    path.symlink_to(path)
    return vote(world)


@fault("model that is a data file", 2, r"train.jsonl is a single file. Give the model's folder")
def _(world: World) -> list[str]:
    return vote(world, target=world.data / "train.jsonl")


# Data ---------------------------------------------------------------------------------------------------------


@fault("data file that is a folder", 5, r"train.jsonl is a folder or a link that leads nowhere; a data file")
def _(world: World) -> list[str]:
    (world.data / "train.jsonl").unlink()
    (world.data / "train.jsonl").mkdir()
    return vote(world)


@fault("data file that cannot be read", 5, r"train.jsonl cannot be read \(Input/output error\)")
def _(world: World) -> list[str]:
    """What a broken disk answers; unlike a file without permissions it also stops root."""
    (world.data / "train.jsonl").unlink()
    (world.data / "train.jsonl").symlink_to("/proc/self/mem")
    return vote(world)


@fault("only a test split", 5, r"data has only a test split; examples are drawn from train. Add a train file")
def _(world: World) -> list[str]:
    (world.data / "train.jsonl").unlink()
    return vote(world)


@fault("CSV in UTF-16", 5, r"t.csv:1: not UTF-8. Save the file as UTF-8")
def _(world: World) -> list[str]:
    return data_file(world, "t.csv", "text,label\na,x\nb,y\n".encode("utf-16"))


@fault("JSON line with a column twice", 5, r"t.jsonl:1: the column 'text' appears twice. Keep one")
def _(world: World) -> list[str]:
    return data_file(world, "t.jsonl", '{"text": "a", "text": "b", "label": "x"}\n{"text": "c", "label": "y"}\n')


@fault("JSON line without an end", 5, r"t.jsonl:1: this line is not JSON \(Unterminated string.*One object per line")
def _(world: World) -> list[str]:
    return data_file(world, "t.jsonl", b'{"text": "' + b"a" * (8 << 20))


@fault("nested columns", 5, r"t.parquet:row 0: column 'text' holds dict, not text")
def _(world: World) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [{"a": {"b": 1}}, {"a": {"b": 2}}], "label": ["x", "y"]})
    parquet.write_table(table, world.home / "t.parquet")
    return world.arguments("select", data=world.home / "t.parquet", target=None, out=world.home / "ids.json")


# Outputs ------------------------------------------------------------------------------------------------------


@fault("votes over a folder", 8, r"kept is a folder; give the name of a file")
def _(world: World) -> list[str]:
    (world.home / "kept").mkdir()
    (world.target / "config.json").write_text("{")  # known before the model is opened
    return vote(world, out=world.home / "kept")


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@fault("JSON over a pipe", 8, r"pipe is no regular file, and gradfix replaces files whole; give another name")
def _(world: World) -> list[str]:
    """/dev/null is of this kind: a rename over it would take it away from the whole machine."""
    return vote(world, json=_pipe(world.home / "pipe"))


@fault("folder for weights that is a file", 8, r"train.jsonl is a file; give a folder for the weights .*--offload")
def _(world: World) -> list[str]:
    return vote(world, offload=world.data / "train.jsonl")


@fault("output beside a file", 8, r"cannot create .*train.jsonl: file exists. Choose another place")
def _(world: World) -> list[str]:
    return vote(world, out=world.data / "train.jsonl" / "votes.safetensors")


@fault("name too long", 8, r"the name of output .* is longer than 200 bytes. Choose a shorter one")
def _(world: World) -> list[str]:
    return world.arguments(out=world.home / ("x" * 240))


@fault("work folder that is a file", 8, r"work is a file; give a folder for the finished units as --work")
def _(world: World) -> list[str]:
    (world.home / "work").write_text("mine")
    return compare(world, work=world.home / "work")


@fault("work folder inside an input", 8, r"is or overlaps the input .*target; inputs are never modified")
def _(world: World) -> list[str]:
    return compare(world, work=world.target / "work")
