"""Labelled examples: loading, few-shot sets, folds, overlap checks."""

from gradfix.data.load import Dataset, load_data, load_unlabelled
from gradfix.data.rows import Row
from gradfix.data.splits import check_disjoint, few_shot, folds, in_turns, without_duplicates, without_overlap

__all__ = [
    "Dataset",
    "Row",
    "check_disjoint",
    "few_shot",
    "folds",
    "in_turns",
    "load_data",
    "load_unlabelled",
    "without_duplicates",
    "without_overlap",
]
