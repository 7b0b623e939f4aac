"""Alignment speed: `python benchmarks/align.py [--small]` writes benchmarks/results/align.json.

Aligns a checkpoint of BERT-base's shape (110M weights) to a permuted, noisy copy of itself (planted)
and to an independent draw (unrelated, the hard case for the assignment), with every aligner."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numpy
import scipy
import torch
from torch import Tensor

from gradfix.align import ALIGNERS, Alignment, align
from gradfix.align.layout import layout_of
from gradfix.checkpoints.open import open_checkpoint

RESULTS = Path(__file__).parent / "results" / "align.json"
SHAPES = {
    "bert-base": {"width": 768, "hidden": 3072, "layers": 12, "vocabulary": 30522, "heads": 12},
    "small": {"width": 64, "hidden": 256, "layers": 2, "vocabulary": 500, "heads": 4},
}


def bert_weights(shape: dict[str, int], seed: int) -> dict[str, Tensor]:
    """Random weights with the names and shapes of a BERT encoder."""
    width, hidden, vocabulary = shape["width"], shape["hidden"], shape["vocabulary"]
    tensors: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
        "pooler.dense.weight": (width, width),
        "pooler.dense.bias": (width,),
    }
    dense = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "attention.output.LayerNorm": (width,),
        "intermediate.dense": (hidden, width),
        "output.dense": (width, hidden),
        "output.LayerNorm": (width,),
    }
    for layer in range(shape["layers"]):
        for name, axes in dense.items():
            tensors[f"encoder.layer.{layer}.{name}.weight"] = axes
            tensors[f"encoder.layer.{layer}.{name}.bias"] = axes[:1]
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(axes, generator=generator) for name, axes in tensors.items()}


def planted_alignment(base: dict[str, Tensor], heads: int, keep_heads: bool) -> Alignment:
    """A random symmetry of the base, to be found again."""
    layout = layout_of(open_checkpoint(base), heads=heads)
    generator = torch.Generator().manual_seed(1)
    groups = {}
    for name, shape in layout.stacks({name: tuple(tensor.shape) for name, tensor in base.items()}).items():
        keys = torch.rand(shape, generator=generator)
        still = keep_heads and name.endswith((".heads", ".queries"))
        groups[name] = torch.arange(shape[1]).repeat(shape[0], 1) if still else keys.argsort(dim=1)
    return Alignment(layout, groups, "random")


def right_share(found: Alignment, planted: Alignment) -> float:
    same = sum(int((found.groups[name] == stack).sum()) for name, stack in planted.groups.items())
    return same / sum(stack.numel() for stack in planted.groups.values())


def measure(shape: str) -> list[dict[str, object]]:
    options = SHAPES[shape]
    base = bert_weights(options, seed=0)
    rows: list[dict[str, object]] = []
    for method in ALIGNERS:
        planted = planted_alignment(base, options["heads"], keep_heads=method == "rebasin")
        generator = torch.Generator().manual_seed(2)
        copy = planted.apply(base)
        copy = {name: t + 0.002 * torch.randn(t.shape, generator=generator) for name, t in copy.items()}
        for pair, target in (("planted", copy), ("unrelated", bert_weights(options, seed=3))):
            start, cpu = time.perf_counter(), time.process_time()
            found = align(base, target, method=method, heads=options["heads"])
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            rows.append(
                {
                    "shape": shape,
                    "weights": sum(tensor.numel() for tensor in base.values()),
                    "method": method,
                    "pair": pair,
                    "seconds": round(seconds, 2),
                    "sweeps": found.sweeps,
                    "cpu_seconds": round(cpu, 2),  # other work on the machine slows the wall clock, not this
                    "cosine_before": round(found.cosine_before, 4),
                    "cosine_after": round(found.cosine_after, 4),
                    "right_share": round(right_share(found, planted), 4) if pair == "planted" else None,
                }
            )
            print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small shape, in seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = measure("small" if options.small else "bert-base")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"scipy": scipy.__version__, "numpy": numpy.__version__}
    report = {"rows": rows, "threads": torch.get_num_threads(), "cores": os.cpu_count(), "versions": versions}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
