"""Alignment by permutation: bring base A's units into the order of target B's, then move its task vector.

`align(base, target)` finds the permutations, `Alignment.apply(tau)` moves the task vector with them."""

from gradfix.align.aligners import ALIGNERS, align, transfusion, weight_matching
from gradfix.align.alignment import Alignment
from gradfix.align.check import random_alignment, same_function_error

__all__ = [
    "ALIGNERS",
    "Alignment",
    "align",
    "random_alignment",
    "same_function_error",
    "transfusion",
    "weight_matching",
]
