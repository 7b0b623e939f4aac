"""python benchmarks/lora_stream.py [--folder DIR] [--layers 22] [--json benchmarks/results/lora_stream.json]

Transport a LoRA fine-tune between two 1.1B-parameter Llama-shaped bf16 checkpoints (random weights, sharded)
with transport_checkpoint. Reports seconds and the peak memory on top of the imported library. Needs about
8 GB of disk in DIR, which is emptied afterwards."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, INNER, HEADS, KEY_VALUE, VOCABULARY, RANK = 2048, 5632, 32, 256, 32000, 16
SHARDS = 4


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    block = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path, layers: int, seed: int) -> None:
    """Random bf16 weights in shards, written in pieces."""
    import torch

    from gradfix.checkpoints.folder import write_index
    from gradfix.checkpoints.safetensors_file import TensorInfo
    from gradfix.checkpoints.safetensors_writer import SafetensorsWriter

    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    pool = (0.02 * torch.randn(1 << 22, generator=draw)).bfloat16()
    names = list(shapes(layers))
    infos = {name: TensorInfo(shape, torch.bfloat16) for name, shape in shapes(layers).items()}
    step = -(-len(names) // SHARDS)
    layout = {
        f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors": names[i * step : (i + 1) * step]
        for i in range(SHARDS)
    }
    for file, own in layout.items():
        with SafetensorsWriter(
            folder / file, {name: infos[name] for name in own}, {"format": "pt"}
        ) as writer:
            for name in own:
                left = infos[name].numel
                while left:
                    start = int(torch.randint(0, 1 << 20, (), generator=draw))
                    piece = pool[start : start + min(left, len(pool) - start)]
                    writer.write(piece)
                    left -= len(piece)
            writer.close()
    write_index(folder, layout, sum(info.nbytes for info in infos.values()))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )


def write_adapter(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in shapes(layers).items():
        if "proj" in name:
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[stem + ".lora_A.weight"] = 0.02 * torch.randn(RANK, shape[1], generator=draw)
            tensors[stem + ".lora_B.weight"] = 0.02 * torch.randn(shape[0], RANK, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_votes(path: Path, layers: int) -> None:
    import torch

    from gradfix.checkpoints.safetensors_file import TensorInfo
    from gradfix.checkpoints.safetensors_writer import SafetensorsWriter

    infos = {name: TensorInfo(shape, torch.int8) for name, shape in shapes(layers).items()}
    pool = torch.randint(-10, 11, (1 << 22,), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
    with SafetensorsWriter(
        path, infos, {"format": "gradfix.votes", "count": "10", "rule": "majority"}
    ) as writer:
        for info in infos.values():
            for first in range(0, info.numel, len(pool)):
                writer.write(pool[: info.numel - first])
        writer.close()


def memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field + ":")).split()[1]) * 1024


def measure(folder: Path) -> dict[str, Any]:
    import torch

    from gradfix.stream.checkpoint import transport_checkpoint

    torch.set_num_threads(1)
    baseline = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    start = time.perf_counter()
    report = transport_checkpoint(
        base=folder / "base", tuned=folder / "adapter", target=folder / "target",
        votes=folder / "votes.safetensors", out=folder / "out", alpha=1.0,
    )  # fmt: skip
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "baseline_mib": round(baseline / 2**20, 1),
        "peak_extra_mib": round((memory("VmHWM") - baseline) / 2**20, 1),
        "kept": round(report.kept, 4),
        "tensors": report.transported,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/lora_stream.json"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    import torch

    from gradfix import __version__

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_model(folder / "base", arguments.layers, seed=1)
        write_model(folder / "target", arguments.layers, seed=2)
        write_adapter(folder / "adapter", arguments.layers)
        write_votes(folder / "votes.safetensors", arguments.layers)
        command = [sys.executable, os.path.abspath(__file__), "--measure", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    parameters = sum(int(torch.Size(shape).numel()) for shape in shapes(arguments.layers).values())
    result |= {
        "parameters": parameters,
        "dtype": "bfloat16",
        "rank": RANK,
        "shards": SHARDS,
        "layers": arguments.layers,
        "versions": {"gradfix": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
