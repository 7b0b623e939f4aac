"""A LoRA adapter seen as the full fine-tune it stands for.

`open_adapter` presents base + scaling * B @ A under the base's on-disk names, row by row while it is read,
so that no dense model is ever in memory. Every tensor of the adapter is used or named in an error: an
adapter that is understood only in part would give a wrong task vector without a word."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.adapter import check_base, conv1d_layers, layer_names, tied_tables
from gradfix.checkpoints.kinds import refuse_narrow, same_bytes
from gradfix.checkpoints.matched import TOKEN_TABLE
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, file_identity
from gradfix.checkpoints.weights import CHUNK, Checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
WRAPPERS = ("base_layer", "modules_to_save", "original_module")
# Options under which base + scaling * B @ A is not what the adapter computes.
REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "target_parameters": "target_parameters (LoRA on stacked experts)",
    "trainable_token_indices": "trainable tokens",
}
# These take a part out of the base before training: the base the adapter was trained on is not --base.
REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
FACTORS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "bias",
    "lora_embedding_A": "EA",
    "lora_embedding_B": "EB",
}
ADAPTED = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(\.weight|\.bias)?")
FOREIGN = re.compile(r"\b(lora_|hada_|lokr_|ia3_|vera_|oft_|token_adapter)")
REPEATED_GROUP = re.compile(r"\)[*+{]")
MERGE = "Merge it in peft (merge_and_unload, then save_pretrained) and give the merged model as --tuned."


@dataclass
class _Layer:
    """One adapted layer: the adapter's keys for it, and how they combine."""

    keys: dict[str, str] = field(default_factory=dict)  # A, B, EA, EB, bias -> key in the adapter file
    scaling: float = 1.0
    transposed: bool = False


