"""The paper's figures as data, by table, model, method and budget; accuracies in percent.

Every experiment prints these beside its own. Methods carry the names of `gradfix.methods.methods.METHODS`, so that a
lookup needs no translation. `None` is what the paper does not report."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

Key = tuple[str, int | None]

LABELS: Mapping[str, str] = {
    "transport_vision": "Tab. 1",
    "transport_text": "Tab. 2",
    "merging": "Tab. 3",
    "masks": "Tab. 4",
    "alpha_sensitivity": "Fig. alpha sensitivity",
    "sign_agreement": "Fig. sign agreement per block",
    "subset_selection": "Fig. subset selection",
    "random_task_vector": "Tab. random task vector",
    "generalisation": "Tab. generalisation",
    "seeds": "Tab. seeds (ViT-B/16, ViT-L/14)",
    "supervision": "Tab. supervision proportions",
    "flops": "App. computational cost",
    "alphas": "Tab. alphas",
}

VISION = ("eurosat", "svhn", "gtsrb", "resisc45", "dtd")
TEXT = ("snli", "mnli", "rte", "qnli", "scitail")
_SEED_ORDER = ("eurosat", "resisc45", "gtsrb", "svhn", "dtd")

_FIXED: Mapping[str, Mapping[str, tuple[float, ...]]] = {  # Tab. 1, order VISION
    "ViT-B-16": {
        "zero_shot": (49.41, 50.58, 48.29, 67.98, 55.96),
        "fine_tuned": (98.70, 97.45, 98.65, 95.66, 83.19),
        "naive": (49.58, 50.84, 49.31, 67.87, 56.27),
        "oracle": (95.06, 92.04, 82.92, 87.06, 71.44),
        "transfusion": (50.12, 53.26, 50.24, 67.99, 56.70),
    },
    "ViT-L-14": {
        "zero_shot": (62.80, 37.28, 56.12, 73.12, 63.35),
        "fine_tuned": (98.95, 97.80, 99.16, 97.06, 83.56),
        "naive": (62.77, 39.09, 56.03, 73.49, 63.56),
        "oracle": (96.75, 92.60, 88.65, 90.30, 72.66),
        "transfusion": (63.21, 37.38, 56.78, 73.36, 64.10),
    },
}

_Seeds = tuple[tuple[float, float], ...]  # (mean, deviation over seeds) per task in _SEED_ORDER
SEEDS: Mapping[str, Mapping[Key, _Seeds]] = {
    "ViT-B-16": {
        ("one_step", 1): ((56.61, 6.06), (69.25, 0.96), (56.08, 2.87), (61.32, 4.09), (56.21, 0.88)),
        ("gradfix", 1): ((61.94, 0.43), (70.05, 0.56), (60.88, 2.85), (71.07, 1.82), (58.32, 0.30)),
        ("one_step", 2): ((59.49, 1.43), (71.20, 1.13), (61.70, 0.76), (62.01, 4.40), (57.00, 0.54)),
        ("gradfix", 2): ((65.07, 1.10), (71.42, 0.90), (64.33, 1.05), (70.19, 4.55), (58.51, 0.10)),
        ("one_step", 5): ((61.99, 7.29), (73.01, 0.48), (63.08, 1.41), (67.03, 3.93), (59.65, 0.80)),
        ("gradfix", 5): ((66.05, 1.21), (71.57, 0.88), (66.61, 0.42), (73.59, 0.82), (60.02, 0.20)),
        ("one_step", 10): ((59.98, 3.77), (72.27, 1.65), (64.54, 1.12), (67.85, 1.02), (60.96, 0.33)),
        ("gradfix", 10): ((66.59, 1.83), (72.05, 0.59), (66.02, 1.59), (74.82, 1.22), (60.18, 0.40)),
        ("one_step", 20): ((60.59, 3.94), (74.22, 0.66), (65.51, 0.80), (67.19, 0.65), (62.59, 0.08)),
        ("gradfix", 20): ((67.05, 0.41), (72.29, 0.14), (66.42, 0.47), (74.11, 0.59), (60.92, 0.08)),
        ("one_step", 50): ((58.80, 2.45), (75.88, 0.83), (64.91, 0.53), (67.58, 2.91), (64.13, 0.11)),
        ("gradfix", 50): ((66.94, 0.46), (72.26, 0.22), (66.13, 0.14), (74.07, 1.52), (61.35, 0.03)),
    },
    "ViT-L-14": {
        ("one_step", 1): ((64.65, 5.90), (74.54, 0.57), (63.97, 4.50), (62.51, 4.58), (63.76, 0.27)),
        ("gradfix", 1): ((69.67, 1.44), (76.45, 1.33), (66.82, 0.84), (70.15, 5.18), (65.50, 0.74)),
        ("one_step", 2): ((70.76, 1.77), (76.62, 0.26), (69.91, 1.89), (45.23, 1.87), (64.97, 0.21)),
        ("gradfix", 2): ((74.10, 2.00), (76.97, 0.68), (71.55, 2.73), (54.31, 2.54), (66.10, 0.59)),
        ("one_step", 5): ((69.75, 1.64), (75.41, 2.94), (73.25, 0.62), (67.11, 2.39), (66.72, 0.13)),
        ("gradfix", 5): ((75.59, 2.24), (76.82, 0.48), (73.14, 1.23), (74.41, 2.22), (66.95, 0.69)),
        ("one_step", 10): ((70.36, 3.82), (78.07, 1.76), (74.11, 0.31), (60.43, 3.68), (69.36, 0.27)),
        ("gradfix", 10): ((73.74, 1.58), (77.59, 0.57), (74.94, 0.73), (75.88, 2.80), (67.41, 0.48)),
        ("one_step", 20): ((78.74, 2.96), (80.77, 1.17), (74.65, 0.28), (65.99, 2.12), (71.40, 0.35)),
        ("gradfix", 20): ((74.87, 0.71), (78.16, 0.33), (74.90, 0.55), (75.79, 0.90), (67.55, 0.24)),
        ("one_step", 50): ((77.07, 1.66), (82.16, 0.31), (75.38, 0.45), (67.83, 1.64), (73.81, 0.08)),
        ("gradfix", 50): ((74.75, 0.89), (78.27, 0.18), (74.61, 0.91), (76.79, 1.26), (67.77, 0.01)),
    },
}

_TEXT: Mapping[Key, tuple[float, ...]] = {  # Tab. 2, order TEXT
    ("zero_shot", None): (34.24, 35.21, 47.20, 50.54, 50.38),
    ("fine_tuned", None): (88.20, 86.30, 84.40, 92.79, 95.32),
    ("naive", None): (31.61, 30.75, 47.36, 50.52, 50.46),
    ("oracle", None): (58.69, 69.97, 72.93, 65.32, 62.38),
    ("one_step", 50): (35.09, 26.05, 47.29, 51.45, 51.78),
    ("gradfix", 50): (68.06, 49.68, 54.25, 60.50, 59.89),
}

_MASKS: Mapping[str, tuple[float, ...]] = {  # Tab. 4, one example per class, order _SEED_ORDER
    "oracle agree": (95.06, 87.06, 82.92, 92.04, 71.44),
    "oracle force": (97.95, 93.51, 95.94, 96.60, 80.59),
    "oracle magnitude": (49.92, 67.94, 51.63, 50.78, 56.01),
    "gradfix": (61.94, 70.05, 60.89, 71.07, 58.32),
    "force": (61.32, 70.10, 60.91, 70.52, 58.05),
    "magnitude": (49.51, 68.06, 49.20, 50.71, 56.03),
    "random": (49.49, 67.97, 48.41, 50.54, 56.06),
}

_RANDOM_VECTOR: Mapping[Key, tuple[float, ...]] = {  # order VISION
    ("random_tau", 1): (49.86, 51.43, 48.56, 68.06, 56.06),
    ("random_tau", 2): (50.07, 51.45, 48.64, 68.14, 56.05),
    ("random_tau", 5): (50.24, 51.79, 48.65, 68.11, 57.74),
}

# Tab. 3, order VISION: (setting, combiner, pipeline)
MERGING: Mapping[tuple[str, str, str], tuple[float, ...]] = {
    ("tasks", "single", "naive"): (49.58, 50.84, 49.31, 67.87, 56.27),
    ("tasks", "single", "gradfix"): (65.07, 70.19, 64.33, 71.42, 58.51),
    ("tasks", "task_arithmetic", "baseline"): (49.31, 50.99, 48.73, 68.05, 56.54),
    ("tasks", "task_arithmetic", "mask_then_merge"): (55.90, 71.56, 59.65, 71.40, 57.66),
    ("tasks", "task_arithmetic", "merge_then_mask"): (65.37, 72.10, 59.55, 71.16, 57.07),
    ("tasks", "ties", "baseline"): (49.15, 50.75, 48.95, 67.97, 56.54),
    ("tasks", "ties", "mask_then_merge"): (50.41, 64.28, 54.05, 69.51, 57.13),
    ("tasks", "ties", "merge_then_mask"): (65.62, 72.42, 62.73, 71.57, 57.77),
    ("sources", "task_arithmetic", "baseline"): (36.94, 35.09, 30.77, 50.54, 44.73),
    ("sources", "task_arithmetic", "mask_then_merge"): (65.96, 72.97, 65.80, 71.30, 61.01),
    ("sources", "task_arithmetic", "merge_then_mask"): (12.52, 15.94, 4.20, 3.97, 2.93),
    ("sources", "ties", "baseline"): (12.69, 10.39, 2.85, 5.81, 16.33),
    ("sources", "ties", "mask_then_merge"): (65.17, 72.58, 65.36, 71.40, 61.12),
    ("sources", "ties", "merge_then_mask"): (14.46, 15.94, 3.09, 3.35, 2.66),
}

# (task, support) accuracy per task, order VISION; the support set is ImageNet-R
GENERALISATION: Mapping[str, tuple[tuple[float, float], ...]] = {
    "base": ((49.08, 68.80), (47.00, 68.80), (43.37, 68.80), (58.94, 68.80), (47.50, 68.80)),
    "target": ((49.41, 79.78), (50.58, 79.78), (48.29, 79.78), (67.98, 79.78), (55.96, 79.78)),
    "base_tuned": ((98.58, 65.93), (93.59, 67.77), (98.23, 65.98), (92.43, 65.35), (79.04, 65.02)),
    "gradfix": ((67.80, 79.77), (69.74, 79.73), (65.23, 80.17), (72.14, 79.88), (59.63, 79.27)),
}

# dataset: (samples, classes, {examples per class: percent of the samples})
SUPERVISION: Mapping[str, tuple[int, int, Mapping[int, float]]] = {
    "eurosat": (27_000, 10, {1: 0.04, 2: 0.07, 5: 0.19, 10: 0.37, 20: 0.74, 50: 1.85}),
    "svhn": (73_257, 10, {1: 0.01, 2: 0.03, 5: 0.07, 10: 0.14, 20: 0.27, 50: 0.68}),
    "gtsrb": (39_209, 43, {1: 0.11, 2: 0.22, 5: 0.55, 10: 1.10, 20: 2.19, 50: 5.48}),
    "resisc45": (31_500, 45, {1: 0.14, 2: 0.29, 5: 0.71, 10: 1.43, 20: 2.86, 50: 7.14}),
    "dtd": (5_640, 47, {1: 0.83, 2: 1.66, 5: 4.15, 10: 8.30, 20: 16.60, 50: 41.49}),
    "snli": (570_000, 3, {50: 0.03}),
    "mnli": (433_000, 3, {50: 0.03}),
    "rte": (2_490, 2, {50: 4.02}),
    "qnli": (104_743, 2, {50: 0.10}),
    "scitail": (23_596, 2, {50: 0.42}),
}

# multiples of P, the number of weights; the paper counts one sample per pass
FLOPS: Mapping[str, float] = {"gradfix": 8, "one_step": 16, "fine_tuned": 32_000}

ALPHAS: Mapping[str, Mapping[str, float]] = {
    "ViT-B-16": dict(zip(VISION, (0.3, 0.3, 0.6, 0.2, 0.7), strict=True)),
    "ViT-L-14": dict(zip(VISION, (0.4, 0.5, 0.5, 0.2, 0.5), strict=True)),
    "T5": dict(zip(TEXT, (0.3, 0.1, 0.2, 0.1, 0.7), strict=True)),
}


def accuracies(model: str, method: str, shots: int | None = None) -> dict[str, float]:
    """Per task what the paper reports for a method (and budget) on a model; empty where it reports nothing."""
    if model == "T5":
        return _by_task(TEXT, _TEXT.get((method, shots)))
    if method in _FIXED.get(model, {}):
        return _by_task(VISION, _FIXED[model][method])
    if model == "ViT-B-16" and (method, shots) in _RANDOM_VECTOR:
        return _by_task(VISION, _RANDOM_VECTOR[method, shots])
    seeds = SEEDS.get(model, {}).get((method, shots))
    return _by_task(_SEED_ORDER, tuple(value for value, _ in seeds) if seeds else None)


def masks(strategy: str) -> dict[str, float]:
    """Tab. 4: ViT-B/16, one example per class."""
    return _by_task(_SEED_ORDER, _MASKS.get(strategy))


def merged(setting: str, combiner: str, pipeline: str) -> dict[str, float]:
    return _by_task(VISION, MERGING.get((setting, combiner, pipeline)))


def deviation(model: str, method: str, shots: int) -> float | None:
    """The deviation over seeds, averaged over the tasks."""
    seeds = SEEDS.get(model, {}).get((method, shots))
    return fmean(value for _, value in seeds) if seeds else None


def average(values: Mapping[str, float]) -> float | None:
    return fmean(values.values()) if values else None


def _by_task(tasks: tuple[str, ...], values: tuple[float, ...] | None) -> dict[str, float]:
    return dict(zip(tasks, values, strict=True)) if values else {}
