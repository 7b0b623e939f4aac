"""Choose the few-shot set: k examples of every class, at random or by their features.

A rule sees one class at a time as L2-normalised features and returns positions in it. Features come from
the base model's frozen encoder. The same seed gives the same picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradfix.errors import DataError, UsageError
from gradfix.registry import Registry

Features = NDArray[np.float64]
Selector = Callable[[Features, int, np.random.Generator], list[int]]

SELECTORS: Registry[Selector] = Registry("selector")
SPELLINGS = {"kmedoids": "k-medoids", "k_medoids": "k-medoids"}
BLOCK = 1024


def select(
    features: Tensor | NDArray[Any] | None,
    labels: Tensor | NDArray[Any] | Sequence[Any],
    per_class: int = 5,
    method: str = "herding",
    seed: int = 0,
    *,
    allow_fewer: bool = False,
) -> list[int]:
    """Indices of the chosen examples: classes in sorted order, picks in the order they were made.

    A class with fewer than `per_class` examples is an error, or taken whole with `allow_fewer`. `features`
    (samples first) may be None for `random`."""
    rule = SELECTORS[SPELLINGS.get(method, method)]
    if per_class < 1:
        raise UsageError(f"per_class must be at least 1, got {per_class}.")
    names = _plain(labels)
    if not names:
        raise DataError("there are no examples to select from.")
    if features is None and method != "random":
        raise UsageError(f"selector {method!r} needs features; only 'random' works without.")
    rows = _normalised(features, len(names))
    chosen: list[int] = []
    for number, (label, members) in enumerate(_classes(names).items()):
        if len(members) < per_class and not allow_fewer:
            raise DataError(
                f"class {label!r} has {len(members)} examples, {per_class} are wanted. "
                "Give more data or a smaller number, or allow fewer."
            )
        wanted = min(per_class, len(members))
        picks = rule(rows[members], wanted, np.random.default_rng([seed, number]))
        chosen += [int(members[pick]) for pick in picks]
    return chosen


def _plain(labels: Tensor | NDArray[Any] | Sequence[Any]) -> list[Any]:
    listed = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
    return [label.item() if isinstance(label, Tensor | np.generic) else label for label in listed]


def _classes(names: Sequence[Any]) -> dict[Any, NDArray[np.int64]]:
    try:
        order = sorted(set(names))
    except TypeError:
        raise DataError("labels mix kinds that cannot be ordered; use all text or all numbers.") from None
    members: dict[Any, list[int]] = {label: [] for label in order}
    for index, label in enumerate(names):
        members[label].append(index)
    return {label: np.array(indices) for label, indices in members.items()}


def _normalised(features: Tensor | NDArray[Any] | None, count: int) -> Features:
    if features is None:
        return np.zeros((count, 0))
    if isinstance(features, Tensor):
        features = features.detach().to("cpu", torch.float64).numpy()
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim < 2 or len(rows) != count:
        raise DataError(f"features of shape {rows.shape} do not match {count} labels: one row per example.")
    rows = rows.reshape(count, -1)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        raise DataError(f"example {bad[0]} has NaN or Inf features ({len(bad)} in all).")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


@SELECTORS.register("random")
def at_random(rows: Features, wanted: int, chance: np.random.Generator) -> list[int]:
    """Uniformly, without replacement."""
    return chance.permutation(len(rows))[:wanted].tolist()


@SELECTORS.register("herding")
def by_herding(rows: Features, wanted: int, chance: np.random.Generator) -> list[int]:
    """Greedily keep the running mean near the class mean: argmin_j |mu - (S + z_j) / t|.

    mu is the mean of the normalised features and is not normalised again. Picks are nested in k."""
    mean = rows.mean(axis=0)
    squares = np.square(rows).sum(axis=1)
    free = np.ones(len(rows), dtype=bool)
    missing = np.zeros_like(mean)
    picks: list[int] = []
    for _ in range(wanted):
        missing += mean
        cost = np.where(free, squares - 2 * rows @ missing, np.inf)
        pick = int(cost.argmin())
        missing -= rows[pick]
        free[pick] = False
        picks.append(pick)
    return picks


@SELECTORS.register("k-medoids")
def by_medoids(rows: Features, wanted: int, chance: np.random.Generator) -> list[int]:
    """Medoids that minimise the summed distance of the class to its nearest one, by FasterPAM.

    Starts from PAM's greedy BUILD, only ever improves on it, and leaves nothing to chance. Holds the
    class's distance matrix in float32. Returned in index order: medoids have no first."""
    import kmedoids

    if wanted == len(rows):
        return list(range(len(rows)))
    distances = np.empty((len(rows), len(rows)), dtype=np.float32)
    for first in range(0, len(rows), BLOCK):
        distances[first : first + BLOCK] = _distances(rows[first : first + BLOCK], rows)
    start = kmedoids.pam_build(distances, wanted).medoids
    found = kmedoids.fasterpam(distances, start, n_cpu=1).medoids
    best = min((start, found), key=lambda medoids: float(distances[:, medoids].min(axis=1).sum(dtype=np.float64)))
    return sorted(int(medoid) for medoid in best)


@SELECTORS.register("coreset")
def by_proximity(rows: Features, wanted: int, chance: np.random.Generator) -> list[int]:
    """The class's medoid first, then always the example nearest to any already chosen."""
    sums = np.concatenate([_distances(rows[i : i + BLOCK], rows).sum(axis=1) for i in range(0, len(rows), BLOCK)])
    picks = [int(sums.argmin())]
    nearest = np.full(len(rows), np.inf)
    while len(picks) < wanted:
        nearest = np.minimum(nearest, _distances(rows[picks[-1:]], rows)[0])
        nearest[picks] = np.inf
        picks.append(int(nearest.argmin()))
    return picks


def _distances(some: Features, rows: Features) -> Features:
    squared = np.square(some).sum(axis=1)[:, None] + np.square(rows).sum(axis=1) - 2 * some @ rows.T
    return np.sqrt(np.maximum(squared, 0))
