"""What a majority vote costs: seconds and peak memory of every way to get it, against one ordinary backward.

    PYTHONPATH=src python -m benchmarks.votes --suite --json benchmarks/results/votes_h200.json
    PYTHONPATH=src python -m benchmarks.votes --public 1 8 --models vit-b vit-l --dtypes bfloat16 --json votes_public.json
    PYTHONPATH=src python -m benchmarks.votes --models vit-s vit-s-short --samples 16 --threads 2 --json votes_cpu.json

An ordinary backward is one forward and backward of the same batch with all parameter gradients, no optimizer. Schemes:
`batched` (one pass, recorded where that pays), `launched` (the same, every pass launched anew), `collect_votes` (the
public call for one batch: launched, with its checks), `loop` (one sample at a time), `vmap` (torch.func, in chunks that
fit), `retain_graph` (one backward per sample through the graph of the whole batch), `opacus` where it is installed.
Slow schemes may be timed on some of the samples, whose number is written down. `--public` times whole calls instead.
Memory is what a scheme takes on top of the weights and the batch; `reserved` also counts what the allocator keeps."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.vote_models import MODELS, TINY, Case
from benchmarks.vote_schemes import SCHEMES, SLOW, backward_through_all, ordinary
from gradfix._compat import heal_torchvision
from gradfix.votes.batched import recorded
from gradfix.votes.collect import collect_votes
from gradfix.votes.engines.passes import take
from gradfix.votes.tally import Tally

FAILURES = (RuntimeError, ImportError, ValueError, AttributeError, NotImplementedError, TypeError)
WARM_UP = 4  # passes before a recording is played


class Memory:
    """Peak bytes on a GPU since the start, above what was held then."""

    def __init__(self, device: torch.device, empty: bool = True) -> None:
        self.on = device.type == "cuda"
        gc.collect()
        if self.on:
            torch.cuda.synchronize()
            if empty:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.held, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def found(self) -> dict[str, int]:
        if not self.on:
            return {}
        peak = torch.cuda.max_memory_allocated() - self.held
        return {"peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved() - self.reserved}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(scheme: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds over fresh tallies, and the peak memory of all runs."""
    model, loss, batch = case
    device = torch.device(options.device)
    slow = scheme in SLOW and device.type == "cuda"
    if slow and scheme in ("loop", "retain_graph"):
        return measure_some(scheme, case, options)
    step = options.micro_batch or options.samples
    parts = [take(batch, slice(start, start + step)) for start in range(0, options.samples, step)]
    repeats = 1 if slow else options.repeats
    warm_up = 1 if slow or device.type != "cuda" else WARM_UP if len(parts) == 1 else 2
    memory, seconds = Memory(device), []
    for turn in range(warm_up + repeats):
        tally = Tally({} if scheme == "ordinary" else dict(model.named_parameters()))
        synchronize(device)
        start = time.perf_counter()
        for part in parts:
            SCHEMES[scheme](model, loss, part, tally)
        model.zero_grad(set_to_none=True)
        synchronize(device)
        if turn >= warm_up:
            seconds.append(time.perf_counter() - start)
        del tally
    found = {"seconds": statistics.median(seconds), "fastest": min(seconds), "runs": len(seconds)}
    known = recorded._REPEATS.get(model)
    if scheme == "batched" and known is not None:
        found["recorded"] = known.recording is not None
        found["why_not"] = known.reason[:200]
    del known
    recorded.drop(model)
    return found | memory.found()


def measure_some(scheme: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Schemes whose cost is the same for every sample: a few are timed, after one that is not.

    The graph of `retain_graph` is that of the whole batch, or of the largest part of it that fits."""
    model, loss, batch = case
    device, timed = torch.device(options.device), min(options.timed, options.samples)
    if scheme == "loop":
        memory, tally = Memory(device), Tally(dict(model.named_parameters()))
        SCHEMES[scheme](model, loss, take(batch, slice(0, 1)), tally)
        synchronize(device)
        start = time.perf_counter()
        SCHEMES[scheme](model, loss, take(batch, slice(0, timed)), tally)
        synchronize(device)
        each = (time.perf_counter() - start) / timed
        return {"seconds": each * options.samples, "timed_samples": timed} | memory.found()
    size = options.samples
    while True:
        try:
            return _through_graph_of(size, timed, case, options)
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise
        size = -(-size // 2)


def _through_graph_of(size: int, timed: int, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    model, loss, batch = case
    device, timed = torch.device(options.device), min(timed, size)
    memory, tally = Memory(device), Tally(dict(model.named_parameters()))
    start = time.perf_counter()
    losses = loss(model, take(batch, slice(0, size)))
    synchronize(device)
    forward = time.perf_counter() - start
    backward_through_all(losses[0], tally)
    synchronize(device)
    start = time.perf_counter()
    for value in losses[:timed]:
        backward_through_all(value, tally)
    synchronize(device)
    each = (time.perf_counter() - start) / timed
    seconds = options.samples * (forward / size + each)
    return {"seconds": seconds, "timed_samples": timed, "graph_samples": size} | memory.found()


def profile(case: Case, scheme: str) -> dict[str, Any]:
    """Where one run's time goes: wall, device busy, and the largest kernels, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile as record

    model, loss, batch = case
    tally = Tally({} if scheme == "ordinary" else dict(model.named_parameters()))
    for _ in range(WARM_UP):
        SCHEMES[scheme](model, loss, batch, Tally(tally.parameters))
        model.zero_grad(set_to_none=True)
    launched = _launch_times(case, scheme, tally)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        SCHEMES[scheme](model, loss, batch, tally)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name[:100], []).append(event.time_range.elapsed_us() / 1e3)
    model.zero_grad(set_to_none=True)
    recorded.drop(model)
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    table = [[round(sum(spans), 3), len(spans), name] for name, spans in largest]
    launches = sum(map(len, kernels.values()))
    return launched | {"busy": sum(map(sum, kernels.values())), "launches": launches, "kernels": table}


