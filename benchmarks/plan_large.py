"""python benchmarks/plan_large.py [--json benchmarks/results/plan_large.json]

The table of docs/scale.md for models that nobody ran here: Llama shapes walked through without weights (bf16, 32
samples of 512 tokens), on named clusters at 40 % of the cards' nominal dense bf16 speed. Calculated, not measured."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]
SAMPLES, TOKENS, SHARE = 32, 512, 0.4
NOMINAL = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "24 GB card": 70e12}
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
             "num_attention_heads": 128},
}  # fmt: skip
CLUSTERS = [
    ("8B", "one A100 80 GB", "A100", 1, "one device"),
    ("8B", "one H200", "H200", 1, "one device"),
    ("8B", "one 24 GB card, disk", "24 GB card", 1, "offload"),
    ("70B", "4 x A100 80 GB, one node", "A100", 4, "sharded"),
    ("70B", "8 x H100 80 GB, one node", "H100", 8, "sharded"),
    ("405B", "16 x H200, two nodes", "H200", 16, "sharded"),
    ("405B", "32 x H100 80 GB, four nodes", "H100", 32, "sharded"),
]


@functools.cache
def walked(name: str) -> tuple[Any, Any]:
    """The shape and the passes of a model that exists only as a config."""
    import torch
    from transformers import LlamaConfig

    from gradfix.commands.plan import Rehearsal
    from gradfix.votes.needs import Shape

    sizes = SHAPES[name]
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128_256, architectures=["LlamaForCausalLM"]
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        rehearsal = Rehearsal.of_folder(Path(folder), TOKENS, torch.bfloat16, "cpu")
    count = [parameter.numel() for parameter in rehearsal.model.parameters()]
    shape = Shape(
        sum(count), max(count), 2 * sum(count), sizes["num_hidden_layers"], sizes["hidden_size"],
        sizes["intermediate_size"], 128_256, TOKENS,
    )  # fmt: skip
    return shape, functools.cache(rehearsal.walk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "plan_large.json")
    arguments = parser.parse_args()
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch

    from gradfix.votes.needs import EFFICIENCY, GIB, Pace, VoteSetup

    rows = []
    for name, cluster, card, devices, mode in CLUSTERS:
        shape, walk = walked(name)
        plan = VoteSetup(
            shape, SAMPLES, dtype=torch.bfloat16, batch=1, pace=Pace(NOMINAL[card] * SHARE / EFFICIENCY),
            engine="loop", walk=walk, devices=devices, mode=mode, recompute=mode != "one device",
        ).plan()  # fmt: skip
        rows.append({"model": name, "cluster": cluster, **plan.as_json()})
        way = f"{mode} over {devices}" if mode == "sharded" else mode
        memory, traffic = f"{plan.memory / GIB:.0f} GiB", f"{plan.traffic / GIB:.0f} GiB"
        cells = (name, cluster, way, memory, f"{plan.flops:.1e}", f"{plan.seconds:.0f} s", traffic)
        print(f"| {' | '.join(cells)} |")
    arguments.json.write_text(json.dumps({"calculated": True, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
