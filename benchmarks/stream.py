"""python benchmarks/stream.py [--gib 4] [--python PYTHON_WITH_MERGEKIT] [--folder DIR]

Transport between checkpoints of --gib GiB each (random bf16 weights in Llama's shape, int8 votes) with
transport_checkpoint; beside it, on the same files and in turns, plain copies (read every input, write and
flush one of them), the same copies written past the page cache as gradfix writes large files (where Linux can), and
mergekit's task_arithmetic (base + (target - base) + alpha (tuned - base), which is the same update without a mask).
Every run is a process of its own; seconds exclude imports; peak memory is what the process adds to its imports (no
file-backed pages). Needs about five times --gib of disk, emptied afterwards."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.merge import measured, versions  # noqa: E402

WIDTH, HIDDEN, VOCABULARY, ALPHA, BLOCK = 2048, 5632, 32000, 0.7, 1 << 20
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH


def make_files(folder: Path, gib: float) -> None:
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import LlamaConfig

    from gradfix.checkpoints.safetensors_file import TensorInfo
    from gradfix.checkpoints.safetensors_writer import SafetensorsWriter

    layers = max(1, round((gib * 2**29 - 2 * VOCABULARY * WIDTH) / LAYER))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        home = f"model.layers.{layer}."
        shapes |= {f"{home}self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{home}mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes |= {f"{home}mlp.down_proj.weight": (WIDTH, HIDDEN)}
        shapes |= {f"{home}{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=VOCABULARY, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    size = 1 << 22
    base = 0.02 * torch.randn(size, generator=draw)
    pools = {
        "base": base.bfloat16(),
        "tuned": (base + 1e-3 * torch.randn(size, generator=draw)).bfloat16(),
        "target": (0.02 * torch.randn(size, generator=draw)).bfloat16(),
        "votes": torch.randint(-5, 6, (size,), generator=draw).to(torch.int8),
    }
    for role, pool in pools.items():
        home = folder / role
        config.save_pretrained(home)
        infos = {name: TensorInfo(shape, pool.dtype) for name, shape in shapes.items()}
        about = {"format": "gradfix.votes", "count": "5"} if role == "votes" else {"format": "pt"}
        with SafetensorsWriter(home / "model.safetensors", infos, about) as writer:
            for info in infos.values():
                for first in range(0, info.numel, size):
                    writer.write(pool[: min(size, info.numel - first)])
            writer.close()


def copies(folder: Path, out: Path, flags: int = 0) -> Any:
    def work() -> None:
        block = bytearray(BLOCK)
        for role in ("base", "tuned", "votes"):
            with open(folder / role / "model.safetensors", "rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        out.mkdir()
        source = folder / "target" / "model.safetensors"
        with open(source, "rb", buffering=0) as file, open(out / "copy", "wb", buffering=0) as copy:
            done = 0
            while count := file.readinto(block):
                done += os.pwritev(copy.fileno(), [memoryview(block)[:count]], done, flags)
            os.fsync(copy.fileno())

    return work


def uncached_copies(folder: Path, out: Path) -> Any:
    from gradfix.checkpoints.safetensors_writer import DONT_CACHE

    return copies(folder, out, DONT_CACHE)


def gradfix_stream(folder: Path, out: Path) -> Any:
    from gradfix.stream.checkpoint import transport_checkpoint

    roles = {role: folder / role for role in ("base", "tuned", "target")}
    return lambda: transport_checkpoint(
        **roles, votes=folder / "votes" / "model.safetensors", out=out, alpha=ALPHA
    )


def mergekit(folder: Path, out: Path) -> Any:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    content = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [
            {"model": str(folder / "tuned"), "parameters": {"weight": ALPHA}},
            {"model": str(folder / "target"), "parameters": {"weight": 1.0}},
        ],
        "parameters": {"normalize": False},
        "dtype": "bfloat16",
    }
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    return lambda: run_merge(MergeConfiguration.model_validate(content), str(out), options)


TOOLS = {
    "copies": copies,
    "uncached_copies": uncached_copies,
    "gradfix": gradfix_stream,
    "mergekit": mergekit,
}


def run_one(tool: str, folder: Path) -> dict[str, Any]:
    out = folder / f"out-{tool}"
    return measured(TOOLS[tool](folder, out), out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=os.environ.get("GRADFIX_MERGEKIT_PYTHON"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "stream.json")
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(arguments.one[0], Path(arguments.one[1]))))
        return
    interpreters = dict.fromkeys(("copies", "uncached_copies", "gradfix"), sys.executable)
    if arguments.python:
        interpreters["mergekit"] = arguments.python
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        make_files(Path(work), arguments.gib)
        size = (Path(work) / "target" / "model.safetensors").stat().st_size
        for number in range(arguments.rounds):
            for tool, python in interpreters.items():
                load = os.getloadavg()[0]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                command = [python, __file__, "--one", tool, work]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                row = {"tool": tool, "round": number, **json.loads(done.stdout.splitlines()[-1])}
                rows.append({**row, "load_average_before": round(load, 2)})
                print(json.dumps(rows[-1]), flush=True)
    best = {tool: min(row["seconds"] for row in rows if row["tool"] == tool) for tool in interpreters}
    result = {
        "what": f"three bf16 checkpoints of {size / 2**30:.2f} GiB and their int8 votes",
        "rows": rows,
        "best_seconds": best,
        "times_plain_copies": {tool: round(value / best["copies"], 2) for tool, value in best.items()},
        "arguments": {"gib": arguments.gib, "rounds": arguments.rounds},
        "versions": {tool: versions(python) for tool, python in interpreters.items() if "copies" not in tool},
        "machine": {"cores": os.cpu_count(), "note": "shared machine: see the load averages"},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
