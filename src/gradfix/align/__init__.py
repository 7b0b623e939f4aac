"""Alignment by permutation: bring base A's units into the order of target B's, then move its task vector.

`align(base, target)` finds the permutations, `Alignment.apply(tau)` moves the task vector with them."""

from gradfix.align.alignment import ALIGNERS, Alignment, align, transfusion, weight_matching

__all__ = ["ALIGNERS", "Alignment", "align", "transfusion", "weight_matching"]