def _launch_times(case: Case, scheme: str, tally: Tally) -> dict[str, float]:
    """Milliseconds of one run without a profiler, and until its last launch; the median of five."""
    model, loss, batch = case
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        SCHEMES[scheme](model, loss, batch, Tally(tally.parameters))
        launched = time.perf_counter()
        torch.cuda.synchronize()
        found.append(((time.perf_counter() - start) * 1e3, (launched - start) * 1e3))
        model.zero_grad(set_to_none=True)
    return {"wall": statistics.median(w for w, _ in found), "launched": statistics.median(n for _, n in found)}


def loaded(name: str, dtype: torch.dtype, options: argparse.Namespace) -> Case:
    torch.manual_seed(0)
    with torch.device(options.device):
        model, loss, batch = (TINY if options.tiny else MODELS)[name](options.samples)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model.to(dtype).eval(), loss, batch


def bench(name: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    model, loss, batch = loaded(name, dtype, options)
    row: dict[str, Any] = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tf32": options.tf32,
        "samples": options.samples,
        "micro_batch": options.micro_batch or options.samples,
        "parameters": sum(p.numel() for p in model.parameters()),
        "schemes": {},
    }
    part = take(batch, slice(0, row["micro_batch"]))
    if device.type == "cuda":
        row["weight_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        row["forward_bytes"] = forward_bytes(model, loss, part)
    for scheme in options.schemes:
        if scheme in SLOW and time.perf_counter() > options.deadline:
            row["schemes"][scheme] = {"failed": "no time left"}
            continue
        try:
            row["schemes"][scheme] = measure(scheme, (model, loss, batch), options)
        except FAILURES as error:
            first = (str(error).splitlines() or [""])[0]
            row["schemes"][scheme] = {"failed": f"{type(error).__name__}: {first[:200]}"}
        model.zero_grad(set_to_none=True)
        print(name, row["dtype"], scheme, row["schemes"][scheme], flush=True)
    row["ratios"] = _ratios(row)
    if options.profile and device.type == "cuda" and time.perf_counter() < options.deadline:
        chosen = [scheme for scheme in ("ordinary", "batched", "launched") if scheme in options.schemes]
        row["profile"] = {scheme: profile((model, loss, part), scheme) for scheme in chosen}
        for scheme, found in row["profile"].items():
            print(name, scheme, {key: value for key, value in found.items() if key != "kernels"}, flush=True)
    print(name, row["dtype"], row["ratios"], flush=True)
    return row


def forward_bytes(model: nn.Module, loss: Any, batch: Any) -> int:
    """Peak memory of a forward pass that keeps its graph: the activations."""
    memory = Memory(torch.device("cuda"))
    losses = loss(model, batch)
    torch.cuda.synchronize()
    del losses
    return memory.found()["peak_bytes"]


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    schemes = row["schemes"]
    seconds = {name: found["seconds"] for name, found in schemes.items() if "seconds" in found}
    ratios = {}
    for own in ("batched", "launched", "collect_votes"):
        if own in seconds and "ordinary" in seconds:
            ratios[f"{own}_over_ordinary"] = seconds[own] / seconds["ordinary"]
    if "batched" in seconds:
        ratios |= {f"{n}_over_batched": s / seconds["batched"] for n, s in seconds.items() if n in SLOW}
    for kind in ("peak", "reserved"):
        if f"{kind}_bytes" in schemes.get("batched", {}) and "ordinary" in seconds:
            extra = schemes["batched"][f"{kind}_bytes"] - schemes["ordinary"][f"{kind}_bytes"]
            ratios[f"extra_{kind}_bytes_per_parameter"] = extra / row["parameters"]
    return ratios


PUBLIC_CALLS = {"batched": "batched", "auto, first call": "auto", "auto, again": "auto"}


def public(name: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Whole calls over ordinary backwards of the same batches, taken in turns. The first of `auto` meets a new model."""
    case = loaded(name, dtype, options)
    model, loss, batch = case
    for engine in ("batched", "auto"):
        collect_votes(model, loss, [batch] * 2, engine=engine)
    row: dict[str, Any] = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "samples_a_batch": options.samples,
    }
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "calls": []}
    for count in options.public:
        batches = [batch] * count
        found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in ("ordinary", *PUBLIC_CALLS)}
        for _ in range(options.repeats):
            found["ordinary"].append(_one_call(case, batches, None))
            for kind, engine in PUBLIC_CALLS.items():
                own = copy.deepcopy(model) if "first" in kind else model
                found[kind].append(_one_call((own, loss, batch), batches, engine))
                del own
        usual, held = (statistics.median(values) for values in zip(*found.pop("ordinary")))
        for kind, measured in found.items():
            seconds, peak = (statistics.median(values) for values in zip(*measured))
            call = {"engine": kind, "batches": count, "seconds": seconds, "ordinary_seconds": usual}
            call |= {"ratio": seconds / usual, "fastest": min(value for value, _ in measured)}
            if torch.device(options.device).type == "cuda":
                call["extra_peak_bytes_per_parameter"] = (peak - held) / row["parameters"]
            row["calls"].append(call)
            print(name, row["dtype"], call, flush=True)
    return row


def _one_call(case: Case, batches: list[Any], engine: str | None) -> tuple[float, int]:
    """Seconds and peak bytes of one public call, or (without an engine) of one ordinary backward a batch."""
    model, loss, batch = case
    device = next(model.parameters()).device
    memory = Memory(device, empty=False)
    start = time.perf_counter()
    if engine is None:
        for batch in batches:
            ordinary(model, loss, batch, Tally({}))
            model.zero_grad(set_to_none=True)
    else:
        collect_votes(model, loss, batches, engine=engine)
    synchronize(device)
    return time.perf_counter() - start, memory.found().get("peak_bytes", 0)


PAIR = ["ordinary", "batched"]
# One process for everything the documents state about one large GPU: models and options, the most wanted first.
SUITE: list[tuple[list[str], dict[str, Any]]] = [
    (["vit-b"], {"repeats": 15, "timed": 25, "profile": True, "schemes": list(SCHEMES)}),
    (["vit-l"], {"timed": 10, "profile": True, "schemes": [n for n in SCHEMES if n != "opacus"]}),
    (["llama-1b"], {"repeats": 3, "micro_batch": 25, "timed": 4, "profile": True,
                    "schemes": [*PAIR, "loop", "vmap", "retain_graph"]}),
    (["t5-base"], {"repeats": 10, "timed": 10, "profile": True, "schemes": [n for n in SCHEMES if n != "opacus"]}),
    (["vit-b"], {"dtypes": ["float32"], "tf32": True, "schemes": [*PAIR, "vmap"]}),
    (["vit-l"], {"dtypes": ["float32"], "tf32": True, "schemes": PAIR, "repeats": 5}),
    (["llama-1b"], {"dtypes": ["float32"], "tf32": True, "schemes": PAIR, "repeats": 2, "micro_batch": 25}),
    (["vit-b"], {"dtypes": ["float32"], "schemes": [*PAIR, "vmap"], "repeats": 5}),
    (["llama-7b"], {"samples": 32, "micro_batch": 8, "repeats": 2, "schemes": PAIR}),
]  # fmt: skip


def run_suite(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for models, changes in SUITE:
        defaults = {"dtypes": ["bfloat16"], "tf32": False, "profile": False, "micro_batch": None, "public": None}
        chosen = argparse.Namespace(**{**vars(options), **defaults, **changes})
        if options.tiny:
            chosen.samples, chosen.repeats = min(chosen.samples, 6), 1
            chosen.micro_batch = chosen.micro_batch and 3
        if time.perf_counter() > options.deadline:
            break
        run_rows(models, chosen, rows)
    write(rows, options)


def run_rows(models: list[str], options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32
    for name in models:
        for dtype in options.dtypes:
            rows.append((public if options.public else bench)(name, getattr(torch, dtype), options))
            write(rows, options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    left_out = ("json", "deadline")
    arguments = {name: value for name, value in vars(options).items() if name not in left_out}
    report = {"rows": rows, "arguments": arguments, "versions": versions()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit-s", "vit-s-short", "llama-small"], choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--schemes", nargs="+", default=["ordinary", "batched", "loop", "vmap"], choices=SCHEMES)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=None, help="samples at a time, for every scheme")
    parser.add_argument("--timed", type=int, default=100, help="samples timed of loop and retain_graph")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--suite", action="store_true", help="all measurements for one large GPU")
    parser.add_argument(
        "--public", type=int, nargs="+", metavar="N", help="collect_votes itself, with N batches a call"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the benchmark itself")
    parser.add_argument("--time-limit", type=float, default=190, help="seconds after which nothing slow is started")
    parser.add_argument("--tf32", action="store_true", help="let float32 products use the tf32 matrix units")
    parser.add_argument("--profile", action="store_true", help="add the largest kernels of one run")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.deadline = time.perf_counter() + options.time_limit
    heal_torchvision()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.suite:
        run_suite(options)
    else:
        run_rows(options.models, options, [])


def versions() -> dict[str, str]:
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    else:
        found |= {"device": platform.processor() or platform.machine(), "threads": str(torch.get_num_threads())}
    return found


if __name__ == "__main__":
    main()
