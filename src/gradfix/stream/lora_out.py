"""An update as a LoRA adapter for the target: small to ship, and only an approximation.

A masked update has nearly full rank, so a truncated adapter keeps a part of it. How much is measured per
layer and overall, and an adapter that keeps too little, or does not lower the few-shot loss, is refused. Heads are
stored in full: the folder is one that the matching AutoPeftModel class loads, with tokenizer and all."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.adapter import peft_task
from gradfix.checkpoints.folder import copy_adapter_files, versions
from gradfix.checkpoints.hashes import file_hashes
from gradfix.checkpoints.lora import factored_norm
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, Source, open_checkpoint
from gradfix.checkpoints.weights import Renamed
from gradfix.checkpoints.write import refuse_inside, save_tensors, staged_folder, write_manifest
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.stream.card import card
from gradfix.stream.checkpoint import Output, StreamReport
from gradfix.vectors.taskvector import TaskVector

LEAST_ENERGY = 0.25
EXACT_BELOW, OVERSAMPLED = 512, 16  # up to so many rows or columns the full decomposition is as quick
NOTHING = "the update is zero: there is nothing to put into an adapter."
LINEAR, TURNED, TABLE, CONVOLUTION = "linear", "conv1d", "embedding", "convolution"


@dataclass(frozen=True)
class LoraResult:
    """Low-rank factors of an update, and how much of it they hold.

    `factors[name] = (left, right)` with the update of that tensor close to `left @ right`; `energy` is the share of
    the squared norm that survives, per tensor; `whole` are tensors kept as they are, and `dropped` maps each tensor
    that no adapter can hold to its share of the whole energy. `saved` are parameters of the model that the folder has in full."""

    rank: int
    factors: dict[str, tuple[Tensor, Tensor]]
    energy: dict[str, float]
    retained: float
    shapes: dict[str, torch.Size]
    whole: dict[str, Tensor] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    saved: frozenset[str] = frozenset()

    @property
    def approximated(self) -> TaskVector:
        """The update the adapter really makes, under all the names of the original one."""
        return TaskVector({name: self._tensor(name) for name in self.shapes})

    def scaled(self, factor: float) -> LoraResult:
        """The factors of `factor * update`; truncation and shares of energy stay the same."""
        if factor == 0:
            raise UnsafeResult(NOTHING)
        factors = {name: (factor * left, right) for name, (left, right) in self.factors.items()}
        return replace(self, factors=factors, whole={name: factor * t for name, t in self.whole.items()})

    def _tensor(self, name: str) -> Tensor:
        if name in self.factors:
            left, right = self.factors[name]
            return (left @ right).view(self.shapes[name])
        return self.whole.get(name, torch.zeros(self.shapes[name]))

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "retained_energy": round(self.retained, 6),
            "layers": {name: round(share, 6) for name, share in self.energy.items()},
            "whole": sorted(self.whole),
            "dropped": {name: round(share, 6) for name, share in self.dropped.items()},
        }


def lora_from_update(
    update: Mapping[str, Tensor], rank: int, *, layers: Collection[str] | None = None, whole: Collection[str] = ()
) -> LoraResult:
    """Factor an update by truncated SVD, one tensor at a time; the same input gives the same bits.

    `layers` are the tensors an adapter can hold (default: all with two dimensions), `whole` those to keep
    unfactored. What is in neither is dropped and counted."""
    if rank < 1:
        raise UsageError(f"the rank of an adapter must be at least 1, got {rank}.")
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    kept: dict[str, Tensor] = {}
    total: dict[str, float] = {}
    lost: dict[str, float] = {}
    for name, tensor in update.items():
        moved = tensor.detach().float().cpu()
        total[name] = lost[name] = float(moved.double().square().sum())
        if total[name] == 0:
            continue
        if name in whole:
            kept[name], lost[name] = moved, 0.0
        elif name in layers if layers is not None else moved.ndim == 2:
            flat = moved.flatten(1)
            factors[name] = left, right = truncated(flat, rank)
            lost[name] = float((flat - left @ right).double().square().sum())
    everything = sum(total.values())
    if everything == 0:
        raise UnsafeResult(NOTHING)
    energy = {name: 1 - lost[name] / total[name] for name in factors}
    dropped = {name: total[name] / everything for name in total if total[name] and name not in {*factors, *kept}}
    shapes = {name: tensor.shape for name, tensor in update.items()}
    return LoraResult(rank, factors, energy, 1 - sum(lost.values()) / everything, shapes, kept, dropped)


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best (or, for large matrices, nearly the best) rank-`rank` factors, evenly scaled."""
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(EXACT_BELOW, rank + OVERSAMPLED):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(matrix, q=rank + OVERSAMPLED, niter=4)
        vh = v.T
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).contiguous(), (root[:, None] * vh[:rank]).contiguous()


