"""What an adapter belongs to: the base it was trained on, and for each adapted layer the tensor on disk.

A delta on the wrong base is a plausible-looking wrong model. Adapters written by gradfix carry the fingerprint of
their base and are held to it; for others the recorded name is compared, a local folder of that name is probed, and
what could not be checked is said in the notes.

Adapters speak the module names of the transformers release they were trained with. Those are the on-disk
names of most models; where they differ, or stand under another prefix, the model class itself is asked,
built without weights. A name that fits two tensors is an error, never a guess."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradfix._compat import heal_torchvision
from gradfix.checkpoints.matched import TOKEN_TABLE
from gradfix.checkpoints.names import NameMap, name_map
from gradfix.checkpoints.weights import Checkpoint
from gradfix.checkpoints.write import MANIFEST, read_manifest
from gradfix.errors import GradfixError, IncompatibleCheckpoints

PROBED = 64
CONV1D_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
WEIGHT_NAMES = (".weight", ".in_proj_weight")  # the second: torch's fused attention

Rename = Callable[[str], str | None]


def layer_names(base: Checkpoint, folder: Path, layers: list[str], full: list[str]) -> dict[str, str]:
    """On-disk names for adapted layers (module paths) and for tensors stored in full (tensor names).

    A full tensor that the base lacks is a new head and keeps its name; adapted layers must be in the base."""
    known = set(base.names())
    rename = _plain(layers or full, known) or _by_class(base, layers, known)
    if rename is None:
        _refuse_lost_pooler(base, folder, layers, known)
        raise IncompatibleCheckpoints(_complaint(base, folder, layers, known))
    places = {layer: rename(layer) or "" for layer in layers}
    return places | {name: _full_name(rename, name) for name in full}


def _full_name(rename: Rename, name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    found = rename(stem) if leaf in ("weight", "in_proj_weight") else None
    return found or rename(name) or name


def _plain(layers: list[str], known: set[str]) -> Rename | None:
    """The names as they are, or under the one prefix that finds them all."""
    found = {}
    for change in _prefix_changes(layers, known):
        rename = functools.partial(_look_up, change=change, known=known)
        places = tuple(rename(layer) for layer in layers)
        if None not in places and places not in found:
            found[places] = rename
            if change == ("", ""):
                return rename
    return next(iter(found.values())) if len(found) == 1 else None


def _look_up(name: str, change: tuple[str, str], known: set[str]) -> str | None:
    remove, add = change
    if not name.startswith(remove):
        return None
    stem = add + name.removeprefix(remove)
    return next((full for full in (stem, *(stem + leaf for leaf in WEIGHT_NAMES)) if full in known), None)


def _prefix_changes(layers: list[str], known: set[str]) -> list[tuple[str, str]]:
    """Prefixes to remove and to add; the empty change comes first."""
    changes = [("", "")]
    if not layers:
        return changes
    first = layers[0]
    ends = [first + leaf for leaf in WEIGHT_NAMES]
    changes += sorted({("", name[: -len(end)]) for end in ends for name in known if name.endswith("." + end)})
    parts = first.split(".")
    return changes + [(".".join(parts[:cut]) + ".", "") for cut in range(1, len(parts))]


def _by_class(base: Checkpoint, layers: list[str], known: set[str]) -> Rename | None:
    """Through the base's model class: module names, then the names its files have."""
    model = empty_model(base)
    if model is None:
        return None
    names: NameMap = name_map(model, known)
    on_disk = {module: disk for module, disk in names.renamed.items() if disk in known}
    inner = _plain(layers, set(on_disk))
    if inner is None:
        return None

    def rename(name: str) -> str | None:
        found = inner(name)
        return None if found is None else on_disk[found]

    return rename


def _refuse_lost_pooler(base: Checkpoint, folder: Path, layers: list[str], known: set[str]) -> None:
    """Where all but the pooler is found, the pooler was drawn at random for the training, and nobody kept it."""
    others = [layer for layer in layers if "pooler" not in layer.split(".")]
    if 0 < len(others) < len(layers) and (_plain(others, known) or _by_class(base, others, known)):
        lost = next(layer for layer in layers if layer not in others)
        raise IncompatibleCheckpoints(
            f"{folder} adapts the pooler ({lost!r}), which neither it nor {base} holds: it was drawn at random when the "
            "adapter was trained and is lost. Train again with the pooler in modules_to_save, or save the merged model."
        )


def _complaint(base: Checkpoint, folder: Path, layers: list[str], known: set[str]) -> str:
    for layer in layers:
        fits = sorted(name for name in known if any(name.endswith("." + layer + leaf) for leaf in WEIGHT_NAMES))
        if len(fits) > 1 and layer + ".weight" not in known:
            return (
                f"{folder} adapts layer {layer!r}, which could be {fits[0]!r} or {fits[1]!r} of {base}. "
                "Give the base as the folder the adapter was trained on, with its config.json."
            )
    lost = next((layer for layer in layers if not any(layer + leaf in known for leaf in WEIGHT_NAMES)), layers[0])
    return (
        f"{folder} adapts layer {lost!r}, which {base} does not have. Is --base the model the adapter was "
        "trained on? A stacked expert has no tensor of its own: merge such adapters in peft first."
    )


def base_config(base: Checkpoint) -> dict[str, Any]:
    """config.json beside the base's weights, or nothing."""
    if base.path is None:
        return {}
    folder = base.path if base.path.is_dir() else base.path.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(config) if isinstance(config, dict) else {}


