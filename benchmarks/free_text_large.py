"""A language model of 7B through the command line with `--train lora`: peak memory, seconds, and what the plan said.

    python -m benchmarks.free_text_large --tokenizer FOLDER [--home FOLDER] [--layers 32] [--lessons 10]

The weights are random: this measures memory and time, not answers. A base, a target and a LoRA of the base (rank 16) are made in
HOME, 16 labelled prompts of 512 tokens are drawn from the tokenizer of FOLDER. Prints JSON."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
TOKENS, ANSWER, SHOTS = 512, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("large"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--lessons", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "free_text_large.json")
    args = parser.parse_args()
    begin = time.time()
    shape = {**SHAPE, "num_hidden_layers": args.layers}
    if args.width != SHAPE["hidden_size"]:
        shape |= {"hidden_size": args.width, "intermediate_size": args.width * 11 // 4}
    for seed, name in enumerate(("base", "target")):
        make_model(args, args.home / name, shape, seed)
    make_adapter(args.home / "lora", args.home / "base", shape)
    make_data(args, args.home / "data")
    result: dict[str, Any] = {"shape": shape, "made_seconds": time.time() - begin}
    print(f"made after {result['made_seconds']:.0f} s", flush=True)
    result |= moved(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "result"}), flush=True)


def make_model(args: argparse.Namespace, folder: Path, shape: dict[str, int], seed: int) -> None:
    """Random weights in shards, drawn where it is quick."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(seed)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, like in names.items():
        drawn = torch.randn(like.shape, device=args.device, dtype=torch.bfloat16) * 0.02
        part = f"model-{int(name.split('.')[2]) // 8 if '.layers.' in name else 9}.safetensors"
        groups.setdefault(part, {})[name] = (torch.ones_like(drawn) if "norm" in name else drawn).cpu()
    for part, tensors in groups.items():
        save_file(tensors, folder / part, metadata={"format": "pt"})
    weights = {name: part for part, tensors in groups.items() for name in tensors}
    size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(args.tokenizer / "tokenizer.json", folder / "tokenizer.json")
    told = json.loads((args.tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "model_max_length": 2048}))


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
        rows = [{"prompt": text(TOKENS), "completion": text(ANSWER)} for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def moved(args: argparse.Namespace) -> dict[str, Any]:
    from gradfix.cli import run

    home, begin = args.home, time.time()
    words = [
        "transport", "--base", home / "base", "--tuned", home / "lora", "--target", home / "target", "--data",
        home / "data", "--task", "causal", "--shots", SHOTS, "--train", "lora", "--out-lora", 16, "--out", home / "moved",
        "--batch-size", args.batch, "--prompts", args.prompts, "--lessons", args.lessons, "--answer-tokens", ANSWER,
        "--device", args.device, "--json", home / "moved.json", "--no-check", "--force", "--overwrite",
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
