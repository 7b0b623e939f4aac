"""python benchmarks/plan.py [--json benchmarks/results/plan.json]

Vote on three models (a Llama, a T5 and a ViT shape, random fp32 weights, loop engine) and hold the peak memory
and the seconds of each real run against `gradfix plan`, which sees config and headers only. Every run is a process
of its own that votes on a tiny model first: memory is what the second vote adds (mapped weights included), seconds
are from start to exit without the tiny vote."""

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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "src")]
BATCH = 2


def make(name: str, folder: Path) -> dict[str, Any]:
    """A model of a real shape but for its depth, and how many tokens the examples have."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch
    import transformers

    from tiny import IMAGE_LABELS, VOCAB, save_tiny, toy_images, toy_texts, write_rows

    torch.manual_seed(0)
    family = {"llama": "llama", "t5": "t5", "vit": "vit"}[name]
    save_tiny(family, folder / "tiny")
    save_tiny(family, folder / "target")
    config = transformers.AutoConfig.from_pretrained(folder / "target")
    if name == "llama":
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
                 "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16000}  # fmt: skip
        kind: Any = transformers.AutoModelForCausalLM
    elif name == "t5":
        sizes = {"d_model": 512, "d_ff": 1024, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8,
                 "d_kv": 64, "vocab_size": 16000}  # fmt: skip
        kind = transformers.AutoModelForSeq2SeqLM
    else:
        sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6,
                 "num_attention_heads": 12, "image_size": 112, "patch_size": 16}  # fmt: skip
        kind = transformers.AutoModelForImageClassification
    for key, value in sizes.items():
        setattr(config, key, value)
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder / "target")
    if name == "vit":
        size = {"height": 112, "width": 112}
        transformers.ViTImageProcessor(size=size).save_pretrained(folder / "target")
        write_rows(folder / "data", "train", toy_images(12))
        return {"task": "classification", "tokens": None, "classes": len(IMAGE_LABELS)}
    rows = [{**row, "text": (row["text"] + " a b c d e f g") * 3} for row in toy_texts(12)]
    write_rows(folder / "data", "train", rows)
    assert len(VOCAB) < 16000
    return {"task": {"llama": "causal", "t5": "seq2seq"}[name], "tokens": 40, "classes": 2}


def vote(folder: Path, task: str) -> None:
    """The real run, after one on a tiny model: what is imported for it does not count as the vote's memory."""
    from benchmarks.merge import Memory
    from gradfix.workflows.configs import VoteConfig
    from gradfix.workflows.voting import run_vote

    def once(target: str) -> float:
        begin = time.perf_counter()
        run_vote(
            VoteConfig(
                target=str(folder / target), data=str(folder / "data"), task=task, shots=4, batch_size=BATCH,
                engine="loop", out=str(folder / f"{target}.safetensors"), resume=False,
            )
        )  # fmt: skip
        return time.perf_counter() - begin

    extra = once("tiny")
    memory = Memory()
    memory.start()
    once("target")
    print(json.dumps({"memory_mib": memory.added()["peak_resident_mib"], "extra_seconds": extra}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "plan.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from gradfix._compat import heal_torchvision

        heal_torchvision()
        vote(Path(arguments.one[0]), arguments.one[1])
        return
    import torch

    torch.set_num_threads(1)
    from gradfix.workflows.configs import PlanConfig
    from gradfix.workflows.planning import run_plan

    rows = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("llama", "t5", "vit"):
        with tempfile.TemporaryDirectory() as work:
            about = make(name, Path(work))
            plan = run_plan(
                PlanConfig(target=str(Path(work) / "target"), shots=4, classes=about["classes"],
                           tokens=about["tokens"], batch_size=BATCH, device="cpu")
            ).plans[0]  # fmt: skip
            load, begin = os.getloadavg()[0], time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--one", work, about["task"]],
                check=True, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            seconds = time.perf_counter() - begin
        found = json.loads(done.stdout.splitlines()[-1])
        memory, seconds = found["memory_mib"], seconds - found["extra_seconds"]
        rows.append(
            {
                "model": name,
                "planned_mib": round(plan.memory / 2**20),
                "measured_mib": memory,
                "memory_ratio": round(plan.memory / 2**20 / memory, 3),
                "planned_seconds": round(plan.seconds, 1),
                "measured_seconds": round(seconds, 1),
                "time_ratio": round(plan.seconds / seconds, 2),
                "load_average_before": round(load, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    result = {"rows": rows, "versions": {"torch": torch.__version__, "python": platform.python_version()},
              "machine": {"cores": os.cpu_count(), "note": "shared machine: see the load averages"}}  # fmt: skip
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
