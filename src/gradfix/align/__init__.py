"""Bring base A's units to those of target B, by permutations or by maps between them, and move its task vector along.

`align(base, target)` finds the permutations, `Alignment.apply(tau)` moves the task vector with them."""

from gradfix.align.alignment import ALIGNERS, Alignment, align, transfusion, weight_matching

__all__ = ["ALIGNERS", "Alignment", "align", "transfusion", "weight_matching"]
