"""What a majority vote costs: seconds and peak memory of every way to get it, against one ordinary backward.

    PYTHONPATH=src python -m benchmarks.votes --suite --json benchmarks/results/votes_h200.json
    PYTHONPATH=src python -m benchmarks.votes --models vit-s vit-s-short --samples 16 --threads 2 --json votes_cpu.json

An ordinary backward is one forward and backward of the same batch with all parameter gradients, no optimizer.
Models have the named shape and random weights. Schemes: `batched` (one pass), `loop` (one sample at a time),
`vmap` (torch.func per-sample gradients, in chunks that fit), `retain_graph` (one backward per sample through the
graph of the whole batch, which is how the paper's released code is described), `opacus` where it is installed."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfix.votes.batched import batched
from gradfix.votes.loop import batch_size, loop, take
from gradfix.votes.tally import Tally

Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], dict[str, Tensor]]


def vit(width: int, depth: int, heads: int, patch: int, size: int, samples: int) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    config = ViTConfig(
        **shape, intermediate_size=4 * width, patch_size=patch, image_size=size, num_labels=100
    )
    batch = {"x": torch.randn(samples, 3, size, size), "y": torch.randint(0, 100, (samples,))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch["x"]).logits.float(), batch["y"], reduction="none")

    return ViTForImageClassification(config), loss, batch


def llama(
    width: int, depth: int, hidden: int, heads: int, tokens: int, samples: int, shared_heads: int = 8
) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=depth, intermediate_size=hidden, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // shared_heads), vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    batch = {"ids": torch.randint(0, 32000, (samples, tokens))}
    return LlamaForCausalLM(config), _language_loss, batch


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return losses.view(len(batch["ids"]), -1).float().mean(1)


def t5(samples: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=2048, d_kv=64, num_layers=12, num_heads=12, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(2, 32000, (samples, 128)), torch.randint(2, 32000, (samples, 8))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], labels=batch["labels"], use_cache=False).logits
        return F.cross_entropy(logits.float().mT, batch["labels"], reduction="none").mean(1)

    return T5ForConditionalGeneration(config), loss, {"ids": ids, "labels": labels}


MODELS: dict[str, Callable[[int], Case]] = {
    "vit-b": lambda n: vit(768, 12, 12, 16, 224, n),
    "vit-l": lambda n: vit(1024, 24, 16, 14, 224, n),
    "llama-1b": lambda n: llama(2048, 22, 5632, 32, 512, n),
    "llama-7b": lambda n: llama(4096, 32, 11008, 32, 512, n, shared_heads=1),
    "t5-base": t5,
    "vit-s": lambda n: vit(384, 12, 6, 16, 224, n),
    "vit-s-short": lambda n: vit(384, 12, 6, 16, 48, n),
    "llama-small": lambda n: llama(256, 4, 704, 8, 32, n),
}


def ordinary(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    loss(model, batch).sum().backward()


def retain_graph(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    """One graph for the whole batch, one backward per sample through all of it."""
    losses = loss(model, batch)
    names, parameters = zip(*tally.parameters.items())
    for value in losses:
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        for name, gradient in zip(names, gradients):
            if gradient is not None:
                tally[name].sub_(gradient.sign().to(torch.int8))


def vmap(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    """Per-sample gradients by torch.func, a few samples at a time so that they fit."""
    parameters = dict(tally.parameters)
    weight_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
    budget = 40e9 if torch.cuda.is_available() else 2e9
    step = max(1, int(budget // weight_bytes))

    def one(weights: dict[str, Tensor], sample: Any) -> Tensor:
        sample = {name: value.unsqueeze(0) for name, value in sample.items()}

        def call(**inputs: Any) -> Any:
            return torch.func.functional_call(model, weights, (), inputs)

        return loss(call, sample).squeeze(0)

    per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))
    weights = {name: p.detach() for name, p in parameters.items()}
    for start in range(0, batch_size(batch), step):
        for name, gradient in per_sample(weights, take(batch, slice(start, start + step))).items():
            tally[name].sub_(gradient.sign().sum(0).to(torch.int8))


def opacus(model: nn.Module, loss: Any, batch: Any, tally: Tally) -> None:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model, strict=False)
    try:
        loss(wrapped, batch).sum().backward()
        for name, parameter in tally.parameters.items():
            tally[name].sub_(parameter.grad_sample.sign().sum(0).to(torch.int8))
    finally:
        wrapped.remove_hooks()
        model.zero_grad(set_to_none=True)


SCHEMES = {
    "ordinary": ordinary,
    "batched": batched,
    "loop": loop,
    "vmap": vmap,
    "retain_graph": retain_graph,
    "opacus": opacus,
}
SLOW = {"loop", "vmap", "retain_graph", "opacus"}


def measure(scheme: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds over fresh tallies, and the peak memory above what was there before."""
    model, loss, batch = case
    device, repeats = torch.device(options.device), options.repeats
    step = options.micro_batch or options.samples
    parts = [take(batch, slice(start, start + step)) for start in range(0, options.samples, step)]
    seconds = []
    peak = held = 0
    slow = scheme in SLOW and device.type == "cuda"
    warm_up, repeats = (int(scheme == "vmap"), 1) if slow else (2 if device.type == "cuda" else 1, repeats)
    for turn in range(warm_up + repeats):
        tally = Tally({} if scheme == "ordinary" else dict(model.named_parameters()))
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() - sum(b.numel() for _, b in tally.items())
        start = time.perf_counter()
        for part in parts:
            SCHEMES[scheme](model, loss, part, tally)
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
        if turn >= warm_up:
            seconds.append(time.perf_counter() - start)
        del tally
    found = {"seconds": statistics.median(seconds), "fastest": min(seconds), "runs": len(seconds)}
    return found | ({"peak_bytes": peak} if device.type == "cuda" else {})