def check_lora(
    result: LoraResult,
    *,
    loss_before: float | None = None,
    loss_after: float | None = None,
    least_energy: float = LEAST_ENERGY,
    force: bool = False,
) -> list[str]:
    """Refuse an adapter that keeps too little or does not help; the losses are those of `approximated`.

    Returns notes for the report. With `force` the reasons become notes."""
    doubts = []
    if result.retained < least_energy:
        doubts.append(
            f"rank {result.rank} keeps {result.retained:.1%} of the update's energy (at least {least_energy:.0%} "
            "is asked for): raise --out-lora, or write full weights"
        )
    if loss_before is not None and loss_after is not None and not loss_after <= loss_before:
        doubts.append(
            f"with the rank-{result.rank} adapter the few-shot loss goes from {loss_before:.4g} to {loss_after:.4g}, "
            "not down: raise --out-lora, or write full weights"
        )
    if doubts and not force:
        raise UnsafeResult("; ".join(doubts) + ". --force writes it all the same.")
    notes = [f"the adapter keeps {result.retained:.1%} of the update's energy", *doubts]
    if result.dropped:
        share = sum(result.dropped.values())
        notes.append(f"{len(result.dropped)} tensors fit no adapter and were left out ({share:.2%} of the energy)")
    return notes


def layer_kinds(model: nn.Module) -> dict[str, str]:
    """Tensors of a model that a LoRA adapter can hold, with the kind of layer; tied weights are left out.

    An adapter on a tied weight would move only one of its uses while it runs, and both when merged."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = _kind(module)
        weight = getattr(module, "weight", None)
        if kind is not None and isinstance(weight, Tensor) and uses.get(id(weight)) == 1:
            found[f"{path}.weight"] = kind
    return found


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear":
        return LINEAR
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return TABLE  # BART's positions and scaled tables compute something else, which peft does not know
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        return CONVOLUTION
    return TURNED if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def whole_tensors(model: nn.Module) -> set[str]:
    """Biases and the weights of norms: small tensors that an adapter folder can carry unfactored."""
    held = set()
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if _kind(module) is not None:
            held |= {name for name in own if name.endswith(".bias")}
        elif not any(module.children()) and path:
            held |= own
    return held


def save_lora(
    result: LoraResult,
    out: str | os.PathLike[str],
    *,
    model: nn.Module,
    target: Source | Checkpoint,
    base_name: str | None = None,
    inputs: Mapping[str, Checkpoint] | None = None,
    config: Mapping[str, Any] | None = None,
    notes: Collection[str] = (),
    **options: Any,
) -> StreamReport:
    """Write the factors in peft's own format, to be loaded on `target` by PeftModel.from_pretrained.

    `model` is the target as a module (the meta device will do unless tensors are kept whole); names in the
    result may be module names or on-disk names. The manifest ties the folder to the target's weights; `inputs`
    (by role) and `config` (mask, alpha ...) go into it and into the model card, and so do `facts` (`votes`, `kept`,
    `norm_ratio`, which needs the model's weights otherwise).
    Further options are those of an `Output`: `overwrite`, `details`, `extras`."""
    own, output = Output.sorted_out(out, options, {"facts": {}})
    goal, out = open_checkpoint(target), Path(out)
    sources = {**(inputs or {}), "target": goal}
    refuse_inside(out, [source.path for source in sources.values() if source.path is not None])
    disk = name_map(model, goal.names()).renamed
    tensors, adapter = _adapter(result, model, {there: name for name, there in disk.items()})
    adapter["base_model_name_or_path"] = base_name or str(goal)
    fates = _fates(result, disk, goal)
    counts = Counter(entry["fate"] for entry in fates.values())
    kinds = ("transported", "copied", "skipped")
    report = StreamReport(
        out, counts["transported"], counts["copied"], counts["skipped"], own["facts"].get("kept", 1.0), 1.0,
        own["facts"]["norm_ratio"] if "norm_ratio" in own["facts"] else _size(result, model, Renamed(goal, disk)),
        tensors=fates, notes=tuple(notes),
    )  # fmt: skip
    with staged_folder(out, overwrite=output.overwrite) as staging:
        save_tensors(staging / "adapter_model.safetensors", tensors, {"format": "pt"})
        text = json.dumps(adapter, indent=2, sort_keys=True)
        (staging / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
        copy_adapter_files(goal, staging)
        if output.extras is not None:
            output.extras(staging)
        content = {
            "format": 1,
            "kind": "lora",
            **versions(),
            "base_fingerprint": goal.fingerprint(),
            "inputs": {
                role: {"path": str(source), "hashes": {Path(p).name: h for p, h in file_hashes(source).items()}}
                for role, source in sources.items()
            },
            "config": dict(config or {}),
            "votes": own["facts"].get("votes", {}),
            "counts": {**{kind: counts[kind] for kind in kinds}, "total": len(fates)},
            **{"kept": report.kept, "survived_rounding": report.survived, "norm_ratio": report.norm_ratio},
            "lora": result.describe(),
            "details": dict(output.details or {}),
            "notes": list(notes),
            "tensors": fates,
        }
        (staging / "README.md").write_text(card(content), encoding="utf-8")
        write_manifest(staging, content, {})
    return report


def _size(result: LoraResult, model: nn.Module, stored: Checkpoint) -> float:
    """The update's norm beside that of the weights it changes; of placeholders the file tells."""
    weights = (stored.read(n) if p.is_meta else p.detach() for n, p in model.named_parameters() if n in result.shapes)
    size, whole = (sum(float(t.double().square().sum()) for t in some) for some in (weights, result.whole.values()))
    return float(((factored_norm(result.factors) ** 2 + whole) / size) ** 0.5) if size else 0.0


def _adapter(
    result: LoraResult, model: nn.Module, modules: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What goes into the two files of peft: tensors and config."""
    kinds, saved = layer_kinds(model), saved_modules(model, result.saved)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, (left, right) in result.factors.items():
        own = name if name in kinds else modules.get(name, name)
        if own not in kinds:
            raise IncompatibleCheckpoints(f"tensor {name!r} belongs to no layer that a LoRA adapter can hold.")
        path = own.removesuffix(".weight")
        ranks[path] = left.shape[1]
        shape = result.shapes[name]
        tensors |= {f"base_model.model.{path}.{k}": v for k, v in _peft_tensors(kinds[own], left, right, shape).items()}
    moved = {modules.get(name, name): value for name, value in result.whole.items()}
    for path in saved:
        for own, value in model.get_submodule(path).state_dict().items():
            tensors[f"base_model.model.{path}.{own}"] = _sum(value, moved.pop(f"{path}.{own}", None))
    small, biased = _add_whole(moved, model, set(ranks), tensors)
    config = _adapter_config(result.rank, ranks, [*saved, *small], biased)
    config["fan_in_fan_out"] = any(kinds[f"{path}.weight"] == TURNED for path in ranks)
    return tensors, config | peft_task(model)


def saved_modules(model: nn.Module, names: Collection[str]) -> list[str]:
    """The largest modules that hold none but these parameters, and those that peft would take for one of them.

    peft goes by the ends of names, and in classifiers of texts looks for "classifier" and "score" by itself."""
    found: list[str] = []
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if path and own and set(own) <= set(names) and not any(path.startswith(f"{top}.") for top in found):
            found.append(path)
    if peft_task(model)["task_type"] == "SEQ_CLS":
        ends = (*found, "classifier", "score")
    else:
        ends = tuple(found)
    return [p for p, m in model.named_modules() if p.endswith(ends) and next(m.parameters(), None) is not None]


def _fates(result: LoraResult, disk: Mapping[str, str], goal: Checkpoint) -> dict[str, dict[str, Any]]:
    """What became of every tensor of the target and of a head that it lacks, under on-disk names."""
    saved = {disk.get(name, name) for name in result.saved}
    found: dict[str, dict[str, Any]] = {name: {"fate": "copied"} for name in [*goal.names(), *sorted(saved)]}
    found |= {name: {"fate": "copied", "reason": "a head, stored in full"} for name in saved}
    for name, share in result.energy.items():
        found[disk.get(name, name)] = {"fate": "transported", "energy": round(share, 6)}
    for name in result.whole:
        found[disk.get(name, name)] = {"fate": "transported", "reason": "stored in full"}
    for name in result.dropped:
        found[disk.get(name, name)] = {"fate": "skipped", "reason": "fits no adapter"}
    return found


def adapter_for(
    update: Mapping[str, Tensor],
    rank: int,
    *,
    model: nn.Module,
    target: Source | Checkpoint,
    keep_small: bool = False,
    saved: Collection[str] = (),
) -> LoraResult:
    """Factor what an adapter of this model can hold; names may be the module's or those on disk.

    `keep_small` carries biases and norms unfactored. `saved` are parameters to store in full, by module name."""
    disk = name_map(model, open_checkpoint(target).names()).renamed

    def given(names: Iterable[str]) -> set[str]:
        return {own if own in update else disk.get(own, own) for own in names}

    held = {f"{p}.{n}" for p in saved_modules(model, saved) for n, _ in model.get_submodule(p).named_parameters()}
    whole = given(held | (whole_tensors(model) if keep_small else set()))
    result = lora_from_update(update, rank, layers=given(layer_kinds(model)) - whole, whole=whole)
    return replace(result, saved=frozenset(held))


def _peft_tensors(kind: str, left: Tensor, right: Tensor, shape: torch.Size) -> dict[str, Tensor]:
    if kind == TABLE:
        return {"lora_embedding_A": left.T.contiguous(), "lora_embedding_B": right.T.contiguous()}
    if kind == TURNED:
        return {"lora_A.weight": left.T.contiguous(), "lora_B.weight": right.T.contiguous()}
    if kind == CONVOLUTION:
        return {"lora_A.weight": right.view(-1, *shape[1:]), "lora_B.weight": left.view(*left.shape, 1, 1)}
    return {"lora_A.weight": right, "lora_B.weight": left}


def _add_whole(
    moved: Mapping[str, Tensor], model: nn.Module, adapted: set[str], tensors: dict[str, Tensor]
) -> tuple[list[str], bool]:
    """Full tensors of modules that are saved rather than adapted; biases follow peft's own convention."""
    parameters = dict(model.named_parameters())
    saved: set[str] = set()
    biased = False
    for name, value in moved.items():
        path, _, leaf = name.rpartition(".")
        if _kind(model.get_submodule(path)) is not None:
            inner = f"{path}.base_layer.{leaf}" if path in adapted else name
            tensors[f"base_model.model.{inner}"] = _sum(parameters[name], value)
            biased = True
        elif path not in saved:
            saved.add(path)
            for own, parameter in model.get_submodule(path).named_parameters():
                full = f"{path}.{own}"
                tensors[f"base_model.model.{full}"] = _sum(parameter, moved.get(full))
    return sorted(saved), biased


def _sum(weight: Tensor, delta: Tensor | None) -> Tensor:
    wide = weight.detach().cpu()
    return wide.clone() if delta is None else (wide.float() + delta).to(weight.dtype).contiguous()


def _adapter_config(rank: int, ranks: Mapping[str, int], saved: list[str], biased: bool) -> dict[str, Any]:
    """Scaling is 1 everywhere: alpha equals the rank of each layer."""
    short = {re.escape(path): own for path, own in ranks.items() if own != rank}
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": short,
        "alpha_pattern": short,
        "bias": "all" if biased else "none",
        "target_modules": sorted(ranks),
        "modules_to_save": saved or None,
        **{"lora_dropout": 0.0, "init_lora_weights": True, "use_rslora": False, "use_dora": False},
    }