def empty_model(base: Checkpoint) -> nn.Module | None:
    """The base's transformers class on the meta device: names and layer types, no weights."""
    module = getattr(base, "module", None)
    if module is not None:
        return module  # type: ignore[no-any-return]
    config = base_config(base)
    kinds = config.get("architectures") or []
    if not kinds or base.path is None:
        return None
    heal_torchvision()
    import transformers

    kind = getattr(transformers, str(kinds[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    folder = base.path if base.path.is_dir() else base.path.parent
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return kind(settings)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError):
        return None


def tied_tables(base: Checkpoint, named: Iterable[str]) -> dict[str, str]:
    """The output table that the base ties to its input table, by that table's name; asked only where `named` tensors
    or layers are tables. An adapter may train the two apart."""
    if not base_config(base).get("tie_word_embeddings", True):
        return {}
    if not any(TOKEN_TABLE.search(name) or TOKEN_TABLE.search(f"{name}.weight") for name in named):
        return {}
    model: Any = empty_model(base)
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    modules = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    first, last = (modules.get(id(table)) for table in (model.get_input_embeddings(), model.get_output_embeddings()))
    stored = name_map(model, base.names()).renamed
    return {} if first is None or last is None else {stored.get(last, last): stored.get(first, first)}


def conv1d_layers(base: Checkpoint, adapter: Mapping[str, Any]) -> Callable[[str], bool | None]:
    """Does a tensor belong to a layer that stores its weight transposed? None when nobody knows.

    Only a square weight needs this: for others the shapes tell. The adapter's own flag is one for all
    layers, and peft overrides it layer by layer, so the class is asked where such layers exist."""
    config = base_config(base)
    if config.get("model_type") not in CONV1D_FAMILIES and not adapter.get("fan_in_fan_out"):
        return lambda name: False if config else None

    @functools.cache
    def turned() -> set[str] | None:
        model = empty_model(base)
        if model is None:
            return None
        from transformers.pytorch_utils import Conv1D

        stems = [name + ".weight" for name, layer in model.named_modules() if isinstance(layer, Conv1D)]
        disk = name_map(model, base.names()).renamed
        return {disk[name] for name in stems}

    def ask(name: str) -> bool | None:
        found = turned()
        return None if found is None else name in found

    return ask


def peft_task(model: nn.Module) -> dict[str, Any]:
    """Which class of peft loads the folder: by its name for the task, or by the model's own class."""
    kind, module = type(model).__name__, type(model).__module__
    if not module.startswith("transformers."):
        return {"task_type": None}
    from transformers.models.auto import modeling_auto as auto

    classes = {
        "SEQ_CLS": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "SEQ_2_SEQ_LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "CAUSAL_LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for task, known in classes.items():
        if kind in known.values():
            return {"task_type": task}
    reads = getattr(model, "main_input_name", None) == "input_ids" and not hasattr(model, "get_image_features")
    if reads and kind in auto.MODEL_MAPPING_NAMES.values():
        return {"task_type": "FEATURE_EXTRACTION"}
    return {"task_type": None, "auto_mapping": {"base_model_class": kind, "parent_library": module}}


def check_base(
    folder: Path, base: Checkpoint, recorded: str | None, opener: Callable[[Path], Checkpoint]
) -> tuple[str, ...]:
    """Raise when the base is shown to be another one; otherwise say what is not certain."""
    expected = _fingerprint_of(folder)
    if expected is not None:
        if base.fingerprint() != expected:
            raise IncompatibleCheckpoints(
                f"{folder} was written for other weights than {base}: their fingerprints differ. "
                "Give the base that its gradfix.json names."
            )
        return ()
    if not recorded:
        return (f"{folder.name} does not say which base it was trained on; only shapes were checked",)
    if _same_place(recorded, base):
        return ()
    place = Path(str(recorded))
    if place.is_dir() and base.path is not None:
        _compare(folder, base, place, opener)
        return ()
    return (
        f"{folder.name} was trained on {str(recorded)[:200]!r}; that {base} holds the same weights was not "
        "checked beyond names and shapes",
    )


def _fingerprint_of(folder: Path) -> str | None:
    if not (folder / MANIFEST).is_file():
        return None
    found = read_manifest(folder).get("base_fingerprint")
    return str(found) if found else None


def _same_place(recorded: str, base: Checkpoint) -> bool:
    if base.path is None:
        return False
    try:
        if os.path.samefile(recorded, base.path):
            return True
    except (OSError, ValueError):
        pass
    # a hub id, against the hub cache's folder name or a folder called like the model
    parts = base.path.parts
    return "models--" + str(recorded).replace("/", "--") in parts


def _compare(folder: Path, base: Checkpoint, place: Path, opener: Callable[[Path], Checkpoint]) -> None:
    """Probe the first values of every tensor of the folder that the adapter names."""
    try:
        named = opener(place)
    except GradfixError:
        return
    known = set(named.names())
    for name in base.names():
        if name not in known or not base.info(name).numel:
            continue
        ours, theirs = next(base.chunks(name, PROBED)), next(named.chunks(name, PROBED))
        if base.info(name).shape != named.info(name).shape or not torch.allclose(
            ours.double(), theirs.double(), rtol=0.02, atol=1e-5
        ):
            raise IncompatibleCheckpoints(
                f"{folder} was trained on {place}, and tensor {name!r} of {base} holds other values. "
                "Give that folder as --base."
            )
