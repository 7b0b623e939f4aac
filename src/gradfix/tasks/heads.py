"""Heads of transformers' classifiers: a checkpoint's own, one lent by another checkpoint, or a new one from a seed.

A peft adapter brings its head along. How many classes that head has is told by its tensors, never by the
config of the base it is put on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.tasks.loading import Home, Loaded, load_partly, read_json

OWN, LENT, NEW = "own", "lent", "new"  # where a head came from


class HeadMisfit(IncompatibleCheckpoints):
    """A head cannot be put on another model: it has another width, or other layers."""


@dataclass(frozen=True)
class HeadOptions:
    """Where a head comes from when the checkpoint has none of its own for these labels."""

    labels: Sequence[str]
    lender: Home | None = None
    new_head: int | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class Headed:
    """A complete classifier, and where its head came from."""

    model: Any
    notes: list[str]
    origin: str = OWN


def load_with_head(auto: Any, home: Home, options: HeadOptions) -> Headed:
    """The classifier with its own head; else with that of the lender, or with a new one.

    A lender's head replaces one of another number of classes, a new head one of other classes."""
    loaded = _load_own(auto, home)
    _refuse_gaps(home, loaded)
    if options.lender is not None and options.lender.source not in (home.source, home.folder):
        lender = _load_own(auto, options.lender)
        fitting = lender.model.config.num_labels == loaded.model.config.num_labels
        if loaded.missing or (not fitting and not lender.missing):
            return _borrowed(auto, home, options.lender, lender)
    elif options.new_head is not None and not (
        _complete(loaded) and answers_to(options.labels, class_names(loaded.model.config))
    ):
        return _renewed(auto, home, options.labels, options.new_head)
    _refuse_lost_pooler(home, loaded)
    if loaded.missing and options.lender is not None:
        raise _headless(home, options.lender)
    if loaded.missing:
        raise IncompatibleCheckpoints(
            f"{home} has no classification head (no {loaded.missing[0]!r}). Give a checkpoint that has one "
            "(head_from; for a transport --head copy), or train a new one (new_head; finetune --new-head)."
        )
    kept = ["the head already has these classes and was kept"] if options.new_head is not None else []
    return Headed(loaded.model, [*loaded.notes, *kept])


def class_names(config: Any) -> list[str]:
    """The classes of a model's head, in order."""
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def answers_to(labels: Sequence[str], names: Sequence[str]) -> bool:
    """Whether each label is a class; unnamed classes (LABEL_0, ...) answer to their number."""
    return set(labels) <= set(places(names))


def places(names: Sequence[str]) -> dict[str, int]:
    """The column of each class by name; unnamed classes go by their number as well."""
    found = {name: index for index, name in enumerate(names)}
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        found |= {str(index): index for index in range(len(names))}
    return found


def _load_own(auto: Any, home: Home) -> Loaded:
    """The checkpoint under as many classes as its own head has."""
    loaded = load_partly(auto, home)
    rows = {shape[0] for name, shape in loaded.misfits.items() if shape and not _inside(loaded, name)}
    if home.source != home.folder and len(rows) == 1:
        loaded = load_partly(auto, home, **_classes(_names_beside(home, rows.pop())))
    elif home.adapter is not None and not rows:  # as many classes as the base's config says, maybe by default
        config = loaded.model.config
        config.update(_classes(_names_beside(home, config.num_labels)))
    loaded.refuse_misfits(home)
    return loaded


def _names_beside(home: Home, count: int) -> dict[int, str]:
    """Names of an adapter's classes, where a config beside it tells them; adapters themselves keep none."""
    for folder in (home.adapter, home.folder):
        if folder is None or not (folder / "config.json").is_file():
            continue
        named = read_json(folder / "config.json").get("id2label")
        if isinstance(named, dict) and set(named) == set(map(str, range(count))):
            return {int(index): str(name) for index, name in named.items()}
    return {index: f"LABEL_{index}" for index in range(count)}


def _inside(loaded: Loaded, name: str) -> bool:
    return name.startswith(f"{loaded.model.base_model_prefix}.")


def _is_pooler(loaded: Loaded, name: str) -> bool:
    return name.startswith(f"{loaded.model.base_model_prefix}.pooler.")


def _complete(loaded: Loaded) -> bool:
    return not loaded.missing and not loaded.misfits


def _refuse_gaps(home: Home, loaded: Loaded) -> None:
    """A head may be missing; a part of the encoder may not."""
    inside = [name for name in loaded.missing if _inside(loaded, name) and not _is_pooler(loaded, name)]
    if inside:
        raise CorruptInput(
            f"{home} lacks {len(inside)} tensors, first {inside[0]!r}. The file is incomplete or of another model."
        )


def _refuse_lost_pooler(home: Home, loaded: Loaded) -> None:
    """A head that was trained on a pooler nobody kept is of no use on another one."""
    if not loaded.missing or not all(_is_pooler(loaded, name) for name in loaded.missing):
        return
    where = f"neither it nor {home.folder}" if home.adapter is not None else "it does not"
    hold = "holds" if home.adapter is not None else "hold"
    raise IncompatibleCheckpoints(
        f"the head of {home} was trained behind a pooler that {where} {hold} (no {loaded.missing[0]!r}): it was drawn at "
        "random and is lost. Train again with the pooler in modules_to_save, or save the whole model."
    )


def _headless(home: Home, lender: Home) -> IncompatibleCheckpoints:
    return IncompatibleCheckpoints(f"neither {home} nor {lender} has a classification head.")


def _classes(names: Mapping[int, str]) -> dict[str, Any]:
    return {"id2label": dict(names), "label2id": {name: index for index, name in names.items()}}


def _borrowed(auto: Any, home: Home, source: Home, lender: Loaded) -> Headed:
    """The checkpoint with the lender's head, and with its pooler where the checkpoint has none."""
    _refuse_lost_pooler(source, lender)
    if lender.missing:
        raise _headless(home, source)
    loaded = load_partly(auto, home, **_classes(lender.model.config.id2label))
    theirs, ours = dict(lender.model.named_parameters()), dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name in (*loaded.missing, *loaded.misfits):
            if name not in theirs or theirs[name].shape != ours[name].shape:
                raise HeadMisfit(f"the head of {source} does not fit {home}: tensor {name!r} differs.")
            ours[name].copy_(theirs[name])
    return Headed(loaded.model, [*loaded.notes, f"the head is that of {source}"], LENT)


def _renewed(auto: Any, home: Home, labels: Sequence[str], seed: int) -> Headed:
    """A fresh head for these labels; one that happens to have as many classes is forgotten."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loaded = load_partly(auto, home, **_classes(dict(enumerate(labels))))
        drawn = {name.rpartition(".")[0] for name in (*loaded.missing, *loaded.misfits)}
        prefix = loaded.model.base_model_prefix
        for name, module in loaded.model.named_modules():
            outside = name and name != prefix and not _inside(loaded, name)
            if outside and name not in drawn and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return Headed(loaded.model, [*loaded.notes, f"the head is new, drawn from seed {seed}"], NEW)
