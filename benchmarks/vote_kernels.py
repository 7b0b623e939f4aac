"""The CUDA vote kernels alone: right against float64, and how fast for which tiles.

    PYTHONPATH=src python -m benchmarks.vote_kernels --json vote_kernels.json

Rates count the useful operations only, 2 * samples * tokens * rows * columns; padding of the tokens to whole steps
is the kernel's own loss. `library` is the ordinary weight gradient through torch, the floor."""

from __future__ import annotations

import argparse
import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SHAPES = {  # samples, tokens, rows, columns
    "vit-b fc1": (100, 197, 3072, 768),
    "vit-b proj": (100, 197, 768, 768),
    "vit-l fc1": (100, 257, 4096, 1024),
    "vit-l qkv": (100, 257, 1024, 1024),
    "llama fc": (100, 512, 5632, 2048),
}
TILES_16 = [  # rows, columns, tokens a step, warps, stages, programs a processor
    (128, 256, 32, 8, 5, 1),
    (128, 128, 32, 4, 5, 2),
    (256, 128, 32, 8, 5, 1),
    (128, 256, 32, 8, 6, 1),
    (128, 256, 16, 8, 8, 1),
    (128, 128, 32, 8, 5, 2),
    (128, 256, 64, 8, 3, 1),
]
TILES_32 = [(128, 256, 32, 8, 3, 1), (128, 256, 16, 8, 6, 1), (128, 256, 32, 8, 4, 1)]


def _case(shape: tuple[int, int, int, int], dtype: Any) -> Any:
    import torch

    samples, tokens, rows, columns = shape
    left = torch.randn(samples, tokens, rows, device="cuda", dtype=dtype)
    return left, torch.randn(samples, tokens, columns, device="cuda", dtype=dtype)


def compile_tiles(job: tuple[str, tuple[int, ...]]) -> str | None:
    """Fill the on-disk cache from a process of its own; the reason where a tile does not compile."""
    import torch

    from gradfix.votes.batched import kernels

    kind, tiles = job
    left, right = _case((4, 64, 256, 256), torch.bfloat16 if kind == "16" else torch.float32)
    votes = torch.zeros(256, 256, dtype=torch.int8, device="cuda")
    try:
        if kind == "32":
            left, right = kernels._tokens_last(left), kernels._tokens_last(right)
        kernels.fold_tiles(left, right, votes, tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def check(report: dict[str, Any]) -> None:
    """Integer inputs, so that every product is exact and every sign must agree with float64."""
    import torch

    from gradfix.votes.batched import kernels

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((7, 37, 96, 160), (130, 50, 256, 384), (5, 16, 64, 72), (9, 197, 768, 256)):
            torch.manual_seed(sum(shape))
            samples, tokens, rows, columns = shape
            left = torch.randint(-2, 3, (samples, tokens, rows), device="cuda").to(dtype)
            right = torch.randint(-2, 3, (samples, tokens, columns), device="cuda").to(dtype)
            left[1, :, 3] = 0
            expected = -torch.bmm(left.double().mT, right.double()).sign().sum(0)
            for tf32 in (False, True) if dtype == torch.float32 else (False,):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                for transposed in (False, True):
                    votes = torch.zeros(rows, columns, dtype=torch.int16, device="cuda")
                    votes = torch.zeros_like(votes.T).T if transposed else votes
                    kernels.fold_product(left, right, votes)
                    wrong = int((votes != expected).sum())
                    report["checks"].append([str(dtype), tf32, shape, transposed, wrong])
    torch.manual_seed(0)
    gradient, data = (torch.randn(6, 197, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = data.double()
    for kind, normal in (
        ("plain", wide),
        ("rms", torch.nn.functional.rms_norm(wide, (768,), None, 1e-6)),
        ("layer", torch.nn.functional.layer_norm(wide, (768,), None, None, 1e-6)),
    ):
        products, sums = kernels.token_sums(gradient, data, kind, 1e-6)
        for found, exact in ((products, (gradient.double() * normal).sum(1)), (sums, gradient.double().sum(1))):
            report["checks"].append([kind, float((found - exact).norm() / exact.norm())])
    print("checks", report["checks"], flush=True)


def sweep(report: dict[str, Any], failed: dict[Any, str]) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    for kind, dtype, table in (("16", torch.bfloat16, TILES_16), ("32", torch.float32, TILES_32)):
        usable = [tiles for tiles in table if (kind, tiles) not in failed]
        for name, shape in SHAPES.items():
            found = _rates(shape, dtype, usable)
            report["rates"][f"{name} {kind}"] = found
            print(name, kind, {key: round(value) for key, value in found.items()}, flush=True)


def _rates(shape: tuple[int, int, int, int], dtype: Any, table: list[Any]) -> dict[str, float]:
    """Useful TFLOP/s of each way to do one weight's votes."""
    import torch
    from triton.testing import do_bench

    from gradfix.votes.batched import kernels

    samples, tokens, rows, columns = shape
    left, right = _case(shape, dtype)
    flat_left, flat_right = left.flatten(0, 1), right.flatten(0, 1)
    votes = torch.zeros(rows, columns, dtype=torch.int8, device="cuda")

    def rate(run: Any, *arguments: Any) -> float:
        seconds = do_bench(lambda: run(*arguments), warmup=10, rep=40, return_mode="median") * 1e-3
        return 2e-12 * samples * tokens * rows * columns / seconds

    found = {"library": rate(torch.matmul, flat_left.T, flat_right)}
    found["chunks"] = rate(kernels.fold_chunks, left, right, votes)
    if dtype == torch.float32:
        found["transposes"] = rate(lambda: (kernels._tokens_last(left), kernels._tokens_last(right)))
        left, right = kernels._tokens_last(left), kernels._tokens_last(right)
    for tiles in table:
        found[str(tiles)] = rate(kernels.fold_tiles, left, right, votes, tiles)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    jobs = [("16", tiles) for tiles in TILES_16] + [("32", tiles) for tiles in TILES_32]
    with get_context("spawn").Pool(8) as pool:
        reasons = pool.map(compile_tiles, jobs, chunksize=1)
    failed = {job: reason for job, reason in zip(jobs, reasons) if reason}
    report: dict[str, Any] = {"checks": [], "rates": {}, "failed": [str(item) for item in failed.items()]}
    print("failed", report["failed"], flush=True)
    check(report)
    sweep(report, failed)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
