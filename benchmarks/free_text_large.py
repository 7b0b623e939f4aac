"""A language model of 7B through the command line with `--train lora`: peak memory, seconds, and what the plan said.

    python -m benchmarks.free_text_large --tokenizer FOLDER [--home FOLDER] [--layers 32] [--lessons 6] [--offload 1GiB]

The weights are random: this measures memory and time, not answers. A base, a target (which shares the files of the base's layers) and a
LoRA of the base (rank 16) are made in HOME, 16 labelled prompts of 512 tokens are drawn from the tokenizer of FOLDER. With --offload
the same once more, the weights left on disk but for so much memory. Prints JSON."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
ANSWER, SHOTS = 32, 16
ENDS, INDEX = "model-ends.safetensors", "model.safetensors.index.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("large"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--lessons", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--offload", help="run again with --offload and this --max-memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "free_text_large.json")
    args = parser.parse_args()
    begin = time.time()
    shape = {**SHAPE, "num_hidden_layers": args.layers}
    if args.width != SHAPE["hidden_size"]:
        shape |= {"hidden_size": args.width, "intermediate_size": args.width * 11 // 4}

    def after(stage: str) -> float:
        print(f"{stage} after {time.time() - begin:.0f} s", flush=True)
        return time.time() - begin

    make_model(args, args.home / "base", shape)
    after("base")
    make_sibling(args, args.home / "base", args.home / "target")
    make_adapter(args.home / "lora", args.home / "base", shape)
    make_data(args, args.home / "data")
    result: dict[str, Any] = {"shape": shape, "made_seconds": after("all made")}
    with planned(args) as plan:
        result |= moved(args)
        write(args.out, result)
        after("moved")
        if args.offload:
            result["offloaded"] = moved(args, ["--offload", args.home / "disk", "--max-memory", args.offload])
            write(args.out, result)
            after("moved with --offload")
        result["plan"] = plan()
    if "peak_gib" in result:
        result["plan_over_peak"] = result["plan"]["memory_gib"] / result["peak_gib"]
    write(args.out, result)
    print(json.dumps(result), flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def make_model(args: argparse.Namespace, folder: Path, shape: dict[str, int]) -> None:
    """Random weights in shards of eight layers, drawn where it is quick."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = {name: like.shape for name, like in AutoModelForCausalLM.from_config(config).state_dict().items()}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(
            f"model-{int(name.split('.')[2]) // 8}.safetensors" if ".layers." in name else ENDS, []
        ).append(name)
    with ThreadPoolExecutor() as pool:  # writing takes longest
        list(pool.map(lambda part: draw(args, {name: names[name] for name in groups[part]}, folder / part), groups))
    size = sum(2 * shape.numel() for shape in names.values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: part for part, held in groups.items() for name in held},
    }
    (folder / INDEX).write_text(json.dumps(index))
    shutil.copy(args.tokenizer / "tokenizer.json", folder / "tokenizer.json")
    told = json.loads((args.tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "model_max_length": 2048}))


def draw(args: argparse.Namespace, shapes: dict[str, torch.Size], path: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator(args.device).manual_seed(zlib.crc32(str(path).encode()))

    def one(name: str, shape: torch.Size) -> torch.Tensor:
        tensor = torch.empty(shape, device=args.device, dtype=torch.bfloat16)
        return (tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02, generator=generator)).cpu()

    save_file({name: one(name, shape) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def make_sibling(args: argparse.Namespace, base: Path, folder: Path) -> None:
    """Embeddings of its own; the rest is the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        if file.name != ENDS:
            (folder / file.name).symlink_to(file.resolve())
    with safe_open(base / ENDS, "pt") as ends:
        shapes = {name: torch.Size(ends.get_slice(name).get_shape()) for name in ends.keys()}  # noqa: SIM118  no mapping
    draw(args, shapes, folder / ENDS)


def make_adapter(folder: Path, base: Path, shape: dict[str, int]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    wide, tensors = shape["hidden_size"], {}
    for layer, name in [(n, p) for n in range(shape["num_hidden_layers"]) for p in ("q_proj", "v_proj")]:
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(16, wide) * 0.02
        tensors[f"{path}.lora_B.weight"] = torch.randn(wide, 16) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
              "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(base)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_data(args: argparse.Namespace, folder: Path) -> None:
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, draw = AutoTokenizer.from_pretrained(args.tokenizer), random.Random(0)
    words = [
        t[1:] for t in tokenizer.get_vocab() if t.startswith("\u2581") and t[1:].isalpha() and t.isascii() is False
    ]
    words = [word for word in words if word.isascii()]

    def text(tokens: int) -> str:
        return " ".join(draw.choice(words) for _ in range(tokens - 2))

    for split, count in (("train", SHOTS), ("test", 4)):
        rows = [{"prompt": text(args.tokens), "completion": text(ANSWER)} for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def planned(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """The plan is made in a process of its own beside the run, which it does not disturb."""
    words = [
        "plan", "--target", args.home / "target", "--tokens", args.tokens, "--answer-tokens", ANSWER, "--batch-size", args.batch,
        "--train", "lora", "--dtype", "bf16", "--tflops", 1, "--quiet", "--json", args.home / "plan.json",
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "gradfix", *map(str, words)])

    def wait() -> dict[str, Any]:
        if process.wait():
            raise SystemExit("the plan failed")
        found: dict[str, Any] = json.loads((args.home / "plan.json").read_text())["lessons"]
        return found

    try:
        yield wait
    finally:
        process.kill()


def moved(args: argparse.Namespace, more: Sequence[object] = ()) -> dict[str, Any]:
    from gradfix.cli import run

    home, begin = args.home, time.time()
    (home / "moved.json").unlink(missing_ok=True)
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    words = [
        "transport", "--base", home / "base", "--tuned", home / "lora", "--target", home / "target", "--data",
        home / "data", "--task", "causal", "--shots", SHOTS, "--train", "lora", "--out-lora", 16, "--out", home / "moved",
        "--batch-size", args.batch, "--prompts", args.prompts, "--lessons", args.lessons, "--answer-tokens", ANSWER,
        "--device", args.device, "--dtype", "bf16", "--json", home / "moved.json", "--no-check", "--force", "--overwrite", *more,
    ]  # fmt: skip
    code = run([str(word) for word in words])
    found: dict[str, Any] = {"exit_code": code, "seconds": time.time() - begin, "lessons": args.lessons}
    if args.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        found["device"] = torch.cuda.get_device_name()
    if (home / "moved.json").is_file():
        told = json.loads((home / "moved.json").read_text())
        found["stages"], found["notes"] = told["seconds"], told["notes"]
        found["adapter_bytes"] = (home / "moved" / "adapter_model.safetensors").stat().st_size
    return found


if __name__ == "__main__":
    main()
