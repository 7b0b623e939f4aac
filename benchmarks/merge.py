"""python benchmarks/merge.py [--layers 26] [--python PYTHON_WITH_MERGEKIT] [--json benchmarks/results/merge.json]

Merge four fine-tunes of one base (random bf16 weights in Llama's shape, 1 GB each at 26 layers) by the same mergekit
files with gradfix and, where an interpreter with mergekit is given, with mergekit, method by method in turns.
Every run is a process of its own in the same interpreter; seconds are those of the merge without imports.
Peak memory is what the process adds to its imports: resident, and the part of it that is not mapped files.
Needs about 7 GB of disk in --folder, which is emptied afterwards."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("linear", "slerp", "task_arithmetic", "ties", "dare_ties", "model_stock", "passthrough")
COUNT, DENSITY, WIDTH, HIDDEN, VOCABULARY = 4, 0.2, 1024, 4096, 32000


def make_files(folder: Path, layers: int) -> None:
    """A base and its fine-tunes: about 40% of the fine-tunes' entries differ from the base after rounding."""
    import torch
    from safetensors.torch import save_file

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    from transformers import LlamaConfig

    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        home = f"model.layers.{layer}."
        shapes |= {f"{home}self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{home}mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes |= {f"{home}mlp.down_proj.weight": (WIDTH, HIDDEN)}
        shapes |= {f"{home}{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
    shapes["model.norm.weight"] = (WIDTH,)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=VOCABULARY, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    base = {n: (0.02 * torch.randn(s, generator=generator)).to(torch.bfloat16) for n, s in shapes.items()}
    for number in range(COUNT + 1):
        home = folder / ("base" if number == 0 else f"tuned{number}")
        config.save_pretrained(home)
        moved = base
        if number:
            moved = {
                n: (t.float() + 1e-4 * torch.randn(t.shape, generator=generator)).to(torch.bfloat16)
                for n, t in base.items()
            }
        save_file(moved, home / "model.safetensors", {"format": "pt"})


def file_for(folder: Path, method: str, layers: int) -> Path:
    """The mergekit file that both tools are given."""
    base, tuned = str(folder / "base"), [str(folder / f"tuned{n + 1}") for n in range(COUNT)]
    own: dict[str, Any] = {"weight": 1.0} if method in ("linear", "task_arithmetic", "ties", "dare_ties") else {}
    if method in ("ties", "dare_ties"):
        own["density"] = DENSITY
    content: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16"}
    if method == "passthrough":
        halves = ([0, layers * 2 // 3], [layers // 3, layers])
        sources = [{"sources": [{"model": model, "layer_range": half}]} for model, half in zip(tuned, halves)]
        content["slices"] = sources
    elif method == "slerp":
        models = [{"model": base}, {"model": tuned[0]}]
        content |= {"base_model": base, "parameters": {"t": 0.4}, "models": models}
    else:
        content["models"] = [{"model": model, "parameters": own} for model in tuned]
        if method != "linear":
            content["base_model"] = base
    path = folder / f"{method}.yml"
    path.write_text(json.dumps(content))
    return path


def merge_with_gradfix(file: Path, out: Path) -> Any:
    sys.path.insert(0, str(ROOT / "src"))
    from gradfix.merging.foreign import Job, mergekit_documents, run_document

    return lambda: run_document(Job(*mergekit_documents(file)), out)


def merge_with_mergekit(file: Path, out: Path) -> Any:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, random_seed=0)
    return lambda: run_merge(MergeConfiguration.model_validate(json.loads(file.read_text())), str(out), options)


TOOLS = {"gradfix": merge_with_gradfix, "mergekit": merge_with_mergekit}


class Clock:
    """Seconds and processor seconds of this process since its start, and what all others took meanwhile."""

    def __init__(self) -> None:
        self.start = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time(), busy

    def spent(self) -> dict[str, float]:
        seconds, own, busy = (after - before for before, after in zip(self.start, self.read(), strict=True))
        others = max(busy - own, 0.0)
        return {
            "seconds": round(seconds, 2),
            "processor_seconds": round(own, 2),
            "processor_seconds_of_others": round(others, 2),
        }


class Memory(threading.Thread):
    """Samples this process every 20 ms: resident memory, and the part of it that no file backs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_values = self.read()
        self.peak = list(self.start_values)
        self.going = True

    @staticmethod
    def read() -> tuple[float, float]:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return tuple(int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon"))  # type: ignore[return-value]

    def run(self) -> None:
        while self.going:
            self.peak = [max(pair) for pair in zip(self.peak, self.read(), strict=True)]
            time.sleep(0.02)

    def added(self) -> dict[str, int]:
        self.going = False
        rss, anonymous = (round(a - b) for a, b in zip(self.peak, self.start_values, strict=True))
        return {"peak_resident_mib": rss, "peak_anonymous_mib": anonymous}


def run_one(tool: str, folder: Path, method: str) -> dict[str, Any]:
    out = folder / f"out-{tool}-{method}"
    return measured(TOOLS[tool](folder / f"{method}.yml", out), out)


def measured(work: Callable[[], Any], out: Path) -> dict[str, Any]:
    """Time and memory of one run; what it wrote is removed afterwards."""
    memory = Memory()
    memory.start()
    clock = Clock()
    work()
    spent = clock.spent()
    used = memory.added()
    shutil.rmtree(out)
    return {**spent, **used}


def versions(python: str) -> dict[str, str]:
    code = (
        "import json,importlib.metadata as m\nfound={}\n"
        "for n in ('torch','safetensors','transformers','mergekit'):\n"
        "    try: found[n]=m.version(n)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--python", default=os.environ.get("GRADFIX_MERGEKIT_PYTHON"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "merge.json")
    parser.add_argument("--one", nargs=3, metavar=("TOOL", "FOLDER", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        tool, folder, method = arguments.one
        print(json.dumps(run_one(tool, Path(folder), method)))
        return
    python = arguments.python or sys.executable
    found = versions(python)
    tools = [tool for tool in TOOLS if tool == "gradfix" or "mergekit" in found]
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        make_files(Path(work), arguments.layers)
        size = (Path(work) / "base" / "model.safetensors").stat().st_size
        for method in arguments.methods:
            file_for(Path(work), method, arguments.layers)
            for tool in tools:
                load = os.getloadavg()[0]
                command = [python, __file__, "--one", tool, work, method]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                row = {"method": method, "tool": tool, **json.loads(done.stdout.splitlines()[-1])}
                rows.append({**row, "load_average_before": round(load, 2)})
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "what": f"{COUNT} fine-tunes and their base, {size / 1e9:.2f} GB bf16 each, merged by the same files",
        "rows": rows,
        "arguments": {"layers": arguments.layers, "density": DENSITY},
        "versions": {"python": platform.python_version(), **found},
        "machine": {"arch": platform.machine(), "cores": os.cpu_count(), "threads": "each tool's own default"},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