def profile(case: Case, scheme: str) -> dict[str, Any]:
    """Where one run's time goes: wall, device busy, and the largest kernels, in milliseconds."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    model, loss, batch = case
    tally = Tally({} if scheme == "ordinary" else dict(model.named_parameters()))
    SCHEMES[scheme](model, loss, batch, tally)
    model.zero_grad(set_to_none=True)
    tally = Tally(tally.parameters)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        SCHEMES[scheme](model, loss, batch, tally)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name[:100], []).append(event.time_range.elapsed_us() / 1e3)
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    busy = sum(map(sum, kernels.values()))
    table = [[round(sum(spans), 3), len(spans), name] for name, spans in largest]
    return {
        "wall": (done - start) * 1e3,
        "launched": (launched - start) * 1e3,
        "busy": busy,
        "launches": sum(map(len, kernels.values())),
        "kernels": table,
    }


def bench(name: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    torch.manual_seed(0)
    with torch.device(device):
        model, loss, batch = MODELS[name](options.samples)
    model = model.to(dtype).eval()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    row: dict[str, Any] = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "samples": options.samples,
        "micro_batch": options.micro_batch or options.samples,
        "parameters": sum(p.numel() for p in model.parameters()),
        "schemes": {},
    }
    if device.type == "cuda":
        row["weight_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        row["forward_bytes"] = forward_bytes(model, loss, take(batch, slice(0, row["micro_batch"])))
    for scheme in options.schemes:
        try:
            row["schemes"][scheme] = measure(scheme, (model, loss, batch), options)
        except (RuntimeError, ImportError, ValueError, AttributeError, NotImplementedError) as error:
            row["schemes"][scheme] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(name, row["dtype"], scheme, row["schemes"][scheme], flush=True)
    row["ratios"] = _ratios(row["schemes"])
    if options.profile:
        chosen = [scheme for scheme in ("ordinary", "batched") if scheme in options.schemes]
        part = take(batch, slice(0, row["micro_batch"]))
        row["profile"] = {scheme: profile((model, loss, part), scheme) for scheme in chosen}
    if device.type == "cuda" and "peak_bytes" in row["schemes"].get("batched", {}):
        extra = row["schemes"]["batched"]["peak_bytes"] - row["schemes"]["ordinary"]["peak_bytes"]
        row["ratios"]["extra_peak_bytes_per_parameter"] = extra / row["parameters"]
    print(name, row["dtype"], row["ratios"], flush=True)
    return row


def forward_bytes(model: nn.Module, loss: Any, batch: Any) -> int:
    """Peak memory of a forward pass that keeps its graph: the activations."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    losses = loss(model, batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    del losses
    return peak


def _ratios(schemes: dict[str, Any]) -> dict[str, float]:
    seconds = {name: found["seconds"] for name, found in schemes.items() if "seconds" in found}
    if "batched" not in seconds:
        return {}
    own = seconds["batched"]
    ratios = {f"{name}_over_batched": value / own for name, value in seconds.items() if name in SLOW}
    if "ordinary" in seconds:
        ratios["batched_over_ordinary"] = own / seconds["ordinary"]
    return ratios


# One process for everything the README states about one large GPU: models, dtypes, schemes, options.
SUITE: list[tuple[list[str], dict[str, Any]]] = [
    (["vit-b"], {"repeats": 15, "profile": True}),
    (["vit-l"], {"repeats": 10, "profile": True}),
    (["llama-1b"], {"repeats": 5, "micro_batch": 25, "profile": True}),
    (["vit-b", "vit-l"], {"dtypes": ["float32"], "tf32": True, "schemes": ["ordinary", "batched"]}),
    (["llama-7b"], {"samples": 32, "micro_batch": 8, "repeats": 3, "schemes": ["ordinary", "batched"]}),
    (["t5-base"], {"repeats": 5, "schemes": ["ordinary", "batched"]}),
    (["vit-b"], {"dtypes": ["float32"], "schemes": ["ordinary", "batched"], "repeats": 5}),
]


def run_suite(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for models, changes in SUITE:
        defaults = {"dtypes": ["bfloat16"], "tf32": False, "profile": False, "micro_batch": None}
        chosen = argparse.Namespace(**{**vars(options), **defaults, **changes})
        for name in models:
            if time.perf_counter() - start > options.time_limit:
                return rows
            rows.extend(run_rows([name], chosen))
            write(rows, options)
    return rows


def run_rows(models: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32
    rows = []
    for name in models:
        for dtype in options.dtypes:
            rows.append(bench(name, getattr(torch, dtype), options) | {"tf32": options.tf32})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    report = {"rows": rows, "arguments": {**vars(options), "json": None}, "versions": versions()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["vit-s", "vit-s-short", "llama-small"], choices=MODELS
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument(
        "--schemes", nargs="+", default=[name for name in SCHEMES if name != "opacus"], choices=SCHEMES
    )
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=None, help="samples at a time, for every scheme")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--suite", action="store_true", help="all measurements for one large GPU")
    parser.add_argument(
        "--time-limit", type=float, default=600, help="seconds after which a suite starts no model"
    )
    parser.add_argument("--tf32", action="store_true", help="let float32 products use the tf32 matrix units")
    parser.add_argument("--profile", action="store_true", help="add the largest kernels of one run")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    write(run_suite(options) if options.suite else run_rows(options.models, options), options)


def versions() -> dict[str, str]:
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    else:
        found |= {
            "device": platform.processor() or platform.machine(),
            "threads": str(torch.get_num_threads()),
        }
    return found


if __name__ == "__main__":
    main()
