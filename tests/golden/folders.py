"""What transports and merges write: bytes, files and the meaning of the manifest.

Votes are taken in float64 on drawn models, so every sign is far from rounding and the bytes are exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.golden.command import do

Words = tuple[object, ...]
COMMON: dict[str, Words] = {
    "agree": ("--mask", "agree", "--alpha", 0.5),
    "veto": ("--mask", "veto", "--margin", 0.3, "--alpha", 0.5),
    "none": ("--mask", "none", "--alpha", 0.5),
    "random": ("--mask", "random", "--alpha", 0.5, "--seed", 3),
    "force": ("--mask", "force", "--alpha", 0.25),
    "mean vote": ("--mask", "agree", "--vote", "mean", "--alpha", 0.5),
    "herding": ("--mask", "agree", "--select", "herding", "--alpha", 0.5),
    "alpha auto": ("--mask", "agree", "--alpha", "auto"),
    "bf16 out": ("--mask", "agree", "--alpha", 0.5, "--out-dtype", "bf16"),
    "aligned": ("--mask", "none", "--align", "transfusion", "--alpha", 0.5, "--force"),
}
MEANING = ("kind", "config", "counts", "kept", "survived_rounding", "norm_ratio")
HEAD = "zero_shot_head.safetensors"
VECTORS = (("base", "tuned", 0.5), ("older", "older-tuned", 0.25))
MERGES: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"method": "task_arithmetic", "alpha": 0.5},
    "ties": {"method": "ties", "density": 0.5},
    "dare_linear": {"method": "dare_linear", "density": 0.5, "seed": 4},
    "mask_then_merge": {"method": "mean", "order": "mask_then_merge", "mask": "veto", "margin": 0.3},
    "merge_then_mask": {"method": "ties", "density": 0.5, "order": "merge_then_mask", "alpha": 0.5},
}


def sha(content: bytes | str) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:24]


def tensors_sha(tensors: Mapping[str, Tensor]) -> str:
    """Names, dtypes, shapes and bytes, whatever the order. The sign of a zero counts for nothing."""
    parts = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        content = (tensor + 0).numpy().tobytes()
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} {sha(content)}")
    return sha("\n".join(parts))


def folder_figures(folder: Path, *, exact: bool = True) -> dict[str, Any]:
    """The folder without what differs from run to run: versions, paths, times, the card's text."""
    manifest = json.loads((folder / "gradfix.json").read_text(encoding="utf-8"))
    weights = sorted(folder.glob("*.safetensors"))
    figures = {
        "files": sorted(path.name for path in folder.iterdir()),
        **{key: manifest[key] for key in MEANING if key in manifest},
        "notes": len(manifest.get("notes", ())),
        **fates(manifest.get("tensors", {}).items()),
    }
    if exact:
        # A zero-shot head is computed by the text encoder, so its last bits are the CPU's.
        made = {path.name: sha(path.read_bytes()) for path in weights if path.name != HEAD}
        figures["weights"] = made
    if (folder / HEAD).exists():
        figures["head sizes"] = {name: float(t.double().abs().sum()) for name, t in load_file(folder / HEAD).items()}
    if "merge" in manifest.get("details", {}):
        figures["merge"] = manifest["details"]["merge"]
    return figures


def fates(tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Names by fate and reason where something else than a plain transport happened; the rest as one hash."""
    special: dict[str, list[str]] = {}
    plain = {}
    for name, fate in sorted(tensors):
        kind = fate["fate"] + (f": {fate['reason']}" if fate.get("reason") else "")
        if kind == "transported":
            plain[name] = fate
        else:
            special.setdefault(kind, []).append(name)
    return {"transported": sha(json.dumps(plain, sort_keys=True)), "other fates": special}


def trio(home: Path, base: str = "base", tuned: str = "tuned", target: str = "target") -> Words:
    return (
        "--base", home / base, "--tuned", home / tuned, "--target", home / target, "--data", home / "data",
        "--shots", 3, "--dtype", "fp64",
    )  # fmt: skip


def transports(home: Path, place: Path) -> dict[str, Any]:
    """`gradfix transport` by mask options."""
    found: dict[str, Any] = {}

    def run(name: str, inputs: Words, options: Words, task: str = "classification", exact: bool = True) -> Path:
        out = place / name.replace(" ", "-")
        report = out.with_suffix(".json")
        do("transport", *inputs, "--task", task, "--no-check", *options, "--out", out, "--json", report)
        result = json.loads(report.read_text(encoding="utf-8"))
        shown = {key: result[key] for key in ("alpha", "margin", "regime", "kept")}
        found[name] = {**folder_figures(out, exact=exact), "result": shown}
        return out

    for name, options in COMMON.items():
        run(name, trio(home), options)
    agree = COMMON["agree"]
    run("sharded", trio(home, target="sharded"), agree)
    run("adapter in", trio(home, tuned="lora"), COMMON["none"])
    bare = trio(home, base="bare-base", target="bare-target")
    run("head copied", bare, (*agree, "--head", "copy"))
    run("head skipped", bare, (*agree, "--head", "skip"), task="zero-shot")
    # The factors come out of an SVD, which no two CPUs round alike: norms of the products instead of bytes.
    adapter = run("adapter out", trio(home), (*agree, "--out-lora", 3), exact=False)
    found["adapter out"]["factors"] = product_norms(adapter)
    return found


def product_norms(adapter: Path) -> dict[str, Any]:
    factors = load_file(adapter / "adapter_model.safetensors")
    norms = {}
    for name, down in factors.items():
        if name.endswith("lora_A.weight"):
            up = factors[name.replace("lora_A", "lora_B")]
            norms[name] = {"rank": down.shape[0], "norm": float((up @ down).norm())}
    return norms


def merges(home: Path, place: Path) -> dict[str, Any]:
    """`gradfix merge` of two vectors with different bases; votes from a file where the order asks for them."""
    votes = place / "votes.safetensors"
    do("vote", "--target", home / "target", "--data", home / "data", "--task", "classification",
       "--shots", 3, "--dtype", "fp64", "--out", votes)  # fmt: skip
    found = {}
    for name, options in MERGES.items():
        vectors = [
            {"base": str(home / base), "tuned": str(home / tuned), "weight": weight}
            | ({"votes": str(votes)} if "order" in options else {})
            for base, tuned, weight in VECTORS
        ]
        recipe = place / f"{name}.yaml"
        recipe.write_text(json.dumps({"target": str(home / "target"), "vectors": vectors, **options}))
        do("merge", recipe, "--out", place / name)
        found[name] = folder_figures(place / name)
    return found