class LoraCheckpoint(Checkpoint):
    """The base with an adapter merged in, tensor by tensor, when it is read."""

    def __init__(self, folder: Path, base: Checkpoint, weights: Checkpoint, config: Mapping[str, Any]) -> None:
        self.path = self.folder = folder
        self.base, self.weights = base, weights
        layers, full = _sort_keys(weights.names(), folder)
        self._tables = tied_tables(base, [*layers, *full])
        own = {name: name.removesuffix(".weight") + ".weight" for name in (*layers, *full)}
        own = {name: table for name, table in own.items() if table in self._tables and table not in base}
        places = own | layer_names(base, folder, *([n for n in some if n not in own] for some in (layers, full)))
        self._full = {places[name]: key for name, key in full.items()}
        self._deltas: dict[str, _Layer] = {}
        self._biases: dict[str, _Layer] = {}
        turned = conv1d_layers(base, config)
        for module, layer in layers.items():
            self._add(module, places[module], layer, config, turned)
        self._loaded: tuple[str, Tensor, Tensor] | None = None
        if self._tables and not self.unties():
            self._leave_copies()

    def _leave_copies(self) -> None:
        """An output table that was trained as one with the input table is stored once, as in the base."""
        for name in [name for name in self._tables if name not in self.base]:
            for held in (self._tables, self._full, self._deltas):
                held.pop(name, None)

    def _add(
        self, module: str, name: str, layer: _Layer, config: Mapping[str, Any], turned: Callable[[str], bool | None]
    ) -> None:
        if name in self._deltas:
            raise CorruptInput(f"{self.path}: two adapted layers stand for the same tensor {name!r}.")
        rows, columns, rank = self._factor_shapes(layer)
        expected = int(_by_pattern(config, "rank_pattern", module, config["r"]))
        if rank != expected:
            raise CorruptInput(f"{self.path}: layer {module!r} has rank {rank}, its config says {expected}.")
        alpha = float(_by_pattern(config, "alpha_pattern", module, config["lora_alpha"]))
        layer.scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        info = self._stored(name)
        refuse_narrow(self.base, name, info)
        size = (info.shape[0], info.numel // info.shape[0]) if info.shape and info.shape[0] else (0, 0)
        straight, crossed = size == (rows, columns), size == (columns, rows) and "A" in layer.keys
        if not straight and not crossed:
            raise IncompatibleCheckpoints(
                f"layer {module!r} of {self.path} adapts a {rows} x {columns} matrix, but {name!r} of {self.base} "
                f"is {list(info.shape)}. Is --base the model the adapter was trained on?"
            )
        layer.transposed = crossed
        if straight and crossed and "A" in layer.keys:
            known = turned(name)
            layer.transposed = bool(config.get("fan_in_fan_out")) if known is None else known
        self._deltas[name] = layer
        if "bias" in layer.keys:
            self._add_bias(name, layer, rows)

    def _add_bias(self, name: str, layer: _Layer, rows: int) -> None:
        bias = name.removesuffix("weight") + "bias"
        if bias not in self.base or self.base.info(bias).shape != (rows,):
            raise IncompatibleCheckpoints(f"{self.path} trains a bias for {name!r}, and {self.base} has none there.")
        self._biases[bias] = layer

    def _factor_shapes(self, layer: _Layer) -> tuple[int, int, int]:
        """Rows and columns of the dense update, and the rank between them."""
        shape = {part: self.weights.info(key).shape for part, key in layer.keys.items()}
        first, second = (shape["A"], shape["B"]) if "A" in shape else (shape["EA"], shape["EB"])
        fits = len(first) >= 2 and len(second) >= 2 and first[0] == second[1] and math.prod(second[2:]) == 1
        if not fits or 0 in (*first, *second):
            key = next(iter(layer.keys.values()))
            raise CorruptInput(f"{self.path}: the two factors of {key!r} do not fit each other.")
        wide, rank = math.prod(first[1:]), first[0]
        rows, columns = (second[0], wide) if "A" in shape else (wide, second[0])
        return rows, columns, rank

    def changed(self) -> list[str]:
        """The tensors that the adapter has a word in; all others are the base's own."""
        return list(dict.fromkeys([*self._deltas, *self._biases, *self._full, *self._tables]))

    def unties(self) -> bool:
        """Whether input and output table, one tensor in the base, are two in the fine-tune."""
        return any(not same_bytes(self, last, first) for last, first in self._tables.items())

    def factors(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Two matrices per adapted tensor whose product is its change; None where that is not all of the adapter."""
        if self._biases or self._full or any(TOKEN_TABLE.search(name) for name in self._deltas):
            return None
        found = {name: self._factors(layer, torch.float32) for name, layer in self._deltas.items()}
        return {name: (self._deltas[name].scaling * left, right) for name, (left, right) in found.items()}

    def names(self) -> list[str]:
        own = self.base.names()
        known = set(own)
        return [*own, *(name for name in dict.fromkeys([*self._full, *self._tables]) if name not in known)]

    def _home(self, name: str) -> tuple[Checkpoint, str]:
        """Who holds what is stored of a tensor, and its name there."""
        if name in self._full:
            return self.weights, self._full[name]
        return self.base, name if name in self.base else self._tables.get(name, name)

    def _stored(self, name: str) -> TensorInfo:
        stored, key = self._home(name)
        return stored.info(key)

    def info(self, name: str) -> TensorInfo:
        info = self._stored(name)
        if name in self._deltas or name in self._biases:
            return TensorInfo(info.shape, torch.promote_types(info.dtype, torch.float32))
        return info

    def span(self, name: str, first: int, count: int) -> Tensor:
        stored, key = self._home(name)
        piece = stored.span(key, first, count)
        if name not in self._deltas and name not in self._biases:
            return piece
        dtype = self.info(name).dtype
        if name in self._biases:
            layer = self._biases[name]
            left = self.weights.read(layer.keys["bias"]).to(dtype).view(-1, 1)
            right = torch.ones(1, 1, dtype=dtype)
        else:
            layer = self._deltas[name]
            if self._loaded is None or self._loaded[0] != name:
                self._loaded = name, *self._factors(layer, dtype)
            _, left, right = self._loaded
        return piece.to(dtype) + layer.scaling * flat_product(left, right, first, piece.numel())

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        if name in self._deltas or name in self._biases:
            return super().chunks(name, elements)
        stored, key = self._home(name)
        return stored.chunks(key, elements)

    def _factors(self, layer: _Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the update, unscaled, in the layout of the stored tensor."""
        if "A" in layer.keys:
            inner = self.weights.read(layer.keys["A"]).to(dtype).flatten(1)
            outer = self.weights.read(layer.keys["B"]).to(dtype).flatten(1)
            return (inner.T, outer.T) if layer.transposed else (outer, inner)
        inner, outer = (self.weights.read(layer.keys[part]).to(dtype) for part in ("EA", "EB"))
        return inner.T, outer.T

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        if name in self._deltas or name in self._biases:
            return None
        stored, key = self._home(name)
        return stored.stored(key)

    def identity(self) -> Any:
        parts = [self.base.identity(), self.weights.identity()]
        return None if None in parts else [*parts, file_identity(self.folder / CONFIG)]

    @property
    def files(self) -> list[Path]:
        return self.weights.files

    def __contains__(self, name: object) -> bool:
        return name in self.base or name in self._full or name in self._tables


def flat_product(left: Tensor, right: Tensor, first: int, count: int) -> Tensor:
    """Entries first .. first + count of `left @ right`, row by row; only the rows they lie in are computed."""
    columns = right.shape[1]
    top, bottom = first // columns, -(-(first + count) // columns)
    rows = (left[top:bottom] @ right).reshape(-1)
    start = first - top * columns
    return rows[start : start + count]


def factored_norm(factors: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """The norm of all products `left @ right` together."""
    squares = [
        float(((left.double().T @ left.double()) * (right.double() @ right.double().T)).sum())
        for left, right in factors.values()
    ]
    return float(max(sum(squares), 0.0) ** 0.5)


def open_adapter(folder: Path, base: Checkpoint, opener: Callable[[Path], Checkpoint]) -> LoraCheckpoint:
    """The fine-tune that a PEFT adapter folder stands for, as a checkpoint over `base`.

    Adapted tensors are given in float32 (or better), so the update is not rounded to the base's dtype. `opener`
    opens the files that the adapter names: its weights, and the base it was trained on."""
    folder = Path(folder)
    config = _read_config(folder)
    _refuse_others(folder, config)
    for file in WEIGHTS:
        if (folder / file).is_file():
            adapted = LoraCheckpoint(folder, base, opener(folder / file), config)
            adapted.notes = check_base(folder, base, config.get("base_model_name_or_path"), opener)
            return adapted
    raise CorruptInput(f"{folder} has a {CONFIG} and no weights: expected {WEIGHTS[0]} beside it.")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config["peft_type"] = str(config["peft_type"])
        if config["peft_type"].upper() == "LORA":
            config["r"], config["lora_alpha"] = int(config["r"]), float(config["lora_alpha"])
        for key in ("rank_pattern", "alpha_pattern"):
            config[key] = dict(config.get(key) or {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        raise CorruptInput(f"{path} is not a readable adapter config: it needs peft_type, r and lora_alpha.") from None
    return dict(config)


def _refuse_others(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config["peft_type"].upper()
    if kind != "LORA":
        raise UsageError(f"{folder} is a {kind} adapter; gradfix reads plain LoRA. {MERGE}")
    for option, name in REFUSED.items():
        if config.get(option):
            raise UsageError(f"{folder} uses {name}, which is more than base + B A. {MERGE}")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(REWRITES_BASE):
        raise UsageError(
            f"{folder} was started with init_lora_weights={start!r}, which changes the base's own weights. "
            "Convert it in peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )


def _sort_keys(keys: list[str], folder: Path) -> tuple[dict[str, _Layer], dict[str, str]]:
    """Adapted layers by module path, and tensors stored in full by module name."""
    layers: dict[str, _Layer] = {}
    full: dict[str, str] = {}
    for key in keys:
        path = key.removeprefix("base_model.model.")
        if "lora_magnitude_vector" in path:
            raise UsageError(f"{folder} holds {key!r}: DoRA. gradfix reads plain LoRA; merge it in peft first.")
        match = ADAPTED.fullmatch(path)
        if match:
            part = FACTORS.get(match.group(2) + (match.group(3) or ""))
            layer = layers.setdefault(_unwrapped(match.group(1)), _Layer())
            if part is None or part in layer.keys:
                raise CorruptInput(f"{folder}: cannot make sense of adapter tensor {key!r}.")
            layer.keys[part] = key
        elif path == key or FOREIGN.search(path):
            raise CorruptInput(f"{folder}: adapter tensor {key!r} is of no kind that gradfix knows; it would be lost.")
        else:
            full[_unwrapped(path)] = key
    for module, layer in layers.items():
        if set(layer.keys) - {"bias"} not in ({"A", "B"}, {"EA", "EB"}):
            raise CorruptInput(f"{folder}: layer {module!r} has only {sorted(layer.keys.values())}, half of a pair.")
    if not layers and not full:
        raise CorruptInput(f"{folder}: the adapter file holds no tensors.")
    return layers, full


def _unwrapped(path: str) -> str:
    """Without the names of the wrappers that peft puts around a layer."""
    parts = path.split(".")
    kept = [p for i, p in enumerate(parts) if p not in WRAPPERS and not (p == "default" and parts[i - 1] in WRAPPERS)]
    return ".".join(kept)


def _by_pattern(config: Mapping[str, Any], option: str, module: str, default: float) -> float:
    for pattern, value in config[option].items():
        try:
            if REPEATED_GROUP.search(pattern):  # could take for ever to match
                raise ValueError
            found, number = re.match(rf"(.*\.)?({pattern})$", module), float(value)
        except (re.error, ValueError, TypeError):
            raise CorruptInput(
                f"{option} of the adapter config holds {pattern!r}: {value!r}, which gradfix cannot read."
            ) from None
        if found:
            return number
    return default
