"""Linear maps of float32 on a CPU by oneDNN instead of MKL: seconds of a training step, of scoring and of a vote.

    python -m benchmarks.products [--threads 1 2] [--repeats 7]

An encoder of the shape of MiniLM (6 layers of 384 units, 64 texts of 48 tokens) is trained and scored as `gradfix finetune`
and `gradfix evaluate` do it, and a vote is taken on 16 of its texts by the public call; both ways take turns. Beside
the vote stands an ordinary backward of the same texts, as torch takes it. Writes benchmarks/results/products.json. On a
processor that MKL uses well both ways are the same."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.folder import versions
from gradfix.system import processor
from gradfix.system.modules import at_work
from gradfix.votes.collect import collect_votes

RESULTS = Path(__file__).parent / "results" / "products.json"
WAYS = {"MKL": lambda: False, "oneDNN": processor.onednn_is_faster}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    heal_torchvision()
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        jobs = work()
        found = {job: {way: [] for way in WAYS} for job in jobs}
        for turn in range(args.repeats + 1):
            for job, run in jobs.items():
                for way, faster in WAYS.items():
                    with patch.object(processor, "onednn_is_faster", faster):
                        seconds = timed(run)
                    if turn:
                        found[job][way].append(seconds)
        medians = {job: {way: statistics.median(some) for way, some in ways.items()} for job, ways in found.items()}
        ratios = {job: round(ways["oneDNN"] / ways["MKL"], 3) for job, ways in medians.items()}
        votes = {way: round(medians["vote"][way] / medians["ordinary backward"]["MKL"], 3) for way in WAYS}
        rows.append({"threads": threads, "seconds": medians, "ratios": ratios, "vote_over_ordinary_backward": votes})
        print(json.dumps(rows[-1], indent=1), flush=True)
    told = {"command": "python -m benchmarks.products", "gains_here": processor.onednn_is_faster(), **versions()}
    args.out.write_text(json.dumps({**told, "repeats": args.repeats, "rows": rows}, indent=1) + "\n")


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def work() -> dict[str, Callable[[], Any]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(**shape, vocab_size=8000, max_position_embeddings=128)).eval()
    head = torch.randn(2, 384)
    batch = {"ids": torch.randint(0, 8000, (64, 48)), "labels": torch.randint(0, 2, (64,))}
    few = {name: tensor[:16] for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        states = model(input_ids=batch["ids"]).last_hidden_state
        return functional.cross_entropy(states.mean(1) @ head.T, batch["labels"], reduction="none")

    def step() -> None:
        with at_work(model), torch.enable_grad():
            loss(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def score() -> None:
        with at_work(model), torch.no_grad():
            loss(model, batch)

    def ordinary() -> None:
        loss(model, few).sum().backward()
        model.zero_grad(set_to_none=True)

    return {
        "training step": step,
        "scoring": score,
        "vote": lambda: collect_votes(model, loss, [few], engine="batched"),
        "ordinary backward": ordinary,
    }


if __name__ == "__main__":
    main()
